"""Axis cut (F05, F35): a prompt's bits do not follow the chunks a budget forces."""

import pytest

from tests.harness.compare import assert_same
from tests.harness.engine import Ask, Engines, asks
from tests.harness.prompts import prompt

pytestmark = pytest.mark.engine

GRID = 64
PROMPTS = [tuple(prompt(length, seed=8)) for length in (100, 200, 257, 513, 1000)]
COMPANIONS = asks([prompt(length, seed=9) for length in (5, 33, 70)], max_tokens=72)
BUDGETS = (64, 96, 100, 128, 130, 192, 1024)

# Chunk ends of the 1,000-token prompt in each engine, filled in by the tests below.
_ends: dict[tuple[int, bool, int], tuple[int, ...]] = {}


@pytest.mark.parametrize(
    ("budget", "caching"),
    [(budget, False) for budget in BUDGETS] + [(budget, True) for budget in (64, 100, 130, 1024)],
)
def test_budgets(engines: Engines, budget: int, caching: bool) -> None:
    """Every prompt alone, then every prompt beside three decoding requests where the budget allows."""
    needles = [Ask(p, max_tokens=6) for p in PROMPTS]
    expected = engines.solo(needles)
    places = 4 if budget >= GRID + 3 else 1
    engine = engines.get(enable_prefix_caching=caching, max_num_batched_tokens=budget, max_num_seqs=places)
    for needle, want in zip(needles, expected, strict=True):
        engine.reset()
        run = engine.run([needle])
        _note(budget, caching, 0, run.record.chunk_ends(run.ids[0]))
        assert_same([want], run.results, f"{len(needle.prompt)} tokens alone")
    if places == 1:
        return
    beside = engines.solo(COMPANIONS)
    engine = engines.get(enable_prefix_caching=caching, max_num_batched_tokens=budget, max_num_seqs=places)
    for start in range(0, len(needles), 2):
        # One place is left, so the needles follow each other while the companions decode.
        joining = [Ask(needle.prompt, needle.max_tokens, at=6) for needle in needles[start : start + 2]]
        engine.reset()
        run = engine.run(COMPANIONS + joining)
        for request_id in run.ids[3:]:
            _note(budget, caching, 3, run.record.chunk_ends(request_id))
        assert run.record.mixed_steps(run.ids[0]) > 0, "the companions were not decoding"
        assert_same(beside + expected[start : start + 2], run.results, "beside three decodes")


def _note(budget: int, caching: bool, companions: int, ends: list[int]) -> None:
    assert all(end % GRID == 0 for end in ends[:-1]), f"chunk ends {ends} are off the grid"
    if ends[-1] == 1000:
        _ends[budget, caching, companions] = tuple(ends)


def test_budgets_did_cut_differently() -> None:
    """The sweep above is void unless its engines cut the same prompt at different places."""
    if len(_ends) < 2:
        pytest.skip("needs the whole module")
    alone = {budget: _ends[budget, False, 0] for budget in BUDGETS}
    assert len(set(alone.values())) >= 3, alone
    assert len(alone[64]) == 16 and len(alone[1024]) == 1
    assert _ends[128, False, 3] != _ends[128, False, 0], "companions took no budget"


@pytest.mark.parametrize(("budget", "places"), [(16, 1), (17, 1), (48, 1), (63, 1), (64, 4), (66, 4)])
def test_a_budget_below_one_grid_step_is_refused(engines: Engines, budget: int, places: int) -> None:
    """No chunk that does not finish its prompt could ever end on the grid."""
    with pytest.raises(ValueError, match=rf"--max-num-batched-tokens {budget} .*{GRID + places - 1} or more"):
        engines.config(max_num_batched_tokens=budget, max_num_seqs=places)


@pytest.mark.parametrize("budget", [65])
def test_a_budget_of_little_more_than_one_grid_step(engines: Engines, budget: int) -> None:
    """F35: 65 tokens a step beside one decoding request leaves exactly one grid step."""
    needles = [Ask(p, max_tokens=6, at=4) for p in PROMPTS[:3]]
    requests = [COMPANIONS[1], *needles]
    expected = engines.solo(requests)
    engine = engines.get(enable_prefix_caching=False, max_num_batched_tokens=budget, max_num_seqs=2)
    run = engine.run(requests)
    assert run.record.mixed_steps(run.ids[0]) >= 6
    assert run.record.chunk_ends(run.ids[3]) == [64, 128, 192, 256, 257]
    assert_same(expected, run.results)
