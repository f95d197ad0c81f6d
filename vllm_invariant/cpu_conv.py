# In a vLLM branch: vllm/model_executor/layers/mamba/ops/cpu/gdn_attention.py.
"""A prefill of one token for stock's CPU convolution.

The layer cuts its input out of a wider projection and calls ``contiguous()`` on it.  For a single row
that does nothing: torch calls any single row contiguous, whatever its row stride, and the row keeps
the projection's.  Stock's C++ kernel reads that stride and refuses a step whose only prefill row is a
prompt's last token (length = 1 mod 64), or a prompt of one token.
"""

import functools
from typing import Any

import torch


def accept_one_token(stock: Any) -> Any:
    """Wrap stock's prefill convolution so that it also takes one token."""

    @functools.wraps(stock)
    def causal_conv1d(*, x: torch.Tensor, **rest: Any) -> torch.Tensor:
        """``x``: (dim, tokens), a transposed view of (tokens, dim)."""
        if x.size(1) == 1:
            # A clone gets fresh strides; contiguous() would not.
            x = x.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1)
        return stock(x=x, **rest)

    return causal_conv1d
