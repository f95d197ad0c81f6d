# In a vLLM branch: vllm/v1/attention/backends/cpu_attn.py.
"""Batch-invariant attention for the CPU engine.

Stock's CPU kernel tiles the whole batch at once, so the tile a query row falls into, and with it
the order in which that row's softmax is accumulated, follows whoever else is in the step.  Here
the same kernel is called once per *tile*: query rows of one request, cut at absolute token positions
that are multiples of the GDN arithmetic's grid, with no split over keys.  Chunk ends lie on the same
grid, so a row's tile depends on nothing but its request.  A grid of one token gives one row a call, and
then a row is computed alike in prefill and in decode.
"""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_invariant import grid
from vllm_invariant.config import InvariantConfig


@dataclass
class Tile:
    """One kernel call.

    Attributes:
        start, end: rows of the step's flattened token axis.
        metadata: what the kernel would be given if these rows were the whole batch.

    """

    start: int
    end: int
    metadata: CPUAttentionMetadata


@dataclass
class TiledCPUAttentionMetadata(CPUAttentionMetadata):
    """Stock metadata of the whole step, and its tiles."""

    tiles: list[Tile] = field(default_factory=list)


def tile_rows(computed: int, rows: int, tile: int) -> list[tuple[int, int]]:
    """Split ``rows`` query rows that follow ``computed`` tokens at absolute multiples of ``tile``.

    Returns:
        (first row, last row + 1) pairs, relative to the request's first row.

    """
    position, end = computed, computed + rows
    pieces = []
    while position < end:
        stop = min(grid.next_stop(position, tile), end)
        pieces.append((position - computed, stop - computed))
        position = stop
    return pieces


class TiledCPUAttentionBackend(CPUAttentionBackend):
    """CPU attention, one kernel call per tile of one request."""

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @staticmethod
    def get_impl_cls() -> type["TiledCPUAttentionImpl"]:
        return TiledCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type["TiledCPUAttentionMetadataBuilder"]:
        return TiledCPUAttentionMetadataBuilder


class TiledCPUAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds stock metadata for the step, then one more for each tile."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> TiledCPUAttentionMetadata:
        step = super().build(common_prefix_len, common_attn_metadata, fast_build)
        tile = InvariantConfig.from_additional_config(self.vllm_config.additional_config).arithmetic.grid
        starts = common_attn_metadata.query_start_loc_cpu.tolist()
        lengths = step.seq_lens.tolist()
        tiles = []
        for i, (first, last) in enumerate(pairwise(starts)):
            computed = lengths[i] - (last - first)
            for begin, end in tile_rows(computed, last - first, tile):
                metadata = self._tile_metadata(step, i, computed + end, end - begin)
                tiles.append(Tile(first + begin, first + end, metadata))
        return TiledCPUAttentionMetadata(**vars(step), tiles=tiles)

    def _tile_metadata(
        self, step: CPUAttentionMetadata, request: int, seq_len: int, rows: int
    ) -> CPUAttentionMetadata:
        query_start_loc = torch.tensor([0, rows], dtype=step.query_start_loc.dtype)
        seq_lens = torch.tensor([seq_len], dtype=step.seq_lens.dtype)
        return replace(
            step,
            num_actual_tokens=rows,
            max_query_len=rows,
            query_start_loc=query_start_loc,
            max_seq_len=seq_len,
            seq_lens=seq_lens,
            block_table=step.block_table[request : request + 1],
            scheduler_metadata=ops.cpu_attn_get_scheduler_metadata(
                num_reqs=1,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                seq_lens=seq_lens,
                dtype=self.dtype,
                query_start_loc=query_start_loc,
                causal=step.causal,
                sliding_window_size=self.window_size,
                isa=self.isa,
                enable_kv_split=False,
                kv_cache_dtype=self.kv_cache_dtype,
            ),
        )


class TiledCPUAttentionImpl(CPUAttentionBackendImpl):
    """Runs stock's forward on each tile in turn."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TiledCPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend.  ``query``, ``output``: (tokens, heads, head_size); keys and values of the step
        are already in ``kv_cache``."""
        if attn_metadata is None:  # warm-up
            return output
        for tile in attn_metadata.tiles:
            rows = slice(tile.start, tile.end)
            super().forward(
                layer,
                query[rows],
                key[rows],
                value[rows],
                kv_cache,
                tile.metadata,
                output[rows],
                output_scale,
                output_block_scale,
            )
        return output
