# In a vLLM branch: vllm/v1/worker/cpu_worker.py.
"""MKL's vector functions, settled before threads share them.

PyTorch hands each thread's share of a float tensor to MKL, which picks a function's kernel at its first call
in a process.  If that call comes from several threads at once, one of them may run the least accurate kernel,
with 11 good bits, for its whole share (pytorch/pytorch issue 188792).  A model's rotary table then differs in
one boot of some hundred.  It was seen once: a request's rows differed at 103 of 401 positions, all of them
among the 105 at which that kernel's cosines round to other bfloat16 values.  One call with one element leaves
nobody to race with.
"""

import torch

# Those that ATen/cpu/vml.h sends to MKL.
FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "log"),
    *("log10", "log2", "sin", "sqrt", "tan", "tanh", "trunc"),
)


def settle() -> None:
    """Call each function once, on one element, in both precisions."""
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in FUNCTIONS:
            getattr(torch, name)(one)
