"""Axis hit (F01): cold, on a hit, and on a hit in a batch, for hits on the grid and on whole blocks."""

import pytest

from tests.harness.compare import Result, assert_same
from tests.harness.engine import Ask, Engine, asks
from tests.harness.prompts import prompt
from tests.v1.determinism.conftest import Build

TOKENS = 8


@pytest.fixture(scope="module", params=["grid", "block"])
def cached(caching_engine: Build, request: pytest.FixtureRequest) -> Engine:
    """An engine whose hits land every 64 tokens (the default), or on whole blocks only."""
    if request.param == "grid":
        engine = caching_engine()
        assert engine.unit < engine.block
        return engine
    block = caching_engine().block
    engine = caching_engine(prefix_match_unit=block)
    assert engine.unit == engine.block == block
    return engine


def family(engine: Engine) -> tuple[Ask, list[Ask]]:
    """A request, and others that share its first block and a bit; their own parts end anywhere."""
    shared = prompt(engine.block + 12, seed=21)
    suffixes = [prompt(length, seed=22) for length in (30, 51, 52, 53, 180, 257, engine.block + 53)]
    return Ask(tuple(shared + prompt(40, seed=23)), 1), asks([shared + suffix for suffix in suffixes], TOKENS)


def strangers() -> list[Ask]:
    """Requests that hit nothing; the later ones join decode steps."""
    arrivals = ((5, 0), (65, 0), (130, 3), (600, 5))
    return [Ask(tuple(prompt(length, seed=24)), 4, at) for length, at in arrivals]


def hit_alone(engine: Engine, primer: Ask, requests: list[Ask]) -> list[Result]:
    """Each request alone on a cache that holds the primer only."""
    results = []
    for request in requests:
        engine.reset()
        results += engine.run([primer]).results and engine.run([request]).results
    return results


def test_same_path_hit_alone_and_in_batch(cached: Engine) -> None:
    """The same hit, batch 1 against batch N."""
    primer, requests = family(cached)
    alone = hit_alone(cached, primer, requests)
    cached.reset()
    cached.run([primer])
    run = cached.run([*requests, *strangers()])
    floored = (cached.block + 12) // cached.unit * cached.unit
    batch = run.results[: len(requests)]
    assert [r.cached for r in alone] == [r.cached for r in batch] == [floored] * len(requests)
    assert run.record.shared_prefills() > 1
    assert any(run.record.mixed_steps(i) for i in run.ids[: len(requests)])
    assert_same(alone, batch, "batch 1 against N")


def test_cold_against_hit(cached: Engine) -> None:
    """From an empty cache, on the request's own prompt, and on a shared prefix: one answer."""
    primer, requests = family(cached)
    cold = cached.alone(requests)
    assert all(result.cached == 0 for result in cold)
    cached.reset()
    for request in requests:
        cached.run([request])
    own = cached.alone(requests, keep_cache=True)
    expected = [(len(r.prompt) - 1) // cached.unit * cached.unit for r in requests]
    assert [result.cached for result in own] == expected
    assert_same(cold, own, "cold against a hit on the same prompt")
    shared = hit_alone(cached, primer, requests)
    assert all(result.cached > 0 for result in shared)
    assert_same(cold, shared, "cold against a hit on a shared prefix")


def test_ragged_prompt_below_the_grid_floors_to_zero(cached: Engine) -> None:
    """A repeated prompt shorter than the hit's granularity takes nothing from the cache."""
    lengths = (1, cached.unit // 2 + 3, cached.unit - 1, cached.unit)
    requests = asks([prompt(length, seed=25) for length in lengths], TOKENS)
    cold = cached.alone(requests)
    again = cached.alone(requests, keep_cache=True)
    batch = cached.run(requests).results
    assert [r.cached for r in again] == [r.cached for r in batch] == [0] * len(requests)
    assert_same(cold, again, "alone")
    assert_same(cold, batch, "in a batch")
