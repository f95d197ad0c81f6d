# In a vLLM branch: not needed (a tool for users).
"""Which rows of a step belong to the traced request, under either model runner."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Rows:
    """The traced request's share of a step.

    Attributes:
        index: its place among the step's requests.
        first: its first row.
        start, end: its token positions.
        total: rows of the step; `padded`: rows of the step's tensors.
        requests: in the step.
        cached_rows: of requests past their prompt.

    """

    index: int
    first: int
    start: int
    end: int
    total: int
    padded: int
    requests: int
    cached_rows: int

    @property
    def count(self) -> int:
        """Its rows."""
        return self.end - self.start


class RowMap:
    """Follows a model runner's steps.

    Model Runner V1 keeps the step's order of requests in ``input_batch``, V2 returns it from
    ``prepare_inputs``.  Counts and positions come from the scheduler's output, and the step's own
    positions have to agree with them.
    """

    def __init__(self, runner: Any, scheduler: Any) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._output: Any = None
        self._order: list[str] | None = None
        self._execute = runner.execute_model
        runner.execute_model = self._execute_model
        if not hasattr(runner, "input_batch"):
            self._prepare = runner.prepare_inputs
            runner.prepare_inputs = self._prepare_inputs

    def _execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._output, self._order = scheduler_output, None
        return self._execute(scheduler_output, *args, **kwargs)

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        batch = self._prepare(*args, **kwargs)
        self._order = list(batch.req_ids)
        return batch

    def find(self, request_id: str, positions: torch.Tensor) -> Rows | None:
        """The rows of ``request_id`` in the step that is about to run, or None if it has none.

        Args:
            request_id: the engine's own id.
            positions: (tokens,) or (3, tokens), of the step.

        Raises:
            RuntimeError: if the step's positions are not those the scheduler gave the request.

        """
        counts = self._output.num_scheduled_tokens if self._output is not None else {}
        if request_id not in counts:
            return None
        order = self._order if self._order is not None else list(self._runner.input_batch.req_ids)
        order = [name for name in order if name in counts]
        starts = self._starts()
        index = order.index(request_id)
        first = sum(counts[name] for name in order[:index])
        start = starts[request_id]
        rows = Rows(
            index=index,
            first=first,
            start=start,
            end=start + counts[request_id],
            total=sum(counts.values()),
            padded=positions.shape[-1],
            requests=len(order),
            cached_rows=sum(counts[name] for name in order if self._decodes(name, starts[name])),
        )
        line = positions if positions.dim() == 1 else positions[0]
        found = line[first : first + rows.count].tolist()
        if found != list(range(rows.start, rows.end)):
            raise RuntimeError(f"rows {first} to {first + rows.count} hold positions {found}, not {rows}")
        return rows

    def _starts(self) -> dict[str, int]:
        cached = self._output.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts.update({new.req_id: new.num_computed_tokens for new in self._output.scheduled_new_reqs})
        return starts

    def _decodes(self, request_id: str, start: int) -> bool:
        request = self.scheduler.requests.get(request_id)
        return request is not None and start >= request.num_prompt_tokens
