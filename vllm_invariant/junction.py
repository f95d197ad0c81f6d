# In a vLLM branch: vllm/v1/core/sched/scheduler.py and vllm/v1/core/kv_cache_manager.py.
"""Where a prompt parts from earlier ones.

A GDN layer keeps one running state, so a prefix can be hit only where some prefill stopped to save it.
Stock stops at whole blocks and at each prompt's own last hash boundary, which lies behind a shared system
prompt, not at its end.  Hashes of prompts seen before tell where the shared part ends; a stop there costs
one request one more step, and every later sibling hits all of the shared part.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from vllm_invariant import grid
from vllm_invariant.history import HistoryMixin

# Hash blocks remembered: 8 million tokens of 64-token blocks.
REMEMBERED = 1 << 17

# Tokens that a prompt's own tail must lie past its hit to be worth the step it takes to stop there.  On the
# H200 a step costs the host as much as the GPU needs for some thousand tokens of a small model.
WORTH_A_STEP = 256


class SeenPrefixes:
    """Prefixes of the prompts seen lately, by their chained block hashes."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._whole: OrderedDict[Hashable, bool] = OrderedDict()  # by hash, whether a prompt ended there

    def add(self, hashes: Sequence[Hashable]) -> tuple[int, bool]:
        """Remember a prompt.

        Args:
            hashes: of its hash blocks, each chained to the one before, so that one hash stands for a
                whole prefix.

        Returns:
            How many of them, from the front, an earlier prompt had, and whether one had no more than these.

        """
        known, whole = 0, False
        for block_hash in hashes:
            if block_hash not in self._whole:
                break
            known, whole = known + 1, self._whole[block_hash]
        # Backwards, so that a long prefix is forgotten from its end: what remains is still a prefix.
        for block_hash in reversed(hashes):
            self._whole[block_hash] = self._whole.get(block_hash, False) or block_hash is hashes[-1]
            self._whole.move_to_end(block_hash)
        while len(self._whole) > self._remembered:
            self._whole.popitem(last=False)
        return known, whole


@dataclass
class Prefix:
    """What is known of a prompt's front.

    Attributes:
        shared: tokens that an earlier prompt had too, in whole hash blocks.
        continues: an earlier prompt ended there, as that of a conversation's turn before does.
        hit: tokens taken from the prefix cache.
        saving: the state after the shared tokens is still to be published.

    """

    shared: int
    continues: bool = False
    hit: int = 0
    saving: bool = False


class JunctionMixin(HistoryMixin):
    """Saves the state where a prompt parts from an earlier one, and its own tail where that pays.

    Stock has the stop and the state's cache entry, for draft models only; the flags below open them.  It has
    no entry for the attention block, whose own tail it registers alone: that one is added here.
    """

    mamba_partial_cache_hit: bool

    def install_junctions(self) -> None:
        """Open stock's junctions inside a block, where hits inside a block exist at all."""
        manager = self.kv_cache_manager
        self._prefixes: dict[str, Prefix] = {}
        self._seen = SeenPrefixes() if manager.coordinator.enable_partial_hash_hits else None
        if self._seen is None:
            return
        self.mamba_shared_prefix_checkpoint = manager.mamba_shared_prefix_checkpoint = True
        for group in manager.coordinator.single_type_managers:
            if hasattr(group, "shared_prefix_checkpoint"):
                group.shared_prefix_checkpoint = True

    def _get_local_prefix_cache_hit(self, request: Request, *args: Any) -> Any:
        blocks, hit, boundary, diverged = super()._get_local_prefix_cache_hit(request, *args)
        if self.invariant and self._seen is not None:
            prefix = self._prefix(request, self._seen)
            prefix.hit, prefix.saving = hit, prefix.shared > hit
            if prefix.saving:
                boundary = max(boundary, prefix.shared)
        return blocks, hit, boundary, diverged

    def _prefix(self, request: Request, seen: SeenPrefixes) -> Prefix:
        """Asked again for a request that had to wait, the first answer: by then its own prompt was seen."""
        name, unit = request.request_id, self.hash_block_size
        if name not in self._prefixes:
            most = (request.num_prompt_tokens - 1) // unit  # a prompt's last token is never hit
            known, whole = seen.add(request.block_hashes[:most])
            self._prefixes[name] = Prefix(shared=known * unit, continues=whole)
        return self._prefixes[name]

    @contextlib.contextmanager
    def _tail_stop(self, request: Request) -> Iterator[None]:
        """Stock's split also stops at the prompt's last hash boundary, here not close behind a hit."""
        stops = self.mamba_partial_cache_hit
        prefix = self._prefixes.get(request.request_id)
        if prefix is not None and prefix.hit > 0 and not prefix.continues:
            tail = grid.floor(request.num_prompt_tokens - 1, self.hash_block_size)
            self.mamba_partial_cache_hit = stops and tail - prefix.hit >= WORTH_A_STEP
        try:
            yield
        finally:
            self.mamba_partial_cache_hit = stops

    def _publish(self, request: Request, num_computed_tokens: int) -> None:
        super()._publish(request, num_computed_tokens)
        prefix = self._prefixes.get(request.request_id)
        if prefix is not None and prefix.saving and num_computed_tokens >= prefix.shared:
            # Again with each chunk: registering a later place in the block drops the entries before it.
            prefix.saving = num_computed_tokens < request.num_prompt_tokens
            self._publish_attention(request, prefix.shared)

    def _publish_attention(self, request: Request, junction: int) -> None:
        for group in self.kv_cache_manager.coordinator.single_type_managers:
            if isinstance(group, FullAttentionManager) and junction % group.block_size:
                group.block_pool.cache_partial_block(
                    request=request,
                    block=group.req_to_blocks[request.request_id][junction // group.block_size],
                    num_tokens=junction,
                    kv_cache_group_id=group.kv_cache_group_id,
                    block_size=group.block_size,
                )

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self.invariant:
            self._prefixes.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)
