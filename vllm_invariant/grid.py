# In a vLLM branch: part of vllm/v1/core/sched/utils.py.
"""Integer arithmetic of the token grid.  No torch, no vLLM.

A *grid* is the spacing, in tokens, of the positions at which a layer's recurrent state does not
depend on how the tokens before them were cut into chunks.  Position ``p`` means "after ``p``
tokens".  Every prefill chunk that does not finish its prompt must end on the grid, and every
prefix-cache hit must land on it.

All functions take and return plain integers and raise ``ValueError`` on a non-positive step or a
negative position.
"""

from math import lcm


def _check(step: int, position: int = 0) -> None:
    if step <= 0:
        raise ValueError(f"a grid step must be positive, got {step}")
    if position < 0:
        raise ValueError(f"a token position cannot be negative, got {position}")


def is_on(position: int, step: int) -> bool:
    """Whether ``position`` is a grid position."""
    _check(step, position)
    return position % step == 0


def floor(position: int, step: int) -> int:
    """The last grid position at or before ``position``."""
    _check(step, position)
    return position // step * step


def ceil(position: int, step: int) -> int:
    """The first grid position at or after ``position``."""
    _check(step, position)
    return -(-position // step) * step


def next_stop(position: int, step: int) -> int:
    """The first grid position strictly after ``position``."""
    return floor(position, step) + step


def shared(*steps: int) -> int:
    """The finest grid that lies on every given one: their least common multiple."""
    for step in steps:
        _check(step)
    return lcm(*steps)


def round_block(block_size: int, step: int) -> int:
    """The smallest block of at least ``block_size`` tokens that is whole grid steps.

    The published hybrid blocks, for a 64-token grid: 544 -> 576, 1056 -> 1088.
    """
    _check(step)
    if block_size <= 0:
        raise ValueError(f"a block size must be positive, got {block_size}")
    return ceil(block_size, step)


def chunk_end(start: int, want: int, prompt_end: int, step: int) -> int:
    """Where a prefill chunk that starts at ``start`` ends.

    Args:
        start: tokens already computed; any position (a resumed request may sit off the grid).
        want: the position the budget would reach.
        prompt_end: where the prompt ends.  A chunk that reaches it may end there, off the grid.
        step: the grid.

    Returns:
        A position in ``[start, want]``: ``prompt_end``, or the last grid position the budget
        reaches.  ``start`` itself means that no whole step fits and the request has to wait.

    """
    _check(step, start)
    if want >= prompt_end:
        return max(prompt_end, start)
    return max(floor(want, step), start)


def chunk_plan(prompt_len: int, budgets: list[int], step: int, start: int = 0) -> list[int]:
    """The chunk ends of a prompt, given the token budget each engine step leaves for it.

    The last budget repeats for as long as it takes.  A budget below one step yields no chunk in
    that engine step.

    Args:
        prompt_len: tokens in the prompt.
        budgets: leftover token budget of each successive engine step, in tokens.
        step: the grid.
        start: tokens already computed (a prefix-cache hit).

    Returns:
        Chunk ends, ascending; the last one is ``prompt_len``.

    Raises:
        ValueError: if the last budget can never complete a grid step, so the prompt would wait
            for ever.

    """
    _check(step, start)
    if not budgets:
        raise ValueError("chunk_plan needs at least one budget")
    ends: list[int] = []
    position, i = start, 0
    while position < prompt_len:
        budget = budgets[min(i, len(budgets) - 1)]
        end = chunk_end(position, position + budget, prompt_len, step)
        if end == position and i >= len(budgets) - 1:
            raise ValueError(f"a budget of {budget} tokens never fits one grid step of {step}")
        if end > position:
            ends.append(end)
            position = end
        i += 1
    return ends


def min_budget(max_decodes: int, step: int) -> int:
    """Smallest step budget in which one grid step always fits beside a full decode batch.

    Args:
        max_decodes: ``max_num_seqs``.  The waiting prefill takes one of those places itself.
        step: the grid, or the prompt's remainder if that is shorter.

    """
    _check(step)
    return max(max_decodes - 1, 0) + step
