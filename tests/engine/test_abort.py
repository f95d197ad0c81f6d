"""Requests that end before their time (F09, F17, F36): what they published was computed, all of it.

Free cache memory holds NaN in these tests, so a published block that was never written shows.
"""

import pytest

from tests.harness import device
from tests.harness.compare import assert_same
from tests.harness.engine import Ask, Engines, asks
from tests.harness.memory import LARGE, NAN, Memory, Poisoner, apart
from tests.harness.prompts import prompt

pytestmark = pytest.mark.engine

BUDGET = 128


def test_aborted_after_some_chunks_then_asked_again(engines: Engines) -> None:
    """After 1, 2, 5 and 11 of 13 chunks; the retry and a sibling hit what was computed, and no more."""
    long = prompt(12 * BUDGET + 5, seed=220)
    requests = asks([long, long[:900] + prompt(50, seed=221)])
    expected = engines.solo(requests)
    # By default states are kept where prompts end, so an unfinished one leaves none.
    engine = engines.get(max_num_batched_tokens=BUDGET, prefix_cache_retention_interval=engines.block)
    poisoner = Poisoner(engine, NAN)
    for chunks in (1, 2, 5, 11):
        engine.reset()
        engine.start_and_abort(requests[0], chunks)
        with poisoner.watching():
            run = engine.run(requests, poisoner.sweep)
        assert run.results[0].cached <= BUDGET * chunks, "more was published than was computed"
        assert chunks < 3 or run.results[0].cached > 0, "void: nothing of it was left"
        assert_same(expected, run.results, f"aborted after {chunks} chunks")
    assert poisoner.reused > 0


def test_a_published_block_that_nobody_wrote_is_seen(engines: Engines) -> None:
    """As if the last chunk before the abort had been published and never computed."""
    request = asks([prompt(4 * BUDGET + 70, seed=226)])
    expected = engines.solo(request)
    engine = engines.get(max_num_batched_tokens=BUDGET, prefix_cache_retention_interval=engines.block)
    pool = engine.scheduler.kv_cache_manager.block_pool
    for byte in (None, LARGE):
        engine.reset()
        engine.start_and_abort(request[0], 4)
        published = [block.block_id for block in pool.blocks if block.block_hash is not None]
        assert published
        if byte is not None:
            Memory(engine).poison(published, byte)
        assert bool(apart(engine, request, expected)) == (byte is not None)
        assert any(any(step.hits.values()) for step in engine.record.steps), "void: nothing was hit"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("asynchronous", device.ASYNC_SCHEDULING)
def test_aborted_between_schedule_and_execution(engines: Engines, when: str, asynchronous: bool) -> None:
    """The step that computes a published block is under way; twins come at once, and once it is over."""
    long = prompt(6 * BUDGET + 5, seed=222)
    lost = Ask(tuple(long), max_tokens=30)
    other = Ask(tuple(prompt(70, seed=223)), max_tokens=40)
    twins = [Ask(tuple(long), 6, at=0), Ask(tuple(long[:700] + prompt(40, seed=224)), 6, at=25)]
    expected = engines.solo([other, *twins])
    engine = engines.get(max_num_batched_tokens=BUDGET + 8, async_scheduling=asynchronous)
    poisoner = Poisoner(engine, NAN)
    for number in (1, 2, 5, 9):
        engine.reset()
        name = engine.add(lost)

        def abort(name: str = name) -> None:
            assert name in engine.scheduler.requests
            engine.llm.llm_engine.abort_request([name], internal=True)
            assert name not in engine.scheduler.requests

        late = [Ask(twin.prompt, twin.max_tokens, at=twin.at + number) for twin in twins]
        with poisoner.watching(), engine.at_execution(number, abort, when=when) as acted:
            run = engine.run([other, *late], poisoner.sweep)
        assert acted and acted[0] > 0
        assert number == 1 or any(result.cached for result in run.results[1:]), "void: nothing was published"
        assert_same(expected, run.results, f"aborted {when} execution {number}")


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_an_engine_pause(engines: Engines, mode: str) -> None:
    """Paused in a prefill and in decode: kept requests go on, aborted ones leave nothing wrong behind."""
    requests = asks([prompt(n, seed=225) for n in (5 * BUDGET + 3, 40, 200)], max_tokens=20)
    expected = engines.solo(requests)
    engine = engines.get(max_num_batched_tokens=BUDGET)
    poisoner = Poisoner(engine, NAN)
    core = engine.core
    if mode == "abort":
        for steps in (3, 6, 3, 4):  # the second time as far as the place the prompt may be hit to
            names = [engine.add(request) for request in requests]
            for _ in range(steps):
                engine.llm.llm_engine.step()
            core.pause_scheduler("abort", clear_cache=False)
            assert not engine.scheduler.has_unfinished_requests()
            core.resume_scheduler()
            engine.llm.llm_engine.abort_request(names, internal=True)  # the client's side of it

    def pause(step: int) -> None:
        poisoner.sweep()
        if mode == "keep" and step in (3, 12):
            core.pause_scheduler("keep", clear_cache=False)
            before = len(engine.record.steps)
            assert not any(output.finished for output in engine.llm.llm_engine.step())
            assert len(engine.record.steps) == before, "void: it did not pause"
            core.resume_scheduler()

    with poisoner.watching():
        run = engine.run(requests, pause)
    assert mode == "keep" or run.results[0].cached > 0, "void: the aborted requests left nothing"
    assert_same(expected, run.results)
