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


@pytest.mark.parametrize("spare", [0, 1])
def test_a_prompt_as_large_as_the_cache(engines: Engines, spare: int) -> None:
    """F54: alone and beside a small decoder it finishes, and soon."""
    b = engines.block
    large = Call(tuple(prompt(10 * b - 4, seed=290)), {"max_tokens": 8})
    small = Call(tuple(prompt(50, seed=291)), {"max_tokens": 60})
    solo = engines.get(**SOLO)
    expected = [stream(solo, [call])[0] for call in (large, small)]
    engine = engines.get(**_pool_for(engines, 10 * b + 4, spare), max_num_seqs=4)
    assert engine.scheduler.capacity == engine.scheduler.blocks_needed(10 * b + 4) + spare
    for calls in ([large], [large, small], [small, large]):
        engine.reset()
        answers = stream(engine, calls)
        assert len(engine.record.steps) <= 2 * (10 * b // 1024) + 200, "it was started over"
        for call, answer in zip(calls, answers, strict=True):
            _assert_as(expected[call is small], answer, f"{spare} spare blocks")


def _pool_for(engines: Engines, tokens: int, spare: int) -> dict[str, int]:
    need = engines.get().scheduler.blocks_needed(tokens)
    return {"num_gpu_blocks_override": 1 + need + spare, "max_model_len": tokens}


def test_a_cache_too_small_for_one_prompt(engines: Engines) -> None:
    """F54: with a block less than the longest prompt needs, vLLM does not start."""
    with pytest.raises(ValueError, match="KV cache is needed"):
        engines.get(**_pool_for(engines, 10 * engines.block + 4, -1))


def test_a_request_that_cannot_be_served_tells_its_client(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One error, no tokens, nobody else is disturbed.

    The cache is made out smaller than it is, and all three prompts fit into one step.
    """
    b = engines.block
    calls = [Call(tuple(prompt(n, seed=293)), {"max_tokens": 8}) for n in (70, 2 * b, 130)]
    solo = engines.get(**SOLO)
    expected = [stream(solo, [call])[0] for call in calls]
    engine = engines.get(enable_prefix_caching=False)  # with it, a prompt stops at its last block
    capacity = engine.scheduler.blocks_needed(b)
    monkeypatch.setattr(type(engine.scheduler), "capacity", property(lambda self: capacity))
    first, [refused], last = stream(engine, calls)
    assert refused.reasons == [("error", None)] and not refused.tokens
    _assert_as(expected[0], first, "before it")
    _assert_as(expected[2], last, "after it")


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
