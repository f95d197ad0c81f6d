"""Drivers of schedulers that share one engine config."""

from collections.abc import Callable
from typing import Any

import pytest

from tests import properties
from tests.scheduler.build import Driver

properties.load_profile()


@pytest.fixture(scope="session")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Driver]:
    """Builds a `Driver` from fields of `Options`."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    folder = tmp_path_factory.mktemp("config")

    def build(**fields: Any) -> Driver:
        return Driver(folder, **fields)

    return build
