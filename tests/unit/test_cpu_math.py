"""MKL's first calls.  The race shows in one boot of hundreds, so it is only seen here that it is avoided."""

from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_invariant import cpu_math


class Calls(TorchDispatchMode):
    """Records (function, elements, dtype) of the calls inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, int, torch.dtype]] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if args and isinstance(args[0], torch.Tensor):
            self.seen.add((function.overloadpacket.__name__, args[0].numel(), args[0].dtype))
        return function(*args, **(kwargs or {}))


def test_each_function_is_called_on_one_element() -> None:
    """Whatever the default type of the process is: vLLM builds a model under bfloat16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with Calls() as calls:
            cpu_math.settle()
    finally:
        torch.set_default_dtype(before)
    for dtype in (torch.float32, torch.float64):
        assert {(name, 1, dtype) for name in cpu_math.FUNCTIONS} <= calls.seen


def test_the_list_is_that_of_this_pytorch() -> None:
    """Its header names every function that goes to MKL."""
    header = Path(torch.__file__).parent / "include/ATen/cpu/vml.h"
    if not header.is_file():
        pytest.skip("this PyTorch comes without headers")
    lines = header.read_text().splitlines()
    named = {line.split("(")[1].split(",")[0] for line in lines if line.startswith("IMPLEMENT_VML_MKL(")}
    assert named <= set(cpu_math.FUNCTIONS)
