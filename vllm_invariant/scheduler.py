# In a vLLM branch: vllm/v1/core/sched/scheduler.py and vllm/v1/core/kv_cache_coordinator.py.
"""The scheduler under batch invariance: stock's policy, on the grid.

Stock decides who runs and for how many tokens.  `GridScheduler` only narrows the number, in the
one hook both of stock's prefill paths pass through:

* a chunk that does not finish its prompt ends on the grid, in every cache mode;
* a request that comes back from preemption gets its prompt by prefill, and then its own generated
  tokens by decode, one known token a step, as they were made the first time (*replay*), unless the
  arithmetic's prefill gives the same bits;
* the prefix cache follows the rules of `history`, and states are saved where prompts part (`junction`).

Models without a Qwen GDN layer are scheduled exactly as stock would.
"""

import functools
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import Request

from vllm_invariant import backend, grid, metrics, preflight
from vllm_invariant.junction import JunctionMixin


def has_qwen_gdn(kv_cache_config: Any) -> bool:
    """Whether any KV-cache group holds Qwen GDN states."""
    return any(
        isinstance(group.kv_cache_spec, MambaSpec)
        and getattr(group.kv_cache_spec.mamba_type, "name", None) == backend.NAME
        for group in kv_cache_config.kv_cache_groups
    )


class GridSchedulerMixin(JunctionMixin):
    """Put in front of a stock scheduler class by `grid_scheduler_class`."""

    need_mamba_block_aligned_split: bool

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        self.invariant = has_qwen_gdn(kv_cache_config)
        if not self.invariant:
            return
        options = preflight.check_engine(vllm_config)
        self.arithmetic = options.arithmetic
        preflight.check_blocks(
            self.arithmetic.grid,
            caching=bool(self.cache_config.enable_prefix_caching),
            block_size=self.block_size,
            hash_block_size=self.hash_block_size,
        )
        self.aligned = self.need_mamba_block_aligned_split  # stock's rule, for cache mode "align"
        self.need_mamba_block_aligned_split = True
        self.counters = metrics.Counters()
        self.install_history_rules()
        self.install_junctions()

    # --- chunk ends -------------------------------------------------------------------------

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Narrow a chunk to where it may end.  0: no grid step fits, the request waits."""
        if self.is_rejected(request) or self.waits_for_its_own_blocks(request):
            return 0
        start = request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
        # A resumed request's own tokens are prefilled only if that gives the bits decode gave.
        equal = self.arithmetic.decode_equals_prefill
        prefill_end = request.num_tokens if equal else request.num_prompt_tokens
        if start >= prefill_end:
            return self._decode_tokens(request, start, num_new_tokens)
        num_new_tokens = min(num_new_tokens, prefill_end - start)
        end = grid.chunk_end(start, start + num_new_tokens, prefill_end, self.arithmetic.grid)
        if self.aligned and end > start:
            with self._tail_stop(request):
                stock_end = start + super()._mamba_block_aligned_split(
                    request, end - start, num_new_local_computed_tokens, num_external_computed_tokens
                )
            if stock_end == start:
                # Stock would let the request wait for a whole block's worth of budget.  The state
                # may as well stop inside the block, on the grid, and go on from there.
                stock_end = min(end, grid.next_stop(start, self.cache_config.block_size))
            end = grid.chunk_end(start, stock_end, prefill_end, self.arithmetic.grid)
        self.counters.grid_waits += end == start
        return end - start

    def _decode_tokens(self, request: Request, start: int, num_new_tokens: int) -> int:
        """Tokens of a step past the prompt: one at a time while known tokens are replayed."""
        if self.arithmetic.decode_equals_prefill or start >= request.num_tokens:
            return num_new_tokens
        return min(num_new_tokens, 1)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Stock's schedule, then proof that every chunk end it chose lies on the grid.

        Raises:
            RuntimeError: if a later clip moved a chunk end off the grid.  Wrong bits would follow.

        """
        self._in_schedule = True
        output = super().schedule(*args, **kwargs)
        self._in_schedule = False
        if self.invariant:
            self._check_chunk_ends(output)
            self._count(output)
            # Model Runner V2 keeps this order among rows of one token, and the backend wants
            # decodes before a prompt's one-token remainder.
            tokens = output.num_scheduled_tokens
            output.num_scheduled_tokens = dict(sorted(tokens.items(), key=self._is_prefill))
        return output

    def _count(self, output: SchedulerOutput) -> None:
        if self.arithmetic.decode_equals_prefill:
            return
        for request_id in output.num_scheduled_tokens:
            request = self.requests[request_id]
            end = request.num_computed_tokens
            if end > request.num_prompt_tokens:
                self.counters.replayed_tokens += end < request.num_tokens
                self.counters.unpublished_decode_blocks += grid.is_on(end, self.cache_config.block_size)

    def _is_prefill(self, scheduled: tuple[str, int]) -> bool:
        request_id, tokens = scheduled
        request = self.requests[request_id]
        return request.num_computed_tokens - tokens < request.num_prompt_tokens

    def _check_chunk_ends(self, output: SchedulerOutput) -> None:
        for request_id in output.num_scheduled_tokens:
            request = self.requests[request_id]
            end = request.num_computed_tokens  # already counts this step
            if end < request.num_prompt_tokens and not grid.is_on(end, self.arithmetic.grid):
                raise RuntimeError(
                    f"request {request_id}: prefill chunk ends at {end} of {request.num_prompt_tokens} "
                    f"tokens, off the {self.arithmetic.grid}-token grid"
                )

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """Stock's statistics, with the project's totals."""
        stats = super().make_stats(*args, **kwargs)
        return metrics.attach(stats, self.counters) if self.invariant else stats


@functools.cache
def grid_scheduler_class(stock: type[Scheduler]) -> type[Scheduler]:
    """The grid's rules on top of a stock scheduler class (``Scheduler`` or ``AsyncScheduler``)."""
    return type(f"Grid{stock.__name__}", (GridSchedulerMixin, stock), {"__module__": __name__})
