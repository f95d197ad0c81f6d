"""Axis batch (F02): a request alone, among others, and among the same others in another order."""

import random

import pytest

from tests.harness.compare import assert_same
from tests.harness.engine import Ask, Engines, asks
from tests.harness.prompts import prompts

pytestmark = pytest.mark.engine

LENGTHS = (2, 3, 63, 64, 65, 127, 128, 129, 191, 300, 511)
F02 = prompts([LENGTHS[i % len(LENGTHS)] for i in range(31)] + [1])


@pytest.mark.parametrize("caching", [False, True], ids=["no-cache", "cache"])
def test_alone_together_and_shuffled(engines: Engines, caching: bool) -> None:
    """32 prompts of 1 to 511 tokens: alone, all in one call, and twice in another order."""
    requests = asks(F02)
    expected = engines.solo(requests)
    engine = engines.get(enable_prefix_caching=caching, max_num_seqs=64, max_num_batched_tokens=8192)
    for order in (None, 1, 2):
        engine.reset()
        indices = list(range(len(requests)))
        if order is not None:
            random.Random(order).shuffle(indices)
        run = engine.run([requests[i] for i in indices])
        assert run.record.shared_prefills() == len(requests), "all prompts share the first step"
        assert_same([expected[i] for i in indices], run.results, f"order {order}")
    distinct = requests[: len(LENGTHS)] + requests[-1:]
    assert_same(engines.solo(distinct), engine.alone(distinct), "alone in an engine for many")


@pytest.mark.parametrize("caching", [False, True], ids=["no-cache", "cache"])
def test_seeded_sampling(engines: Engines, caching: bool) -> None:
    """Sampled tokens follow the request's own seed: not its neighbours, not its chunks."""
    requests = [Ask(tuple(p), 8, temperature=0.8, seed=7 + i) for i, p in enumerate(F02[:11])]
    expected = engines.solo(requests)
    greedy = engines.solo(asks(F02[:11]))
    assert all(a.tokens != b.tokens for a, b in zip(expected, greedy, strict=True)), "nothing was sampled"
    run = engines.get(enable_prefix_caching=caching, max_num_batched_tokens=256).run(requests)
    assert run.record.shared_prefills() > 4
    assert max(len(run.record.chunk_ends(i)) for i in run.ids) > 1, "no prompt was cut"
    assert_same(expected, run.results)
