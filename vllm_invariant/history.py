# In a vLLM branch: vllm/v1/core/sched/scheduler.py and vllm/v1/core/kv_cache_coordinator.py.
"""What a request's bits must not depend on: what happened to it, and what happened before it.

These rules concern the prefix cache and requests that come back:

* *provenance*: only tokens of a prompt, computed by prefill, are published to the prefix cache;
* *replay*: a request that comes back from preemption may only hit its prompt, because another
  prompt may hold, prefilled, the tokens that this request decoded;
* a request that had to make room for itself goes on one step at a time, and one that can never be
  served ends with an error, instead of being started over for ever.

The first two hold while the arithmetic's decode and prefill differ in bits.

Stock publishes a chunk's blocks when it schedules the chunk.  That is early, yet no reader comes
before the writer: workers execute steps in the order they were scheduled, also after an abort.  The
one chunk that is dropped again belongs to a request preempted in the same step (priority scheduling),
and whoever displaced it takes, first of all, the last block it had freed, without which no hit can
end where the dropped chunk would have.
"""

import logging
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import Request

from vllm_invariant.arithmetic import Arithmetic
from vllm_invariant.metrics import Counters

logger = logging.getLogger("vllm.vllm_invariant")


class HistoryMixin(Scheduler):
    """The rules above, for a scheduler whose ``invariant`` is set."""

    invariant: bool = False
    arithmetic: Arithmetic
    counters: Counters

    def install_history_rules(self) -> None:
        """Put the rules between the cache manager and its coordinator."""
        self._hit_limit: int | None = None
        self._in_schedule = False
        self._last_alone: tuple[str, int] | None = None
        coordinator = self.kv_cache_manager.coordinator
        self._stock_find_hit = coordinator.find_longest_cache_hit
        self._stock_publish = coordinator.cache_blocks
        coordinator.find_longest_cache_hit = self._find_hit
        coordinator.cache_blocks = self._publish

    # --- what the prefix cache is told, and what it may answer ---------------------------------

    def _publish(self, request: Request, num_computed_tokens: int) -> None:
        if not self.arithmetic.decode_equals_prefill:
            num_computed_tokens = min(num_computed_tokens, request.num_prompt_tokens)
        if not self._are_published(request, num_computed_tokens):
            self._stock_publish(request, num_computed_tokens)

    def _are_published(self, request: Request, num_tokens: int) -> bool:
        """Whether hits land on whole blocks only and all of these are in the prefix cache.

        Told of them again, stock takes them for blocks of this step, which no other request of the step may
        hit: requests with one prefix would be admitted one a step.
        """
        return self.hash_block_size == self.block_size and all(
            group.num_cached_block.get(request.request_id, 0) >= num_tokens // group.block_size
            for group in self.kv_cache_manager.coordinator.single_type_managers
        )

    def _get_local_prefix_cache_hit(self, request: Request, *args: Any) -> Any:
        if not self.invariant:
            return super()._get_local_prefix_cache_hit(request, *args)
        if request.num_output_tokens > 0 and not self.arithmetic.decode_equals_prefill:
            self._hit_limit = request.num_prompt_tokens - 1
        try:
            return super()._get_local_prefix_cache_hit(request, *args)
        finally:
            self._hit_limit = None

    def _find_hit(self, block_hashes: Any, max_cache_hit_length: int, *args: Any) -> Any:
        if self._hit_limit is not None:
            max_cache_hit_length = min(max_cache_hit_length, self._hit_limit)
        blocks, hit, uncached = self._stock_find_hit(block_hashes, max_cache_hit_length, *args)
        self.counters.floored_hit_tokens += uncached
        return blocks, hit, uncached

    # --- preemption --------------------------------------------------------------------------

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        if self.invariant and self._in_schedule and not self.running:
            # It made room for itself, with nobody left to make more.  It would wait for ever, or the
            # second time without a new token, be computed up to here for ever.
            alone = (request.request_id, request.num_tokens)
            if alone == self._last_alone or self.blocks_needed(request.num_tokens) > self.capacity:
                self._fail(request, "needs more KV cache than the engine has")
            self._last_alone = alone

    def waits_for_its_own_blocks(self, request: Request) -> bool:
        """Whether a request that had to make room for itself still has a step under way.

        With async scheduling a step is scheduled while the one before it runs, and the states it
        will no longer need are held until then: more blocks than the request needs.  One step at a
        time it finishes with those.
        """
        alone = self._last_alone is not None and self._last_alone[0] == request.request_id
        return alone and request.num_in_flight_tokens > 0

    # --- admission -----------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Stock's, then an error at once for a prompt that could not be held even alone."""
        super().add_request(request)
        if not self.invariant:
            return
        need = self.blocks_needed(request.num_prompt_tokens)
        if need > self.capacity:
            self._fail(
                request, f"needs {need} KV-cache blocks for its prompt; the engine has {self.capacity}"
            )

    def is_rejected(self, request: Request) -> bool:
        """Whether the request ends with an error in this step's outputs: no more of it is computed."""
        return request.request_id in self.encoder_cache_mismatch_reqs

    @property
    def capacity(self) -> int:
        """Blocks that requests can have; the filler block is nobody's."""
        return self.kv_cache_manager.block_pool.num_gpu_blocks - 1

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks that a request of ``num_tokens`` and the next one holds at its widest, served alone.

        Attention keeps every block; a state layer keeps the block it reads, the one it writes, and where it
        saves a state on the way, that one.
        """
        need = 0
        for group in self.kv_cache_config.kv_cache_groups:
            spec = group.kv_cache_spec
            blocks = -(-(num_tokens + 1) // spec.block_size)
            states = isinstance(spec, MambaSpec)
            need += min(blocks, 2 + spec.num_prefill_checkpoint_blocks) if states else blocks
        return need

    def _fail(self, request: Request, why: str) -> None:
        """Finish a waiting request with an error in the next step's outputs."""
        logger.error("Request %s %s; it is rejected.", request.request_id, why)
        self.encoder_cache_mismatch_reqs.add(request.request_id)  # stock's list of such requests
