# In a vLLM branch: vllm/model_executor/layers/mamba/ops/cpu/gdn_attention.py.
"""The recurrent arithmetic in the CPU engine's GDN layers.

Stock's core runs cached rows by one set of kernels and prompts by another.  A layer that asks for the
recurrent arithmetic takes all rows of a step, cached or not, through one convolution and one recurrence.
"""

import functools
from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from vllm_invariant.arithmetic import CHUNK
from vllm_invariant.ops import recurrent_torch


def one_recurrence(stock: Any) -> Any:
    """Wrap stock's core of one step without speculation."""

    @functools.wraps(stock)
    def core(
        layer: Any,
        attn_metadata_i: Any,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        if getattr(layer, "arithmetic", CHUNK).decode_equals_prefill:
            run(layer, attn_metadata_i, mixed_qkv, b, a, core_attn_out)
        else:
            stock(layer, attn_metadata_i, mixed_qkv, b, a, core_attn_out)

    return core


def run(
    layer: Any, metadata: Any, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor
) -> None:
    """Convolution and recurrence of one step.

    Args:
        layer: stock's GDN layer, with its caches.
        metadata: stock's GDN metadata of the step.
        mixed_qkv: (tokens, q + k + v channels) bf16.
        b, a: (tokens, value heads) bf16.
        out: (tokens, value heads, head_v_dim), written.

    """
    sequences = metadata.num_decodes + metadata.num_prefills
    starts = metadata.non_spec_query_start_loc[: sequences + 1].tolist()
    slots = metadata.non_spec_state_indices_tensor[:sequences].tolist()
    # Only a step with prefills says which rows start from nothing: cached rows never do.
    begun = metadata.has_initial_state
    continues = [True] * sequences if begun is None else begun[:sequences].tolist()
    conv_pool, state_pool = layer.kv_cache
    if is_conv_state_dim_first():
        conv_pool = conv_pool.transpose(1, 2)
    places, heads, value_dim, key_dim = state_pool.shape

    tokens = slice(0, starts[-1])
    qkv = recurrent_torch.causal_conv1d(
        mixed_qkv[tokens], _conv_weight(layer), layer.conv1d.bias, conv_pool, starts, slots, continues
    )
    q, k, v = qkv.split([layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
    out[tokens] = recurrent_torch.recurrent_gated_delta_rule(
        q.reshape(len(q), -1, layer.head_k_dim),
        k.reshape(len(k), -1, layer.head_k_dim),
        v.reshape(len(v), -1, layer.head_v_dim),
        a[tokens],
        b[tokens],
        layer.A_log,
        layer.dt_bias,
        state_pool.view(places, heads, key_dim, value_dim),  # as stock's CPU kernels lay a state out
        starts,
        slots,
        continues,
    )


def _conv_weight(layer: Any) -> torch.Tensor:
    """(channels, taps), before stock packs it for its own kernel."""
    weight = getattr(layer.conv1d, "_cpu_unpacked_conv_weight", None)
    return layer.conv1d.weight.reshape(-1, layer.conv_kernel_size) if weight is None else weight
