"""What several files ask of an engine in the same way, each on models of its own."""

import random

from tests.harness.compare import Result, assert_same
from tests.harness.engine import Ask, Engine
from tests.harness.prompts import prompt


def alone(engine: Engine, requests: list[Ask]) -> list[Result]:
    """Each request by itself, cold; then the cache is empty again."""
    results = engine.alone([Ask(r.prompt, r.max_tokens, 0, r.temperature, r.seed) for r in requests])
    assert all(result.cached == 0 for result in results)
    engine.reset()
    return results


def assert_in_any_order(engine: Engine, requests: list[Ask], expected: list[Result]) -> None:
    """All in one step, twice, each time in another order; then the cache is empty again."""
    for order in (1, 2):
        indices = random.Random(order).sample(range(len(requests)), len(requests))
        run = engine.run([requests[i] for i in indices])
        assert run.record.shared_prefills() == len(requests)
        assert_same([expected[i] for i in indices], run.results, f"order {order}")
        engine.reset()


def assert_joined(engine: Engine, seed: int) -> None:
    """Prefills of 2 to 700 tokens join and leave the decode steps of a request."""
    needle = Ask(tuple(prompt(50, seed=seed)), max_tokens=32)
    lengths = ((2, 4), (64, 5), (300, 12), (700, 20))
    joining = [Ask(tuple(prompt(n, seed=seed + 1)), 6, at) for n, at in lengths]
    requests = [needle, *joining]
    expected = alone(engine, requests)
    run = engine.run(requests)
    assert run.record.mixed_steps(run.ids[0]) >= len(joining)
    assert_same(expected, run.results)
