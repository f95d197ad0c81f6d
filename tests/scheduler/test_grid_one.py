"""The recurrent arithmetic's grid of one token: the scheduler's rules as data."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.build import prompt
from tests.scheduler.test_chunk_ends import prefill_beside
from tests.scheduler.test_history_rules import preempted, resumed_beside_its_own_text, second_turn

BLOCK, UNIT = 320, 16
RECURRENT = {"arithmetic": "recurrent", "unit": UNIT}


@pytest.mark.parametrize(("budget", "length"), [(1, 9), (17, 100), (100, 513), (1024, 1000)])
def test_without_a_cache_chunks_are_the_budget(drive, budget, length):
    ends = prefill_beside(drive(**RECURRENT, mode="none", budget=budget, seqs=1), length, 0)
    assert ends == [*range(budget, length, budget), length]


@pytest.mark.parametrize("budget", [7, 100, 1024])
def test_with_a_cache_a_chunk_also_ends_where_states_are_kept(drive, budget):
    ends = prefill_beside(drive(**RECURRENT, budget=budget, seqs=1), 2 * BLOCK + 41, 0)
    assert {BLOCK * 2, BLOCK * 2 + 32} <= set(ends)
    assert budget > BLOCK or BLOCK in ends


def test_hits_of_every_length_land_on_the_hash_block(drive):
    driver = drive(**RECURRENT)
    lengths = (16, 17, 65, 130, 321, 700)
    for length in lengths:
        for name in ("cold", "warm"):
            driver.add(f"{name} {length}", prompt(length, seed=length))
            driver.run()
    assert [driver.hits(f"warm {n}")[0] for n in lengths] == [(n - 1) // UNIT * UNIT for n in lengths]


@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("length", [129, BLOCK + 2])
@pytest.mark.parametrize("made", [8, 31, BLOCK])
def test_generated_tokens_come_back_by_prefill(drive, mode, asynchronous, length, made):
    """In chunks that still end where states are kept, and without a token more or less."""
    driver = drive(**RECURRENT, mode=mode, asynchronous=asynchronous)
    again = preempted(driver, length, made)
    assert max(end - max(start, length) for start, end in again) > 1
    assert len(again) < 20 + 8 + made // BLOCK
    assert driver.requests["a"].num_output_tokens == made + 20
    if mode == "align":  # a slot holds the state at its block's end, so no chunk runs over one
        assert all(end <= (start // BLOCK + 1) * BLOCK or start % BLOCK == 0 for start, end in again)


def test_decoded_blocks_are_published(drive):
    """Of the first turn's 300 + 640 tokens, all but the last are computed: two whole blocks."""
    assert second_turn(drive(**RECURRENT), 300, made=2 * BLOCK) > 300


def test_a_resumed_request_may_hit_what_it_generated(drive):
    assert resumed_beside_its_own_text(drive(**RECURRENT), 300, made=500) > 300


@given(data=st.data())
def test_everybody_finishes(drive, data):
    """Any budget that holds a full decode batch and one token more."""
    seqs = data.draw(st.integers(1, 6), label="seqs")
    budget = data.draw(st.integers(seqs, 300), label="budget")
    lengths = data.draw(st.lists(st.integers(1, 900), min_size=1, max_size=6), label="lengths")
    driver = drive(**RECURRENT, mode=data.draw(st.sampled_from(["none", "align"])), budget=budget, seqs=seqs)
    for i, length in enumerate(lengths):
        driver.add(str(i), prompt(length, seed=i if i % 2 else 0), max_tokens=5)
    driver.run(most=sum(lengths) + 100)
    for i in range(len(lengths)):
        assert driver.requests[str(i)].num_output_tokens == 5
