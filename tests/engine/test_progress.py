"""No starvation and no livelock on the grid (F33, F34)."""

import pytest

from tests.harness.compare import assert_same
from tests.harness.engine import Ask, Engines, Run, asks
from tests.harness.prompts import prompt

pytestmark = pytest.mark.engine


def _steps(run: Run) -> int:
    return len(run.record.steps)


@pytest.mark.parametrize(("blocks", "extra"), [(1, -1), (1, 0), (1, 1), (1, 63), (2, -1)])
def test_budgets_around_one_block(engines: Engines, blocks: int, extra: int) -> None:
    """F33: stock waits for ever, or refuses, where a block does not fit the budget."""
    b = engines.block
    budget = blocks * b + extra
    lengths = [b // 2, b, 2 * b + 1, 3 * b, 4 * b]
    requests = asks([prompt(n, seed=30) for n in lengths], max_tokens=4)
    expected = engines.solo(requests)
    run = engines.get(max_num_batched_tokens=budget, max_num_seqs=8).run(requests)
    chunks = sum(-(-n // 64) for n in lengths)
    assert _steps(run) <= chunks + 20, "requests waited for each other"
    assert_same(expected, run.results)


@pytest.mark.parametrize("threshold", [0, 160], ids=["no-threshold", "threshold"])
def test_several_long_prompts_share_a_budget_of_a_block_and_a_half(engines: Engines, threshold: int) -> None:
    """F34: the share left for a request is less than a block, and nobody starves."""
    b = engines.block
    budget = b + b // 2
    requests = asks([prompt(10 * b, seed=31 + i) for i in range(4)], max_tokens=4)
    expected = engines.solo(requests)
    run = engines.get(
        max_num_batched_tokens=budget, max_num_seqs=4, long_prefill_token_threshold=threshold
    ).run(requests)
    assert _steps(run) <= 4 * (10 * b // budget) + 50
    shared = sum(step.prefills > 1 for step in run.record.steps)
    assert shared > 0, "the prompts never shared a step"
    assert_same(expected, run.results)


def test_a_waiting_prompt_gets_in_beside_a_full_decode_batch(engines: Engines) -> None:
    """The smallest allowed budget still fits one grid step beside the decodes."""
    decoding = asks([prompt(n, seed=35) for n in (4, 5, 6)], max_tokens=40)
    late = [Ask(tuple(prompt(300, seed=36)), max_tokens=4, at=5)]
    expected = engines.solo(decoding + late)
    run = engines.get(max_num_batched_tokens=67, max_num_seqs=4).run(decoding + late)
    assert run.record.chunk_ends(run.ids[3])[:4] == [64, 128, 192, 256]
    waited = next(i for i, step in enumerate(run.record.steps) if run.ids[3] in step.chunks)
    assert waited <= 6, "the first grid step had room at once"
    assert_same(expected, run.results)
