"""Prompts near the size of the cache (F54), and prompt logprobs under pressure (F59)."""

import pytest

from tests.harness.compare import assert_same
from tests.harness.engine import SOLO, Engines
from tests.harness.prompts import prompt
from tests.harness.stream import Answer, Call, stream

pytestmark = pytest.mark.engine


def _assert_as(expected: list[Answer], got: list[Answer], what: str) -> None:
    assert_same([a.result() for a in expected], [a.result() for a in got], what)
    assert [a.rest() for a in expected] == [a.rest() for a in got], what


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside-a-decoder"])
def test_a_prompt_as_large_as_the_cache(engines: Engines, beside: bool) -> None:
    """F54: it finishes where it fits; where it or its answer does not, it ends with an error, and soon."""
    b = engines.block
    large = Call(tuple(prompt(10 * b - 4, seed=290)), {"max_tokens": 8})
    small = Call(tuple(prompt(50, seed=291)), {"max_tokens": 60})
    solo = engines.get(**SOLO)
    expected = [stream(solo, [call])[0][0] for call in (large, small)]
    need = engines.get().scheduler.blocks_needed
    whole = need(10 * b + 4)
    assert whole == need(10 * b - 4) + 1, "the answer takes the last block"
    for spare, reason in ((-2, "error"), (-1, "error"), (0, "length"), (1, "length")):
        engine = engines.get(num_gpu_blocks_override=1 + whole + spare, max_model_len=10 * b + 4, max_num_seqs=4)
        assert engine.scheduler.capacity == whole + spare
        [answer], *others = stream(engine, [large, small] if beside else [large])
        assert [r for r, _ in answer.reasons] == [reason], f"{spare} spare blocks: {answer.reasons}"
        assert len(engine.record.steps) <= 10 * b // 1024 + 300
        assert bool(answer.tokens) == (spare > -2), "a prompt that cannot fit was computed"
        if reason == "length":
            _assert_as(expected[:1], [answer], f"{spare} spare blocks")
        for other in others:
            _assert_as(expected[1:], other, f"the decoder, {spare} spare blocks")


def test_prompt_logprobs_under_pressure(engines: Engines) -> None:
    """F59: prompt logprobs of preempted requests are delivered whole, once, with the bits they have alone."""
    b = engines.block
    calls = [
        Call(tuple(prompt(3 * b - 10, seed=292 + i)), {"max_tokens": 40, "prompt_logprobs": 1})
        for i in range(4)
    ]
    solo = engines.get(**SOLO)
    expected = [answer for call in calls for answer in stream(solo, [call])[0]]
    assert all(len(answer.prompt_logprobs) == 3 * b - 11 for answer in expected)
    groups = len(solo.scheduler.kv_cache_config.kv_cache_groups)
    engine = engines.get(
        num_gpu_blocks_override=1 + 4 * (3 + groups - 1) + 6, max_model_len=4 * b, max_num_seqs=4
    )
    answers = [answer for each in stream(engine, calls) for answer in each]
    assert sum(engine.record.preemptions.values()) > 0, "void: nobody was preempted"
    _assert_as(expected, answers, "with prompt logprobs")
