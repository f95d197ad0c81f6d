"""States are saved where prompts part: shared prefixes are hit whole, whatever each prompt adds to them."""

from collections.abc import Callable

import pytest

from tests.scheduler.build import Driver, prompt
from vllm_invariant.junction import WORTH_A_STEP, SeenPrefixes

SHARED = 2000  # tokens; its last grid position is 1984, inside the second block of 1088
BLOCK = 1088
JUNCTION = 1984


def sibling(number: int, own: int = 64) -> list[int]:
    """The shared prefix and ``own`` tokens of this sibling's."""
    return prompt(SHARED) + prompt(own, seed=1000 + number)


@pytest.fixture
def driver(drive: Callable[..., Driver]) -> Driver:
    """A scheduler whose budget holds any of the prompts."""
    return drive(block=BLOCK, budget=4096)


def test_the_second_sibling_saves_and_the_third_hits(driver: Driver) -> None:
    """The first has nothing to part from; its own tail is of no use to the others."""
    for number in range(4):
        driver.add(f"r{number}", sibling(number))
        driver.run()
    assert [driver.hits(f"r{n}")[0] for n in range(4)] == [0, BLOCK, JUNCTION, JUNCTION]
    assert JUNCTION in driver.prefill_ends("r1")
    for name in ("r2", "r3"):
        assert driver.chunks(name)[0] == (JUNCTION, SHARED + 64), "one step, without a stop at its own tail"


def test_siblings_that_come_together(driver: Driver) -> None:
    """One of them saves, the rest wait a step and hit."""
    for number in range(6):
        driver.add(f"r{number}", sibling(number))
    driver.run()
    assert [driver.hits(f"r{n}")[0] for n in range(6)] == [0, BLOCK, *[JUNCTION] * 4]


def test_a_prefix_that_nothing_shares_costs_no_stop(driver: Driver) -> None:
    """Junctions come from prompts that were seen."""
    for number in range(3):
        driver.add(f"r{number}", prompt(2064, seed=50 + number))
        driver.run()
        assert driver.prefill_ends(f"r{number}") == [BLOCK, 2048, 2064]


def test_a_longer_prompt_keeps_the_junction_of_a_block_it_fills(driver: Driver) -> None:
    """The saver's prompt fills the junction's block and goes on: the entry must outlive that."""
    driver.add("first", sibling(0))
    driver.run()
    driver.add("long", sibling(1, own=2000))
    driver.run()
    driver.add("third", sibling(2))
    driver.run()
    assert driver.hits("third") == [JUNCTION]


def test_a_tail_close_behind_a_hit_is_not_worth_a_step(driver: Driver) -> None:
    """Each turn of a conversation is cached when enough has come together."""
    length, hits = 1100, []
    for turn in range(6):
        driver.add(f"t{turn}", prompt(length))
        driver.run()
        hits += driver.hits(f"t{turn}")
        length += 150
    assert hits[0] == 0 and hits == sorted(hits) and hits[-1] > BLOCK
    for turn in range(1, 6):
        start, end = driver.chunks(f"t{turn}")[0][0], 1100 + 150 * turn
        tail = (end - 1) // 64 * 64
        stopped = tail in driver.prefill_ends(f"t{turn}")
        assert stopped <= (tail - start >= WORTH_A_STEP or tail % BLOCK == 0)


def test_a_request_that_waits_does_not_part_from_itself(drive: Callable[..., Driver]) -> None:
    """Looked up again and again, its own prompt is not one it shares."""
    driver = drive(block=BLOCK, budget=4096, seqs=1)
    driver.add("busy", prompt(300, seed=7), max_tokens=6)
    driver.add("waits", prompt(1500, seed=8))
    driver.run()
    assert driver.prefill_ends("waits") == [BLOCK, 1472, 1500]


def test_seen_prefixes_forget_the_oldest_and_ends_first() -> None:
    """What is remembered of a prompt is always a prefix."""
    seen = SeenPrefixes(remembered=4)
    assert seen.add(["a", "ab", "abc"]) == 0
    assert seen.add(["a", "ab", "abx", "abxy"]) == 2
    assert seen.add(["a", "ab", "abc"]) == 2, "the end of the first prompt was forgotten"
    assert seen.add(["z"]) == 0
    assert seen.add(["a", "ab", "abc"]) == 3
