"""Axis history (F09, F25, F22): preemption, conversations, aborted requests, eviction."""

import pytest

from tests.harness.compare import assert_same
from tests.harness.engine import Ask, Engines, asks
from tests.harness.prompts import prompt
from tests.harness.record import Recorder, total_preemptions

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("caching", [False, True], ids=["no-cache", "cache"])
def test_forced_preemption(engines: Engines, caching: bool) -> None:
    """F09: preempted after 8 and after 31 outputs; a third request joins during the recovery."""
    b = engines.block
    lengths = (129, b + 2, 3 * b - 1)
    requests = asks([prompt(n, seed=50) for n in lengths], max_tokens=40)
    requests[2] = Ask(requests[2].prompt, 40, at=14)
    expected = engines.solo(requests)
    engine = engines.get(enable_prefix_caching=caching, max_num_seqs=8, max_num_batched_tokens=512)
    due = [8, 31]

    def preempt(step: int) -> None:
        running = [r for r in engine.scheduler.running if len(r.prompt_token_ids) == lengths[0]]
        if due and running and running[0].num_output_tokens >= due[0]:
            due.pop(0)
            assert engine.llm.reset_prefix_cache(reset_running_requests=True)

    run = engine.run(requests, preempt)
    assert [run.record.preemptions[i] for i in run.ids[:2]] == [2, 2]
    replayed = _replayed_tokens(run.record, run.ids[0])
    assert replayed >= 8 + 31 - 2, f"only {replayed} known tokens were decoded again"
    assert_same(expected, run.results)


def _replayed_tokens(record: Recorder, request_id: str) -> int:
    """Decode rows whose position had been computed before."""
    seen, again = -1, 0
    prompt_end = record.prompt_ends[request_id]
    for step in record.steps:
        start, end = step.chunks.get(request_id, (0, 0))
        if start >= prompt_end:
            assert end - start == 1, "generated tokens came back in one chunk"
            again += end <= seen
            seen = max(seen, end)
    return again


@pytest.mark.parametrize("caching", [False, True], ids=["no-cache", "cache"])
def test_preemption_by_want_of_blocks(engines: Engines, caching: bool) -> None:
    """F25: six requests outgrow the cache; those preempted go on with the bits they had."""
    b = engines.block
    requests = asks([prompt(2 * b - 20, seed=51 + i) for i in range(6)], max_tokens=40)
    expected = engines.solo(requests)
    groups = len(engines.get().runner.kv_cache_config.kv_cache_groups)
    engine = engines.get(
        enable_prefix_caching=caching,
        max_model_len=4 * b,
        num_gpu_blocks_override=_too_few_blocks(groups, caching),
        max_num_seqs=6,
    )
    run = engine.run(requests)
    assert total_preemptions(run.record, run.ids) > 0, "void: nothing was preempted"
    assert_same(expected, run.results)


def _too_few_blocks(groups: int, caching: bool) -> int:
    # Each request starts with two attention blocks and a state a group, and grows by one block.
    # With the cache on a prefill needs some more, for the states it leaves behind.
    return 1 + 6 * (2 + groups - 1) + (5 if caching else 2)


@pytest.mark.parametrize("dense", [False, True], ids=["default", "every-block"])
def test_a_second_turn_hits_the_prompt_of_the_first_alone(engines: Engines, dense: bool) -> None:
    """A conversation: turn 2's prompt holds turn 1's prompt and answer; decoded tokens are no hit."""
    b = engines.block
    first = asks([prompt(b - 40, seed=57)], max_tokens=b // 2)
    answer = engines.solo(first)[0]
    second = asks([list(first[0].prompt + answer.tokens) + prompt(30, seed=58)])
    expected = engines.solo(second)
    engine = engines.get(prefix_cache_retention_interval=b if dense else 0)
    assert_same([answer], engine.run(first).results, "turn 1")
    for turn in ("turn 2", "turn 2 once more"):
        run = engine.run(second)
        assert run.results[0].cached > 0
        assert_same(expected, run.results, turn)
        if turn == "turn 2":
            assert run.results[0].cached <= b - 40, "tokens that decode computed were taken from the cache"


def test_an_aborted_request_leaves_no_trace(engines: Engines) -> None:
    """Aborted in the middle of its prefill, and in the middle of its decode; then asked again."""
    b = engines.block
    requests = asks([prompt(3 * b + 5, seed=59)])
    expected = engines.solo(requests)
    engine = engines.get(max_num_batched_tokens=256)
    for steps in (1, 2, 3, 6):
        engine.start_and_abort(requests[0], steps)
        run = engine.run(requests)
        assert run.results[0].cached <= 256 * steps, "more was published than was computed"
        assert_same(expected, run.results, f"aborted after {steps} steps")
        engine.reset()


def test_eviction_keeps_what_is_left_right(engines: Engines) -> None:
    """F22: private prompts push part of a cached prefix out; hits get shorter, bits stay."""
    b = engines.block
    requests = asks([prompt(3 * b, seed=60)], max_tokens=4)
    expected = engines.solo(requests)
    engine = engines.get(num_gpu_blocks_override=36, max_model_len=4 * b, max_num_seqs=4)
    engine.run(requests)
    hits = []
    for i in range(6):
        engine.run(asks([prompt(b + 70 * i, seed=61 + i)], max_tokens=2))
        run = engine.run(requests)
        hits.append(run.results[0].cached)
        assert_same(expected, run.results, f"after {i + 1} private prompts, {hits[-1]} tokens cached")
        # Push the prefix back to the cold end of the cache, a little further each time.
        for j in range(i):
            engine.run(asks([prompt(2 * b, seed=70 + 10 * i + j)], max_tokens=2))
    assert len(set(hits)) > 1, f"void: nothing was evicted, hits {hits}"
