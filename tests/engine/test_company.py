"""Axis company (F03): prefills join and leave the decode steps of a request."""

import pytest

from tests.harness.compare import assert_same
from tests.harness.engine import Ask, Engines, asks
from tests.harness.prompts import prompt

pytestmark = pytest.mark.engine

NEEDLE = Ask(tuple(prompt(50, seed=3)), max_tokens=96)
JOINING = [
    Ask(tuple(prompt(length, seed=4)), max_tokens=8, at=step)
    for length, step in ((2, 5), (64, 6), (300, 20), (2000, 63))
]


@pytest.mark.parametrize("caching", [False, True], ids=["no-cache", "cache"])
@pytest.mark.parametrize("budget", [128, 1024])
def test_prefills_join_a_decoding_request(engines: Engines, caching: bool, budget: int) -> None:
    """The needle decodes 96 tokens while prompts of 2, 64, 300 and 2,000 tokens come and go."""
    requests = [NEEDLE, *JOINING]
    expected = engines.solo(requests)
    engine = engines.get(enable_prefix_caching=caching, max_num_batched_tokens=budget)
    run = engine.run(requests)
    least = sum(-(-len(ask.prompt) // budget) for ask in JOINING)
    assert run.record.mixed_steps(run.ids[0]) >= least, "the needle's decode rows saw no prefill"
    assert_same(expected, run.results)


@pytest.mark.parametrize("length", [64, 65, 129])
def test_copies(engines: Engines, length: int) -> None:
    """One request against eight copies of it in one step."""
    request = asks([prompt(length, seed=5)])
    expected = engines.solo(request) * 8
    run = engines.get(enable_prefix_caching=False).run(request * 8)
    assert run.record.shared_prefills() == 8
    assert_same(expected, run.results)


def test_one_token_remainders_among_decodes(engines: Engines) -> None:
    """Prompts whose last chunk is one token share steps with decodes, and neither side notices."""
    decoding = asks([prompt(n, seed=6) for n in (10, 70, 130)], max_tokens=40)
    joining = [Ask(tuple(prompt(n, seed=7)), at=8 + 3 * i) for i, n in enumerate((65, 129, 193, 257))]
    requests = decoding + joining
    expected = engines.solo(requests)
    run = engines.get(max_num_seqs=8).run(requests)
    assert run.record.one_token_remainders() >= len(joining)
    assert run.record.mixed_steps(run.ids[0]) >= 2 * len(joining)
    assert_same(expected, run.results)
