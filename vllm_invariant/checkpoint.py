# In a vLLM branch: vllm/model_executor/layers/mamba/checkpoint.py.
"""The state inside a prefill, saved without a cut.

Stock lets a backend save the state at one place inside a prompt's last chunk, and then schedules that
chunk whole instead of stopping there; only its FlashInfer prefill can.  FLA's chunk kernels can too: the
one that carries the state from chunk to chunk runs once more, over the part before the place, with the
inputs it already had.  A cut on the grid is exact, so the state has the bits that a stop would have given.
"""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_invariant.arithmetic import CHUNK


@dataclass
class Places:
    """Where states are saved, as sequences for the state kernel, and the states.

    Every prefill row is two sequences: its tokens before the place, and the rest, whose result is not used.

    Attributes:
        cu_seqlens: (2 * rows + 1,) int32, on the device.
        chunk_indices, chunk_offsets: of these sequences, as FLA's kernels take them.
        states: (rows, value heads, head_v_dim, head_k_dim) float32 of the layer that ran last: after the
            tokens before each row's place, or the state it started from where the row has none.

    """

    cu_seqlens: torch.Tensor
    chunk_indices: torch.Tensor
    chunk_offsets: torch.Tensor
    states: torch.Tensor | None = None


def find_places(offsets: list[int], query_lens: list[int], device: torch.device) -> Places:
    """Sequences that end at the places.

    Args:
        offsets: tokens of each prefill row before its place, whole chunks; 0 for no place.
        query_lens: tokens of each prefill row.
        device: of the kernels.

    """
    from vllm.third_party.flash_linear_attention.ops.index import prepare_chunk_indices, prepare_chunk_offsets
    from vllm.utils.torch_utils import async_tensor_h2d

    ends = [0]
    for offset, length in zip(offsets, query_lens, strict=True):
        ends += [ends[-1] + offset, ends[-1] + length]
    cu_seqlens = torch.tensor(ends, dtype=torch.int32)
    return Places(
        async_tensor_h2d(cu_seqlens, device=device),
        async_tensor_h2d(prepare_chunk_indices(cu_seqlens, CHUNK.grid), device=device),
        async_tensor_h2d(prepare_chunk_offsets(cu_seqlens, CHUNK.grid), device=device),
    )


def of_prefills(checkpoint: Any, first: int, count: int) -> Any:
    """Stock's ``MambaPrefillCheckpointMetadata`` of a whole step, for its prefill rows only.

    Returns:
        None if no prefill row saves a state.

    """
    rows = slice(first, first + count)
    if checkpoint is None or not any(checkpoint.offsets[rows]):
        return None
    per_row = ("checkpoint_offsets", "state_indices", "offsets", "query_lens", "request_rows", "block_cols")
    return replace(checkpoint, **{name: getattr(checkpoint, name)[rows] for name in per_row})


_wanted: Places | None = None


@contextlib.contextmanager
def saving(places: Places) -> Iterator[None]:
    """The chunk rule of this block also fills ``places.states``."""
    global _wanted
    _wanted = places
    try:
        yield
    finally:
        _wanted = None


def keep_states(stock: Any) -> Any:
    """Wraps ``chunk_gated_delta_rule_fwd_h``, the kernel that carries the state from chunk to chunk."""

    @functools.wraps(stock)
    def fwd_h(**inputs: Any) -> Any:
        if _wanted is not None:
            # Before the call itself, so that the per-chunk states of this one, which nobody needs, are
            # memory that the call can take again.
            changes: dict[str, Any] = {
                "initial_state": inputs["initial_state"].repeat_interleave(2, dim=0),
                "save_new_value": False,
                "cu_seqlens": _wanted.cu_seqlens,
                "chunk_indices": _wanted.chunk_indices,
                "chunk_offsets": _wanted.chunk_offsets,
            }
            *_, states = stock(**(inputs | changes))
            _wanted.states = states[::2]
        return stock(**inputs)

    return fwd_h
