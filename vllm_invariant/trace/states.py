# In a vLLM branch: not needed (a tool for users).
"""Checksums of what a request keeps in the cache: states of GDN layers, keys and values of attention."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_invariant.trace.digest import row_digests
from vllm_invariant.trace.record import KEYS_AND_VALUES, STATES


@dataclass(frozen=True)
class Kept:
    """Something in the cache.

    Attributes:
        site: the layer's dotted name.
        tensor: one of `STATES`, or `KEYS_AND_VALUES`.
        positions: (rows,) of a state, the last token it holds; of keys and values, their tokens.
        value: (rows, ...) the cache's own bytes.
        where: slot or blocks.

    """

    site: str
    tensor: str
    positions: np.ndarray
    value: torch.Tensor
    where: str

    def digests(self) -> torch.Tensor:
        """(rows,) int64."""
        return row_digests(self.value, len(self.positions))


def layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Layers that keep something in the cache, by dotted name."""
    return {
        name: module
        for name, module in model.named_modules()
        if getattr(module, "kv_cache", None) is not None
    }


def states(name: str, layer: Any, metadata: Any, index: int, tokens: int) -> Iterator[Kept]:
    """A GDN layer's states of one request after ``tokens`` tokens.

    Args:
        name: the layer's dotted name.
        layer: it.
        metadata: its part of the step's attention metadata.
        index: place of the request among the step's.
        tokens: that the state holds.

    """
    slots = getattr(metadata, "non_spec_state_indices_tensor", None)
    if slots is None or isinstance(layer.kv_cache, torch.Tensor):
        return
    slot = int(slots[index])
    for tensor, cache in zip(STATES, layer.kv_cache, strict=False):
        yield Kept(name, tensor, np.array([tokens - 1]), cache[slot : slot + 1], f"slot {slot}")


def keys_and_values(name: str, layer: Any, metadata: Any, index: int, start: int, end: int) -> Iterator[Kept]:
    """An attention layer's keys and values of the tokens ``start`` to ``end`` of one request.

    The cache is (blocks, heads, block size, key and value).  On a CPU a block is packed in the kernel's
    own way, so only blocks that are full at ``end`` are shown, each as one row at its last token.
    """
    table = getattr(metadata, "block_table", None)
    cache = layer.kv_cache
    if table is None or not isinstance(cache, torch.Tensor) or cache.dim() != 4 or end <= start:
        return
    size = cache.shape[2]
    if cache.device.type == "cpu":
        full = range(-(-start // size), end // size)
        if not full:
            return
        blocks = table[index, full.start : full.stop].long()
        positions, value = np.array([(j + 1) * size - 1 for j in full]), cache[blocks]
    else:
        tokens = torch.arange(start, end, device=cache.device)
        blocks = table[index].long()[tokens // size]
        positions, value = np.arange(start, end), cache[blocks, :, tokens % size]
    yield Kept(name, KEYS_AND_VALUES, positions, value, f"blocks {sorted(set(blocks.tolist()))[:8]}")
