"""Requests as a streaming client sees them: only what is new, as often as the engine sends it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.harness.compare import Result, pack
from tests.harness.engine import Engine


@dataclass(frozen=True)
class Call:
    """One request with any sampling parameters, on top of greedy ones with 20 logprobs."""

    prompt: tuple[int, ...]
    params: dict[str, Any]


@dataclass
class Answer:
    """One of a request's ``n`` answers, put together from its deliveries.

    Attributes:
        tokens, logprobs, text: everything delivered, in order.
        prompt_logprobs: raw float32 bytes a position, of the request.
        reasons: why it finished, with the stop string if that was it; more than one entry would be a
            second end.
        deliveries: how many there were.

    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    text: str = ""
    prompt_logprobs: list[bytes] = field(default_factory=list)
    reasons: list[tuple[str, Any]] = field(default_factory=list)
    deliveries: int = 0

    def result(self) -> Result:
        """For `compare`."""
        return Result.of(self.tokens, self.logprobs, cached=0)

    def rest(self) -> tuple[Any, ...]:
        """What `compare` does not look at."""
        return self.text, self.prompt_logprobs, self.reasons


def stream(
    engine: Engine, calls: Sequence[Call], during: Callable[[int], None] | None = None
) -> list[list[Answer]]:
    """Run requests together to the end, collecting deltas; ``during(step)`` comes before each step.

    Returns:
        The ``n`` answers of each request.

    Raises:
        AssertionError: if the engine makes no progress for 20,000 steps.

    """
    engine.record.clear()
    llm = engine.llm.llm_engine
    numbers = {_add(engine, call): i for i, call in enumerate(calls)}
    answers: list[dict[int, Answer]] = [{} for _ in calls]
    for step in range(20_000):
        if not llm.has_unfinished_requests():
            return [[each[i] for i in sorted(each)] for each in answers]
        if during is not None:
            during(step)
        for output in llm.step():
            _collect(answers[numbers[output.request_id]], output)
    raise AssertionError("some requests never finished")


def _add(engine: Engine, call: Call) -> str:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    base = {"temperature": 0.0, "logprobs": 20, "ignore_eos": True, "detokenize": False}
    params = SamplingParams(**{**base, **call.params}, output_kind=RequestOutputKind.DELTA)
    number = engine.number()
    engine.llm.llm_engine.add_request(number, {"prompt_token_ids": list(call.prompt)}, params)
    return number


def _collect(answers: dict[int, Answer], output: Any) -> None:
    for part in output.outputs:
        answer = answers.setdefault(part.index, Answer())
        answer.deliveries += 1
        answer.tokens += part.token_ids
        answer.logprobs += [{t: e.logprob for t, e in position.items()} for position in part.logprobs or ()]
        answer.text += part.text
        if output.prompt_logprobs:
            answer.prompt_logprobs += [
                pack(entry.logprob for entry in position.values())
                for position in output.prompt_logprobs
                if position is not None
            ]
        if part.finish_reason is not None:
            answer.reasons.append((part.finish_reason, part.stop_reason))
