"""Engines, one at a time, in this process."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.harness import device
from tests.harness.engine import Engines

# vLLM reads some of these while it is imported, so a fixture would set them too late.
os.environ.update(device.ENVIRONMENT)

# Stock's CPU attention splits its work among threads, and vLLM's CPU worker puts a dummy in this one's place.
_set_threads, _THREADS = torch.set_num_threads, torch.get_num_threads()


@pytest.fixture(autouse=True)
def _all_threads() -> None:
    """What another test left of them decides whether a rule that is turned off can be seen."""
    _set_threads(_THREADS)


@pytest.fixture(scope="session")
def engines(checkpoint: Path) -> Iterator[Engines]:
    """Builds engines on the tiny checkpoint and remembers SOLO results."""
    builder = Engines(checkpoint)
    yield builder
    builder.close()
