"""What an engine's scheduler did, step by step: the proof that a test took its path."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Step:
    """One engine step that scheduled something.

    Attributes:
        chunks: by request id, the (start, end) token positions computed.
        prefills, decodes: rows whose chunk starts before, or at or after, the end of the prompt.
        hits: by request id, tokens taken from the prefix cache on admission (also after preemption).
        copies: (source, destination) block ids copied on write.
        blocks: by newly admitted request id, block ids for each cache group.

    """

    chunks: dict[str, tuple[int, int]] = field(default_factory=dict)
    prefills: int = 0
    decodes: int = 0
    hits: dict[str, int] = field(default_factory=dict)
    copies: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[str, tuple[list[int], ...]] = field(default_factory=dict)

    @property
    def mixed(self) -> bool:
        """Whether prefill and decode rows shared the step."""
        return self.prefills > 0 and self.decodes > 0


class Recorder:
    """Wraps ``schedule`` of one scheduler instance and keeps a `Step` for each call."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.steps: list[Step] = []
        self.preemptions: dict[str, int] = {}
        self.prompt_ends: dict[str, int] = {}
        self._stock = scheduler.schedule
        scheduler.schedule = self._schedule

    def clear(self) -> None:
        """Forget everything recorded."""
        self.steps, self.preemptions, self.prompt_ends = [], {}, {}

    def _schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = self._stock(*args, **kwargs)
        if output.num_scheduled_tokens:
            self.steps.append(self._step(output))
        return output

    def _step(self, output: Any) -> Step:
        step = Step(copies=list(output.kv_cache_block_copies or ()))
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            end = request.num_computed_tokens  # stock has counted this step already
            step.chunks[request_id] = (end - count, end)
            if end - count < request.num_prompt_tokens:
                step.prefills += 1
            else:
                step.decodes += 1
            self.preemptions[request_id] = request.num_preemptions
            self.prompt_ends[request_id] = request.num_prompt_tokens
        for new in output.scheduled_new_reqs:
            step.hits[new.req_id] = new.num_computed_tokens
            step.blocks[new.req_id] = new.block_ids
        for request_id in output.scheduled_cached_reqs.resumed_req_ids:
            step.hits[request_id] = step.chunks[request_id][0]
        return step

    # --- questions tests ask -----------------------------------------------------------------

    def chunk_ends(self, request_id: str) -> list[int]:
        """Ends of the prefill chunks of a request, in order."""
        prompt_end = self.prompt_ends[request_id]
        chunks = [step.chunks[request_id] for step in self.steps if request_id in step.chunks]
        return [end for start, end in chunks if start < prompt_end]

    def mixed_steps(self, request_id: str | None = None) -> int:
        """Steps that held prefill and decode rows at once (and a decode row of this request)."""
        return sum(
            step.mixed and (request_id is None or self._decodes(step, request_id)) for step in self.steps
        )

    def _decodes(self, step: Step, request_id: str) -> bool:
        return request_id in step.chunks and step.chunks[request_id][0] >= self.prompt_ends[request_id]

    def shared_prefills(self) -> int:
        """Most prefill rows seen in one step."""
        return max((step.prefills for step in self.steps), default=0)

    def hit(self, request_id: str) -> int:
        """Tokens a request took from the prefix cache when it was last admitted."""
        return [step.hits[request_id] for step in self.steps if request_id in step.hits][-1]

    def one_token_remainders(self) -> int:
        """Rows that held exactly the last token of a prompt, after an earlier chunk or a hit."""
        return sum(
            end - start == 1 and start > 0 and end == self.prompt_ends[request_id]
            for step in self.steps
            for request_id, (start, end) in step.chunks.items()
        )


def total_preemptions(recorder: Recorder, request_ids: Iterable[str]) -> int:
    """Preemptions of these requests."""
    return sum(recorder.preemptions[i] for i in request_ids)
