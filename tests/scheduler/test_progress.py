"""Nobody waits for ever, and nobody waits for a whole block's worth of budget (F33, F34)."""

import pytest

from tests.scheduler.build import prompt

GRID, BLOCK = 64, 320


@pytest.mark.parametrize("budget", [BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 63])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_budgets_around_one_block(drive, budget, asynchronous):
    """F33.  Prompts of half a block to four, all at once."""
    driver = drive(budget=budget, asynchronous=asynchronous)
    lengths = [BLOCK // 2, BLOCK, 2 * BLOCK + 1, 3 * BLOCK, 4 * BLOCK]
    for length in lengths:
        driver.add(str(length), prompt(length, seed=length))
    assert driver.run() <= sum(-(-n // GRID) for n in lengths) + 20


@pytest.mark.parametrize("threshold", [0, 160])
def test_long_prompts_share_the_budget(drive, threshold):
    """F34.  What is left for the second prompt is less than a block; it is used all the same."""
    budget, length = BLOCK * 3 // 2, 10 * BLOCK
    driver = drive(budget=budget, seqs=4, long_prefill=threshold)
    for i in range(4):
        driver.add(str(i), prompt(length, seed=i))
    assert driver.run() <= 4 * (length // budget) + 50
    assert any(sum(end <= length for _, end in step.chunks.values()) > 1 for step in driver.steps)


def steps_to_join(driver, most: int = 50) -> int | None:
    """Steps until a prompt of two blocks is first scheduled beside three decodes, None if never."""
    for i in range(3):
        driver.add(str(i), prompt(4 + i, seed=i), max_tokens=300)
    driver.step()
    driver.add("late", prompt(2 * BLOCK + 40, seed=9))
    return next((n for n in range(1, most) if "late" in driver.step().chunks), None)


@pytest.mark.parametrize("budget", [GRID + 3, BLOCK, BLOCK + 2])
def test_a_prompt_joins_a_full_decode_batch_at_once(drive, budget):
    """Even where a block never fits beside the decodes."""
    assert steps_to_join(drive(budget=budget, seqs=4)) == 1


def test_stock_lets_it_wait_for_ever(drive):
    """The rule turned off: the budget holds a block, the decodes leave less, stock rounds it to nothing."""
    assert steps_to_join(drive(budget=BLOCK, seqs=4, stock=True)) is None


def test_a_short_prompt_is_not_held_up_by_a_waiting_grid_step(drive):
    """Prompts shorter than a grid step need less than one, and go first where only they fit."""
    driver = drive(mode="none", budget=GRID + 4, seqs=5)
    driver.add("long", prompt(10 * GRID, seed=1), max_tokens=2)
    for i in range(4):
        driver.add(str(i), prompt(3, seed=2 + i), max_tokens=2)
    assert driver.run() <= 10 + 4 + 4


def test_the_oldest_waiting_prompt_takes_the_first_grid_step(drive):
    """First come, first served: later prompts do not overtake it on the grid."""
    driver = drive(mode="none", budget=GRID + 7)
    for i in range(6):
        driver.add(str(i), prompt(3 * GRID + 10, seed=i), max_tokens=30)
    driver.run()
    started = [next(n for n, step in enumerate(driver.steps) if str(i) in step.chunks) for i in range(6)]
    finished = [
        next(n for n, s in enumerate(driver.steps) if s.chunks.get(str(i), (0, 0))[1] > 3 * GRID)
        for i in range(6)
    ]
    assert started == sorted(started) and finished == sorted(finished)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_under_memory_pressure_everybody_finishes(drive, policy, asynchronous):
    """Six requests that do not fit together; each is preempted or waits, and none for ever."""
    driver = drive(policy=policy, blocks=24, seqs=6, asynchronous=asynchronous)
    for i in range(6):
        driver.add(str(i), prompt(2 * BLOCK - 20, seed=i), max_tokens=2 * BLOCK, priority=-i)
        driver.step()
    driver.run(most=12_000)
    assert sum(r.num_preemptions for r in driver.requests.values()) > 0, "there was room for all"
    assert all(len(r.output_token_ids) == 2 * BLOCK for r in driver.requests.values())


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("budget", [128, 300, 1024])
def test_a_prompt_as_large_as_the_cache_finishes(drive, asynchronous, budget):
    """F54: with exactly the blocks it needs, whatever steps are under way while it is scheduled."""
    sizes = drive(block=128).scheduler.blocks_needed(10 * 128 + 4)
    driver = drive(block=128, blocks=1 + sizes, budget=budget, asynchronous=asynchronous)
    request = driver.add("large", prompt(10 * 128 - 4), max_tokens=8)
    steps = driver.run(most=400)
    assert request.get_finished_reason().name == "LENGTH", request.get_finished_reason()
    assert request.num_preemptions <= 1 and steps < 100


def test_steps_under_way_would_leave_it_too_few_blocks(drive, monkeypatch):
    """The rule turned off: it starts over, and then ends with an error."""
    from vllm_invariant.history import HistoryMixin

    monkeypatch.setattr(HistoryMixin, "waits_for_its_own_blocks", lambda self, request: False)
    sizes = drive(block=128).scheduler.blocks_needed(10 * 128 + 4)
    driver = drive(block=128, blocks=1 + sizes, budget=128, asynchronous=True)
    request = driver.add("large", prompt(10 * 128 - 4), max_tokens=8)
    driver.run(most=400)
    assert request.get_finished_reason().name == "ERROR"
