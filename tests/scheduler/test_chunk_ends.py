"""Where a prompt is cut, step by step, in every cache mode and whatever else runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.build import Driver, prompt
from vllm_invariant import grid
from vllm_invariant.scheduler import GridSchedulerMixin

GRID, BLOCK = 64, 320
BUDGETS = (64, 96, 100, 128, 130, 192, 1024)
LENGTHS = (100, 200, 513, 1000, BLOCK + 1, 2 * BLOCK + 1)


def prefill_beside(driver: Driver, length: int, decodes: int) -> list[int]:
    """Chunk ends of a prompt that joins ``decodes`` requests which decode all along."""
    for i in range(decodes):
        driver.add(f"decode {i}", prompt(5, seed=100 + i), max_tokens=300)
    for _ in range(2 if decodes else 0):
        driver.step()
    driver.add("needle", prompt(length))
    driver.run(until=["needle"])
    assert all(len(driver.chunks(f"decode {i}")) >= len(driver.steps) - 2 for i in range(decodes))
    return driver.prefill_ends("needle")


def fits(budget: int, decodes: int) -> bool:
    """Whether preflight lets this budget start with as many places as it takes."""
    return budget >= grid.min_budget(decodes + 1, GRID)


SWEEP = [(b, n, d) for b in BUDGETS for n in LENGTHS for d in (0, 3) if fits(b, d)]


@pytest.mark.parametrize(("budget", "length", "decodes"), SWEEP)
def test_without_a_cache_the_plan_is_that_of_the_leftover_budget(drive, budget, length, decodes):
    driver = drive(mode="none", budget=budget, seqs=decodes + 1)
    ends = prefill_beside(driver, length, decodes)
    assert ends == grid.chunk_plan(length, [budget - decodes], GRID)


@pytest.mark.parametrize(("budget", "length", "decodes"), SWEEP)
def test_with_a_cache_it_also_stops_where_states_are_kept(drive, budget, length, decodes):
    """The last block boundary and the last hit position before the prompt's end."""
    driver = drive(budget=budget, seqs=decodes + 1)
    ends = prefill_beside(driver, length, decodes)
    assert ends == sorted(set(ends)) and ends[-1] == length
    assert all(grid.is_on(end, GRID) for end in ends[:-1])
    kept = {grid.floor(length - 1, BLOCK), grid.floor(length - 1, GRID)} - {0}
    assert kept <= set(ends)
    # Two stops more than the leftover budget asks for, and one at each block boundary it crosses.
    assert len(ends) <= len(grid.chunk_plan(length, [budget - decodes], GRID)) + 2 + length // BLOCK


# A few of the above, written out.  (mode, budget, length, decodes) -> chunk ends.
TABLE = [
    (("none", 64, 200, 0), [64, 128, 192, 200]),
    (("none", 96, 200, 0), [64, 128, 200]),
    (("none", 130, 513, 3), [64, 128, 192, 256, 320, 384, 448, 513]),
    (("none", 192, 513, 0), [192, 384, 513]),
    (("none", 192, 513, 3), [128, 256, 384, 513]),
    (("none", 1024, 1000, 3), [1000]),
    (("align", 192, 513, 0), [192, 320, 512, 513]),
    (("align", 1024, 100, 0), [64, 100]),
    (("align", 1024, 513, 0), [320, 512, 513]),
    (("align", 1024, 1000, 3), [960, 1000]),
    (("align", 1024, 641, 0), [640, 641]),
    (("align", 100, 321, 3), [64, 128, 192, 256, 320, 321]),
]


@pytest.mark.parametrize(("case", "ends"), TABLE)
def test_table(drive, case, ends):
    mode, budget, length, decodes = case
    assert prefill_beside(drive(mode=mode, budget=budget, seqs=decodes + 1), length, decodes) == ends


@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("length", [GRID + 1, 2 * GRID + 1, BLOCK + 1, 2 * BLOCK + 1])
def test_a_one_token_remainder_is_scheduled(drive, mode, asynchronous, length):
    """The budget beside three decodes is one grid step, so the last token has a step of its own."""
    driver = drive(mode=mode, budget=GRID + 3, seqs=4, asynchronous=asynchronous)
    ends = prefill_beside(driver, length, decodes=3)
    assert ends == [*range(GRID, length, GRID), length]
    assert len(driver.requests["needle"].output_token_ids) == 4


@pytest.mark.parametrize("asynchronous", [False, True])
@given(data=st.data())
def test_no_chunk_ever_ends_off_the_grid(drive, asynchronous, data):
    """Random companies: everybody finishes, in a bounded number of steps, cut on the grid."""
    seqs = data.draw(st.integers(1, 6), label="seqs")
    budget = data.draw(st.integers(grid.min_budget(seqs, GRID), 700), label="budget")
    mode = data.draw(st.sampled_from(["none", "align"]), label="mode")
    lengths = data.draw(st.lists(st.integers(1, 1300), min_size=1, max_size=8), label="lengths")
    outputs = data.draw(st.integers(1, 30), label="outputs")
    driver = drive(mode=mode, budget=budget, seqs=seqs, asynchronous=asynchronous)
    for i, length in enumerate(lengths):
        # Even requests share a prefix, so that some are hits.
        driver.add(str(i), prompt(length, seed=i if i % 2 else 0), max_tokens=outputs)
        if data.draw(st.booleans()):
            driver.step()
    driver.run(most=sum(-(-n // GRID) for n in lengths) + len(lengths) * (outputs + 3))
    for i, length in enumerate(lengths):
        ends = driver.prefill_ends(str(i))
        assert ends[-1] == length and all(grid.is_on(end, GRID) for end in ends[:-1])
        assert len(driver.requests[str(i)].output_token_ids) == outputs
        assert all(end - start == 1 for start, end in driver.chunks(str(i)) if start >= length)


@pytest.mark.parametrize(("budget", "seqs"), [(16, 1), (63, 1), (64, 2), (66, 4)])
def test_a_budget_that_may_never_fit_a_grid_step_is_refused(drive, budget, seqs):
    with pytest.raises(ValueError, match=f"--max-num-batched-tokens {grid.min_budget(seqs, GRID)}"):
        drive(mode="none", budget=budget, seqs=seqs)


@pytest.mark.parametrize(("block", "unit"), [(544, 32), (320, 32), (576, 32)])
def test_blocks_off_the_grid_are_refused(drive, block, unit):
    with pytest.raises(ValueError, match=r"is not a multiple of the 64-token grid"):
        drive(block=block, unit=unit)


# --- rules turned off ----------------------------------------------------------------------------


def test_stock_cuts_off_the_grid(drive):
    ends = prefill_beside(drive(mode="none", budget=100, seqs=4, stock=True), 513, 3)
    assert any(not grid.is_on(end, GRID) for end in ends[:-1])


def test_a_chunk_end_moved_off_the_grid_is_not_served(drive, monkeypatch):
    """The narrowing turned off: the check of the finished schedule stops the engine."""
    monkeypatch.setattr(GridSchedulerMixin, "_mamba_block_aligned_split", lambda self, request, n, *rest: n)
    driver = drive(mode="none", budget=100, seqs=1)
    driver.add("needle", prompt(513))
    with pytest.raises(RuntimeError, match="prefill chunk ends at 100 of 513 tokens, off the 64-token grid"):
        driver.run()
