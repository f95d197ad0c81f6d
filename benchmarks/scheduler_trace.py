"""A plugin that writes what the scheduler did, one JSON line a step, to the file named by `VARIABLE`.

A line holds the request ids of the step's prefill rows and of its decode rows.  A prefill row is one whose
tokens begin before the end of its prompt.
"""

import functools
import json
import os
from typing import Any, TextIO

VARIABLE = "INVARIANT_SCHEDULER_TRACE"


def register() -> None:
    """Put the trace between vLLM and the scheduler class it is about to make."""
    from vllm.config.scheduler import SchedulerConfig

    stock = SchedulerConfig.get_scheduler_cls
    if os.environ.get(VARIABLE) and not hasattr(stock, "traced"):
        SchedulerConfig.get_scheduler_cls = _traced_choice(stock)


def _traced_choice(stock: Any) -> Any:
    def get_scheduler_cls(self: Any) -> Any:
        return traced_class(stock(self))

    get_scheduler_cls.traced = True  # type: ignore[attr-defined]
    return get_scheduler_cls


@functools.cache
def traced_class(base: Any) -> type:
    """A scheduler that also writes each step down."""

    class Traced(base):
        trace: TextIO | None = None

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            output = super().schedule(*args, **kwargs)
            if output.num_scheduled_tokens:
                if self.trace is None:
                    self.trace = open(os.environ[VARIABLE], "a", buffering=1)  # noqa: SIM115 (as long as the engine)
                self.trace.write(json.dumps(_step(self.requests, output.num_scheduled_tokens)) + "\n")
            return output

    return Traced


def _step(requests: Any, scheduled: dict[str, int]) -> dict[str, list[str]]:
    kinds: dict[str, list[str]] = {"prefill": [], "decode": []}
    for request_id, tokens in scheduled.items():
        request = requests[request_id]
        start = request.num_computed_tokens - tokens  # stock has counted this step already
        kinds["prefill" if start < request.num_prompt_tokens else "decode"].append(request_id)
    return kinds
