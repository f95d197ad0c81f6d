"""Replay (F09, F41, F59): what a preempted request had said stands, and it is not said twice.

Greedy and seeded sampling, several answers a request, penalties, stop strings, structured output and
prompt logprobs, all in one batch, each as a streaming client sees it.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from tests.harness import device
from tests.harness.compare import assert_same
from tests.harness.engine import SOLO, Engine, Engines
from tests.harness.prompts import prompt
from tests.harness.stream import Answer, Call, stream

pytestmark = pytest.mark.engine

TOKENS = 36
GRAMMAR = "[a-d]{20}[e-h]{200}"
GRAMMARS = importlib.util.find_spec("xgrammar") is not None


def _structured() -> dict[str, Any]:
    from vllm.sampling_params import StructuredOutputsParams

    return {"structured_outputs": StructuredOutputsParams(regex=GRAMMAR), "detokenize": True}


def _stop(engine: Engine, tokens: tuple[int, ...]) -> str:
    """A piece of this prompt's own answer, from its second half."""
    [[answer]] = stream(engine, [Call(tokens, {"detokenize": True, "max_tokens": TOKENS})])
    middle = len(answer.text) // 2
    stop = answer.text[middle : middle + 6]
    assert answer.text.index(stop) == middle, "it stops earlier: choose another prompt"
    return stop


@pytest.fixture(scope="module")
def calls(engines: Engines) -> dict[str, Call]:
    """One request of each kind."""
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {},
        "seeded": {"temperature": 0.8, "seed": 11},
        "three answers": {"temperature": 0.9, "seed": 12, "n": 3},
        "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
        "prompt logprobs": {"prompt_logprobs": 2},
    }
    if GRAMMARS:
        kinds |= {
            "structured": _structured(),
            "structured, seeded": {**_structured(), "temperature": 0.9, "seed": 13},
        }
    lengths = (129, 65, 200, engines.block + 2, 193, 40, 130)[: len(kinds)]
    made = {
        kind: Call(tuple(prompt(length, seed=210)), {"max_tokens": TOKENS, **params})
        for (kind, params), length in zip(kinds.items(), lengths, strict=True)
    }
    tokens = tuple(prompt(150, seed=211))
    stop = _stop(engines.get(**SOLO), tokens)
    made["stop string"] = Call(tokens, {"max_tokens": TOKENS, "detokenize": True, "stop": [stop]})
    return made


@pytest.fixture(scope="module")
def expected(engines: Engines, calls: dict[str, Call]) -> dict[str, list[Answer]]:
    """What each request says alone, undisturbed."""
    engine = engines.get(**SOLO)
    alone = {kind: stream(engine, [call])[0] for kind, call in calls.items()}
    assert len(alone["three answers"]) == 3
    assert len({tuple(answer.tokens) for answer in alone["three answers"]}) == 3, "nothing was sampled"
    assert alone["stop string"][0].reasons == [("stop", calls["stop string"].params["stop"][0])]
    if GRAMMARS:
        assert set(alone["structured"][0].text[-TOKENS // 3 :]) <= set("efgh"), "the grammar had no say"
    assert len(alone["prompt logprobs"][0].prompt_logprobs) == len(calls["prompt logprobs"].prompt) - 1
    return alone


def _each_twice(engine: Engine) -> Callable[[int], None]:
    """Preempt every request on its own, after 7 and after 23 outputs."""
    done: set[tuple[str, int]] = set()

    def preempt(step: int) -> None:
        for request in list(engine.scheduler.running):
            key = request.request_id, request.num_output_tokens
            if key[1] in (7, 23) and key not in done:
                done.add(key)
                engine.preempt(request)

    return preempt


def _all_at_once(engine: Engine) -> Callable[[int], None]:
    """Preempt everybody and empty the cache, three times."""

    def preempt(step: int) -> None:
        if step in (9, 30, 70):
            engine.preempt(None, forget=True)

    return preempt


@pytest.mark.parametrize("how", [_each_twice, _all_at_once], ids=["each", "all"])
@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("asynchronous", device.ASYNC_SCHEDULING)
def test_what_was_said_stands(
    engines: Engines,
    calls: dict[str, Call],
    expected: dict[str, list[Answer]],
    asynchronous: bool,
    caching: bool,
    how: Callable[[Engine], Callable[[int], None]],
) -> None:
    """Preempted in company; each answer is delivered whole, once, with the bits it has undisturbed."""
    engine = engines.get(
        max_num_batched_tokens=512, enable_prefix_caching=caching, async_scheduling=asynchronous
    )
    assert engine.scheduler.scheduler_config.async_scheduling == asynchronous
    answers = dict(zip(calls, stream(engine, list(calls.values()), how(engine)), strict=True))
    disturbed = [count for count in engine.record.preemptions.values() if count > 0]
    requests = sum(call.params.get("n", 1) for call in calls.values())
    assert len(disturbed) >= requests - 1, f"void: only {len(disturbed)} of {requests} were preempted"
    for kind, said in answers.items():
        assert_same([a.result() for a in expected[kind]], [a.result() for a in said], kind)
        assert [a.rest() for a in expected[kind]] == [a.rest() for a in said], kind
        assert all(len(a.reasons) == 1 and a.deliveries <= len(a.tokens) for a in said), kind


@pytest.mark.skipif(not GRAMMARS, reason="xgrammar is not installed: nothing structured was preempted")
def test_structured_output_was_among_them(calls: dict[str, Call]) -> None:
    """Counted where it is left out."""
    assert sum("structured_outputs" in call.params for call in calls.values()) == 2
