"""Laws of the token grid."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_invariant import grid

steps = st.integers(1, 300)
positions = st.integers(0, 20_000)
prompts = st.integers(1, 1_500)


@given(position=positions, step=steps)
def test_floor_ceil_and_next_stop(position, step):
    low, high, after = (
        grid.floor(position, step),
        grid.ceil(position, step),
        grid.next_stop(position, step),
    )
    assert all(grid.is_on(p, step) for p in (low, high, after))
    assert low <= position <= high < position + step
    assert position < after <= position + step
    assert (low == position) == (high == position) == grid.is_on(position, step)


@given(a=steps, b=steps, c=steps, position=positions)
def test_shared_grid_is_the_least_common_multiple(a, b, c, position):
    both = grid.shared(a, b)
    assert both == math.lcm(a, b) == grid.shared(b, a)
    assert grid.shared(both, c) == grid.shared(a, grid.shared(b, c)) == grid.shared(a, b, c)
    assert grid.shared(a, a) == grid.shared(a) == grid.shared(a, 1) == a
    assert grid.is_on(position, both) == (grid.is_on(position, a) and grid.is_on(position, b))


@pytest.mark.parametrize(("block", "rounded"), [(544, 576), (1056, 1088), (576, 576), (1, 64), (65, 128)])
def test_published_hybrid_blocks(block, rounded):
    assert grid.round_block(block, 64) == rounded


@given(block=st.integers(1, 10_000), step=steps)
def test_a_rounded_block_is_the_smallest_that_fits(block, step):
    rounded = grid.round_block(block, step)
    assert grid.is_on(rounded, step) and block <= rounded < block + step


@given(start=positions, budget=st.integers(0, 2_000), left=st.integers(0, 2_000), step=steps)
def test_chunk_end_is_the_prompt_end_or_on_the_grid(start, budget, left, step):
    prompt_end = start + left
    end = grid.chunk_end(start, start + budget, prompt_end, step)
    assert start <= end <= start + budget or end == start
    if budget >= left:
        assert end == prompt_end
    else:
        assert end == start or grid.is_on(end, step)
        assert end > start or budget < grid.next_stop(start, step) - start, "a step that fits is taken"


budget_lists = st.lists(st.integers(0, 400), max_size=12)


@given(prompt=prompts, budgets=budget_lists, step=steps, extra=st.integers(0, 400))
def test_plan_ends_on_the_grid_and_at_the_prompt_end(prompt, budgets, step, extra):
    plan = grid.chunk_plan(prompt, [*budgets, step + extra], step)
    assert plan == sorted(set(plan)) and plan[-1] == prompt
    assert all(grid.is_on(end, step) for end in plan[:-1])


@given(prompt=prompts, step=steps, start=st.integers(0, 1_500), extra=st.integers(0, 400))
def test_plan_from_a_hit(prompt, step, start, extra):
    """A hit on the grid resumes a plan whose ends a cold prompt may have had as well."""
    start = grid.floor(start, step)
    plan = grid.chunk_plan(prompt, [step + extra], step, start)
    if start >= prompt:
        assert plan == []
    else:
        assert plan[-1] == prompt
        assert set(plan[:-1]) <= set(range(0, prompt, step))
        assert all(end > start for end in plan)


@given(prompt=prompts, budgets=st.lists(st.integers(0, 400), min_size=1, max_size=12), step=steps)
def test_no_step_takes_more_than_its_budget(prompt, budgets, step):
    """The plan is that of an engine that asks for one chunk end a step."""
    budgets = [*budgets, step]
    position, ends = 0, []
    for budget in budgets + [step] * prompt:
        end = grid.chunk_end(position, position + budget, prompt, step)
        assert end - position <= budget
        if end > position:
            ends.append(end)
        position = end
        if position == prompt:
            break
    assert ends == grid.chunk_plan(prompt, budgets, step)


@given(prompt=prompts, step=steps, waste=st.data())
def test_a_budget_that_never_fits_a_step_is_an_error(prompt, step, waste):
    budget = waste.draw(st.integers(0, step - 1))
    if budget >= prompt:
        assert grid.chunk_plan(prompt, [budget], step) == [prompt]
    else:
        with pytest.raises(ValueError, match="never fits one grid step"):
            grid.chunk_plan(prompt, [budget], step)


@given(max_seqs=st.integers(1, 300), step=steps, prompt=prompts)
def test_min_budget_is_just_enough_beside_a_full_decode_batch(max_seqs, step, prompt):
    """The waiting prompt holds one of the places, so at most ``max_seqs - 1`` decodes are in its way."""
    left = grid.min_budget(max_seqs, step) - (max_seqs - 1)
    assert grid.chunk_plan(prompt, [left], step)[-1] == prompt
    if step > 1:
        with pytest.raises(ValueError, match="never fits"):
            grid.chunk_plan(step, [left - 1], step)


@pytest.mark.parametrize(
    "call",
    [
        lambda: grid.is_on(1, 0),
        lambda: grid.floor(1, -64),
        lambda: grid.floor(-1, 64),
        lambda: grid.ceil(-1, 64),
        lambda: grid.next_stop(0, 0),
        lambda: grid.shared(64, 0),
        lambda: grid.round_block(0, 64),
        lambda: grid.round_block(64, 0),
        lambda: grid.chunk_end(-1, 64, 64, 64),
        lambda: grid.chunk_end(0, 64, 64, 0),
        lambda: grid.chunk_plan(10, [], 64),
        lambda: grid.chunk_plan(10, [64], 0),
        lambda: grid.min_budget(4, 0),
    ],
)
def test_bad_input(call):
    with pytest.raises(ValueError):
        call()
