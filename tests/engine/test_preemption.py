"""Axis history (F25, F36): preemption at every step, and by priority."""

import random
from dataclasses import replace

import pytest

from tests.harness import device
from tests.harness.compare import assert_same, differing
from tests.harness.engine import Ask, Engine, Engines, Run, asks
from tests.harness.prompts import prompt
from tests.harness.record import total_preemptions

pytestmark = pytest.mark.engine

TOKENS = 40


def test_one_request_preempted_at_every_step(engines: Engines) -> None:
    """After each of its 20 tokens; every time it comes back from an empty cache."""
    request = asks([prompt(100, seed=230)], max_tokens=20)
    expected = engines.solo(request)
    engine = engines.get()
    done: list[int] = []

    def preempt(step: int) -> None:
        for running in engine.scheduler.running:
            if running.num_output_tokens not in done:
                done.append(running.num_output_tokens)
                engine.preempt(running, forget=True)
                return

    run = engine.run(request, preempt)
    assert set(range(1, 20)) <= set(done)
    assert run.record.preemptions[run.ids[0]] >= 19
    assert_same(expected, run.results)


def test_one_request_for_each_step_preempted_there(engines: Engines) -> None:
    """40 requests in one batch, the i-th preempted after i tokens while the others go on; it then hits."""
    b = engines.block
    requests = asks([prompt(b + 70, seed=231 + i % 4) for i in range(TOKENS)], max_tokens=TOKENS)
    expected = engines.solo(requests)
    engine = engines.get(max_num_seqs=TOKENS, max_num_batched_tokens=4096)
    places: dict[str, int] = {}

    def preempt(step: int) -> None:
        for running in list(engine.scheduler.running):
            place = places.setdefault(running.request_id, len(places))
            if running.num_output_tokens == place + 1 and running.num_preemptions == 0:
                engine.preempt(running)

    run = engine.run(requests, preempt)
    assert sorted(run.record.preemptions[i] for i in run.ids) == [0] + [1] * (TOKENS - 1)
    assert sum(run.record.hit(i) > 0 for i in run.ids) >= TOKENS - 4, "void: they came back by prefill"
    assert_same(expected, run.results)


DRAWN = [Ask(tuple(prompt(n, seed=233)), 20, temperature=0.9, seed=n) for n in (70, 129, 40)]


def _preempted_under_way(engine: Engine, number: int) -> Run:
    """Preempted after the execution of a step and before its result is taken, which is then dropped."""
    engine.reset()
    with engine.at_execution(number, lambda: engine.preempt(None, forget=True), when="after") as acted:
        run = engine.run(DRAWN)
    assert acted and all(run.record.preemptions[i] == 1 for i in run.ids)
    return run


@pytest.mark.parametrize("asynchronous", device.ASYNC_SCHEDULING)
def test_a_token_that_was_drawn_and_dropped(engines: Engines, asynchronous: bool) -> None:
    """It is drawn again, the same."""
    expected = engines.solo(DRAWN)
    engine = engines.get(async_scheduling=asynchronous)
    for number in (2, 7, 13):
        run = _preempted_under_way(engine, number)
        assert_same(expected, run.results, f"preempted during execution {number}")


def test_a_generator_that_is_not_rewound(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule turned off, in the model runner that needs it."""
    from vllm_invariant import sampling

    expected = engines.solo(DRAWN)
    engine = engines.get(async_scheduling=False)
    if type(engine.runner).__module__ != "vllm.v1.worker.gpu_model_runner" and device.NAME == "cuda":
        pytest.skip("Model Runner V2 draws by position")
    monkeypatch.setattr(sampling, "rewind", lambda *_: None)
    assert differing(expected, _preempted_under_way(engine, 7).results)


def _staggered(b: int) -> list[Ask]:
    """20 requests that share 3.2 blocks, priorities from -5 to 10."""
    source = random.Random(7)
    shared = prompt(16 * b // 5, seed=235)
    requests = []
    for i in range(20):
        # Most outgrow their fourth block while they decode.
        tokens = tuple(shared + prompt(b * source.randrange(60, 80) // 100, seed=236 + i))
        requests.append(Ask(tokens, 40, at=3 * i, priority=source.randrange(-5, 11)))
    requests[12] = replace(requests[12], priority=-6)  # late and urgent
    return requests


@pytest.mark.parametrize(
    ("policy", "caching"),
    [("priority", True), ("priority", False), ("fcfs", True)],
    ids=["priority-cache", "priority-no-cache", "fcfs-cache"],
)
def test_priorities(engines: Engines, policy: str, caching: bool) -> None:
    """F36: whoever is preempted for whom, each request has the bits it has alone; the prefix is hit."""
    b = engines.block
    requests = _staggered(b)
    expected = engines.solo(requests)
    groups = len(engines.get().scheduler.kv_cache_config.kv_cache_groups)
    engine = engines.get(
        enable_prefix_caching=caching,
        scheduling_policy=policy,
        max_model_len=5 * b,
        max_num_seqs=8,
        num_gpu_blocks_override=1 + (5 * (4 + groups) if caching else 3 * (3 + groups) + 1),
    )
    if policy == "fcfs":
        requests = [replace(request, priority=0) for request in requests]
    run = engine.run(requests)
    if policy == "priority":
        assert total_preemptions(run.record, run.ids) > 0, "void: nobody was preempted"
    assert any(result.cached for result in run.results) == caching
    assert_same(expected, run.results)
