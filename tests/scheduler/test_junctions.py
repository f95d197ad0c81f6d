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


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("unit", [64, BLOCK])
def test_hits_of_one_prefix_share_a_step(drive: Callable[..., Driver], unit: int, asynchronous: bool) -> None:
    """Whether they land on the grid or on whole blocks."""
    driver = drive(block=BLOCK, budget=4096, unit=unit, asynchronous=asynchronous)
    for number in range(3):
        driver.add(f"before{number}", sibling(number))
        driver.run()
    for number in range(3, 7):
        driver.add(f"r{number}", sibling(number))
    driver.step()
    assert driver.steps[-1].hits == {f"r{n}": BLOCK if unit == BLOCK else JUNCTION for n in range(3, 7)}
    driver.run()


def test_a_block_is_not_hit_in_the_step_that_computes_it(drive: Callable[..., Driver]) -> None:
    """Hits on whole blocks: who comes together with the first of a prefix waits for it."""
    driver = drive(block=BLOCK, budget=8192, unit=BLOCK)
    for number in range(4):
        driver.add(f"r{number}", sibling(number))
    driver.run()
    assert [driver.hits(f"r{n}")[0] for n in range(4)] == [0, *[BLOCK] * 3]
    assert driver.steps[0].chunks == {"r0": (0, BLOCK)}
    assert driver.steps[1].hits == {f"r{n}": BLOCK for n in range(1, 4)}, "together, one step later"


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


def test_a_conversation_saves_every_turn(driver: Driver) -> None:
    """Each turn goes on from the whole one before, and hits all of it, however little was added."""
    lengths = [1100 + 100 * turn for turn in range(6)]
    for turn, length in enumerate(lengths):
        driver.add(f"t{turn}", prompt(length))
        driver.run()
    hits = [driver.hits(f"t{turn}")[0] for turn in range(6)]
    assert hits == [0, *((length - 1) // 64 * 64 for length in lengths[:-1])]


@pytest.mark.parametrize("own", [64, 128, 500])
def test_a_siblings_tail_is_saved_where_it_pays(driver: Driver, own: int) -> None:
    """Behind a hit that ends where prompts part, a stop close to it is not worth its step."""
    for number in range(4):
        driver.add(f"r{number}", sibling(number, own))
        driver.run()
    tail = (SHARED + own - 1) // 64 * 64
    assert driver.hits("r3") == [JUNCTION]
    assert (tail in driver.prefill_ends("r3")) == (tail - JUNCTION >= WORTH_A_STEP)


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
    assert seen.add(["a", "ab", "abc"]) == (0, False)
    assert seen.add(["a", "ab", "abx", "abxy"]) == (2, False)
    assert seen.add(["a", "ab", "abc"]) == (2, False), "the end of the first prompt was forgotten"
    assert seen.add(["z"]) == (0, False)
    assert seen.add(["a", "ab", "abc"]) == (3, True)
    assert seen.add(["a", "ab"]) == (2, False), "no prompt ended there"
    assert seen.add(["a", "ab", "x"]) == (2, True)
