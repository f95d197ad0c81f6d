"""Axis hit, for prompts that share a prefix and nothing else: they hit all of it, and no bit moves."""

import pytest

from tests.harness.compare import assert_same
from tests.harness.engine import Engines, asks
from tests.harness.prompts import prompt

pytestmark = pytest.mark.engine


def test_a_shared_prefix_is_hit_to_its_last_grid_position(engines: Engines) -> None:
    """The first sibling computes it, the second saves the state at its end, the others hit."""
    b = engines.block
    shared = prompt(2 * b + b // 2, seed=60)
    junction = len(shared) // 64 * 64
    assert junction % b, "the end of the shared prefix is to lie inside a block"
    requests = asks([shared + prompt(40 + 30 * i, seed=61 + i) for i in range(5)])
    expected = engines.solo(requests)
    engine = engines.get()
    hits = []
    for request, want in zip(requests[:3], expected, strict=False):
        run = engine.run([request])
        assert_same([want], run.results, "one after another")
        hits.append(run.results[0].cached)
    assert hits[0] == 0 and 0 <= hits[1] < junction == hits[2]
    run = engine.run(requests)
    assert [result.cached for result in run.results][3:] == [junction, junction]
    assert_same(expected, run.results, "together, on hits")


def test_siblings_that_arrive_together(engines: Engines) -> None:
    """Cold, in one burst: whoever waits for the state hits it."""
    b = engines.block
    shared = prompt(b + b // 2, seed=70)
    junction = len(shared) // 64 * 64
    requests = asks([shared + prompt(50, seed=71 + i) for i in range(6)], max_tokens=4)
    expected = engines.solo(requests)
    engine = engines.get()
    run = engine.run(requests)
    assert_same(expected, run.results, "in one burst")
    assert sum(result.cached == junction for result in run.results) >= 3
