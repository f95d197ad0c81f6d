# In a vLLM branch: vllm/model_executor/determinism/batch_invariant.py, linear_batch_invariant.
"""Linear layers of a CUDA worker: vLLM's bits, by tiles that follow the number of rows."""

import functools
from typing import Any

import torch

from vllm_invariant.ops.linear_launch import Launch


def by_rows(launch: Launch) -> Any:
    """A wrapper of stock's ``linear_batch_invariant``, for what ``launch`` is for; see `ops.linear_triton`.

    Stock computes what has a bias or is not of bfloat16.
    """
    from vllm_invariant.ops.linear_triton import linear

    def wrap(stock: Any) -> Any:
        @functools.wraps(stock)
        def linear_batch_invariant(
            input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            half = input.dtype == torch.bfloat16 and weight.dtype == torch.bfloat16
            if bias is None and half and weight.is_contiguous() and input.stride(-1) == 1:
                return linear(input, weight, launch)
            return stock(input, weight, bias)

        return linear_batch_invariant

    return wrap
