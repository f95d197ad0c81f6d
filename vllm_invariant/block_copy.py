# In a vLLM branch: vllm/v1/worker/utils.py, copy_kv_cache_blocks_inplace.
"""Copy-on-write of a cached block copies the whole page, and what it is meant to copy.

When a hit ends inside a block, the worker copies that block for the new request.  Stock copies each
starting address once, through the first view it meets there.  In a hybrid model a state layer and
an attention layer overlay the same page; the state's view comes first and is the narrower one, so
the attention layer's last keys and values are left behind, and the hit reads zeros or an earlier
tenant's data in their place.  Showing stock the widest views first copies the page whole.

Copies of one step can build on each other: a request hits a block that another request of the same step
is only just getting its copy of.  Stock reads all sources before it writes, so the second copy would get
what the block held before.  Its source is therefore exchanged for the one the chain began with.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch


def widest_first(kv_caches: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Views of the cache, those that span most bytes first; stable otherwise."""
    return sorted(kv_caches, key=lambda view: view.numel() * view.element_size(), reverse=True)


def from_the_beginning(copies: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Copies that have the same effect at once as ``copies`` have one after another.

    Args:
        copies: (source, destination) block ids, in the order in which they were scheduled.

    """
    origin: dict[int, int] = {}
    for source, destination in copies:
        origin[destination] = origin.get(source, source)
    return [(source, destination) for destination, source in origin.items() if source != destination]


def copy_whole_pages(stock: Any) -> Any:
    """Wrap stock's in-place block copy."""

    @functools.wraps(stock)
    def copy_kv_cache_blocks_inplace(
        kv_caches: Iterable[torch.Tensor], num_blocks: int, kv_cache_block_copies: Any
    ) -> None:
        stock(widest_first(kv_caches), num_blocks, from_the_beginning(kv_cache_block_copies))

    return copy_kv_cache_blocks_inplace
