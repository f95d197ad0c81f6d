# In a vLLM branch: vllm/v1/worker/utils.py, copy_kv_cache_blocks_inplace.
"""Copy-on-write of a cached block copies the whole page.

When a hit ends inside a block, the worker copies that block for the new request.  Stock copies each
starting address once, through the first view it meets there.  In a hybrid model a state layer and
an attention layer overlay the same page; the state's view comes first and is the narrower one, so
the attention layer's last keys and values are left behind, and the hit reads zeros or an earlier
tenant's data in their place.  Showing stock the widest views first copies the page whole.
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch


def widest_first(kv_caches: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Views of the cache, those that span most bytes first; stable otherwise."""
    return sorted(kv_caches, key=lambda view: view.numel() * view.element_size(), reverse=True)


def copy_whole_pages(stock: Any) -> Any:
    """Wrap stock's in-place block copy."""

    @functools.wraps(stock)
    def copy_kv_cache_blocks_inplace(
        kv_caches: Iterable[torch.Tensor], num_blocks: int, kv_cache_block_copies: Any
    ) -> None:
        stock(widest_first(kv_caches), num_blocks, kv_cache_block_copies)

    return copy_kv_cache_blocks_inplace
