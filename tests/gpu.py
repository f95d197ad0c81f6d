"""Marks of tests that need an NVIDIA GPU, and of those for the CPU engine alone."""

import pytest
import torch

from tests.harness import device

GPU = (pytest.mark.gpu, pytest.mark.skipif(device.NAME != "cuda", reason="needs an NVIDIA GPU"))
TWO_GPUS = (*GPU, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"))
CPU = (pytest.mark.skipif(device.NAME != "cpu", reason="for the CPU engine"),)

# For a test of either engine: one case a machine, so that the GPU's case is counted where it cannot run.
on_either = pytest.mark.parametrize(
    "machine", [pytest.param("cpu", marks=CPU), pytest.param("cuda", marks=GPU)]
)
