"""Engines, one at a time, in this process."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import device
from tests.harness.engine import Engines

# vLLM reads some of these while it is imported, so a fixture would set them too late.
os.environ.update(device.ENVIRONMENT)


@pytest.fixture(scope="session")
def engines(checkpoint: Path) -> Iterator[Engines]:
    """Builds engines on the tiny checkpoint and remembers SOLO results."""
    builder = Engines(checkpoint)
    yield builder
    builder.close()
