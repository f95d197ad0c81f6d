# In a vLLM branch: vllm/model_executor/layers/mamba/ops/cpu/gdn_attention.py.
"""A prefill of one token for stock's CPU convolution.

Stock's C++ kernel wants its input as a transposed (dim, tokens) view and recognises one by its not
being contiguous.  A view of one token is both, so the kernel rejects a step whose only prefill row
is a prompt's last token (length = 1 mod 64), or a prompt of one token.
"""

import functools
from typing import Any

import torch


def accept_one_token(stock: Any) -> Any:
    """Wrap stock's prefill convolution so that it also takes one token.

    The token is run beside a throw-away sequence of one token, on a copy of its state, so that the
    same kernel computes it.  Rows of other sequences do not enter a row's convolution.
    """

    @functools.wraps(stock)
    def causal_conv1d(
        *,
        x: torch.Tensor,  # (dim, tokens)
        conv_states: torch.Tensor,  # (slots, dim, width - 1), the dim axis innermost in memory
        query_start_loc: torch.Tensor,  # (sequences + 1,)
        cache_indices: torch.Tensor,  # (sequences,)
        has_initial_state: torch.Tensor,  # (sequences,) bool
        **rest: Any,
    ) -> torch.Tensor:
        if x.size(1) != 1:
            return stock(
                x=x,
                conv_states=conv_states,
                query_start_loc=query_start_loc,
                cache_indices=cache_indices,
                has_initial_state=has_initial_state,
                **rest,
            )
        slot = cache_indices[:1].long()
        # index_select on the transposed view keeps the memory order the kernel expects.
        scratch = conv_states.transpose(1, 2).index_select(0, slot.repeat(2)).transpose(1, 2)
        out = stock(
            x=x.transpose(0, 1).repeat(2, 1).transpose(0, 1),
            conv_states=scratch,
            query_start_loc=torch.arange(3, dtype=query_start_loc.dtype),
            cache_indices=torch.arange(2, dtype=cache_indices.dtype),
            has_initial_state=has_initial_state[:1].repeat(2),
            **rest,
        )
        conv_states.index_copy_(0, slot, scratch[:1])
        return out[:, :1]

    return causal_conv1d
