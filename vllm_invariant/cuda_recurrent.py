# In a vLLM branch: vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py.
"""The recurrent arithmetic in the CUDA engine's GDN layers.

All rows of a step, cached or not, take one convolution and one recurrence.  The recurrence is the
compiled library's, or its Triton twin where the library was not built; the two differ in bits, so an
engine uses one of them for good.
"""

import logging
from functools import cache
from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from vllm_invariant.ops import conv_triton, recurrent_cuda, recurrent_triton

logger = logging.getLogger("vllm.vllm_invariant")


@cache
def recurrence() -> Any:
    """The ``recurrent_step`` of this process, named in the log once."""
    if recurrent_cuda.is_available():
        logger.info("Recurrent GDN arithmetic by %s.", recurrent_cuda.LIBRARY.name)
        return recurrent_cuda.recurrent_step
    logger.warning(
        "Recurrent GDN arithmetic by the Triton kernel, which is slower: %s was not built for this GPU. "
        "Its bits differ from the library's.",
        recurrent_cuda.LIBRARY.name,
    )
    return recurrent_triton.recurrent_step


def check(key_dim: int, value_dim: int) -> None:
    """Judge a model's heads before anything runs.

    Raises:
        ValueError: if the chosen recurrence does not take them.

    """
    built = recurrent_cuda.is_available()
    heads = {(recurrent_cuda.HEAD_DIM,) * 2} if built else set(recurrent_triton.LAUNCH)
    if (key_dim, value_dim) not in heads:
        known = ", ".join(f"{k}x{v}" for k, v in sorted(heads))
        raise ValueError(
            f"the recurrent GDN arithmetic has no kernel for heads of {key_dim}x{value_dim} "
            f'(known: {known}); use gdn_arithmetic="chunk"'
        )


def run(
    layer: Any, metadata: Any, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor
) -> None:
    """Convolution and recurrence of one step.

    Args:
        layer: stock's GDN layer, with its caches.
        metadata: stock's GDN metadata of the step, padded rows included where a CUDA graph pads them.
        mixed_qkv: (tokens, q + k + v channels) bf16.
        b, a: (tokens, value heads) bf16.
        out: (tokens, value heads, head_v_dim), written.

    """
    starts = metadata.non_spec_query_start_loc
    slots = metadata.non_spec_state_indices_tensor.contiguous()  # else a column of the block table
    tokens = slice(0, metadata.num_actual_tokens)
    conv_pool, state_pool = layer.kv_cache
    if is_conv_state_dim_first():
        conv_pool = conv_pool.transpose(1, 2)
    begun = metadata.has_initial_state  # None in a step of cached rows only: they never start from nothing
    qkv = conv_triton.causal_conv1d(
        mixed_qkv[tokens],
        layer.conv1d.weight.view(-1, layer.conv_kernel_size),
        layer.conv1d.bias,
        conv_pool,
        slots=slots,
        cu_seqlens=starts,
        has_initial_state=begun,
    )
    recurrence()(
        qkv,
        a[tokens],
        b[tokens],
        layer.A_log,
        layer.dt_bias,
        state_pool,
        out[tokens],
        slots=slots,
        max_query_len=metadata.longest,
        cu_seqlens=starts,
        has_initial_state=begun,
    )
