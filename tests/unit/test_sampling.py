"""A row whose sample is thrown away keeps its random generator where it was."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_invariant.sampling import hold_generators


def runner(discarded: list[bool], seeded: list[int], padding: int = 2) -> Any:
    """A model runner of so many rows, with more rows' worth of stale flags behind them."""
    mask = np.array(discarded + [True] * padding)
    generators = {row: torch.Generator().manual_seed(row) for row in seeded}
    return SimpleNamespace(
        input_batch=SimpleNamespace(generators=generators, num_reqs=len(discarded)),
        discard_request_mask=SimpleNamespace(np=mask),
    )


def drawing(self: Any) -> list[int]:
    """Stands for stock's sampling: every row with a generator draws."""
    for generator in self.input_batch.generators.values():
        torch.rand(1, generator=generator)
    return sorted(self.input_batch.generators)


def states(worker: Any) -> dict[int, bytes]:
    return {row: g.get_state().numpy().tobytes() for row, g in worker.input_batch.generators.items()}


def test_only_rows_that_yield_a_token_draw():
    worker = runner([True, False, True, False], seeded=[0, 1, 2])
    before = states(worker)
    assert hold_generators(drawing)(worker) == [1]
    after = states(worker)
    assert sorted(after) == [0, 1, 2]
    assert {row for row in after if after[row] != before[row]} == {1}


def test_without_it_all_of_them_draw():
    worker = runner([True, False, True, False], seeded=[0, 1, 2])
    before = states(worker)
    drawing(worker)
    after = states(worker)
    assert all(after[row] != before[row] for row in before)


def test_flags_behind_the_last_row_are_not_read():
    worker = runner([False], seeded=[0])
    assert hold_generators(drawing)(worker) == [0]


def test_generators_come_back_after_an_error():
    def failing(self: Any) -> None:
        raise RuntimeError("no sample")

    worker = runner([True, True], seeded=[0, 1])
    with pytest.raises(RuntimeError, match="no sample"):
        hold_generators(failing)(worker)
    assert sorted(worker.input_batch.generators) == [0, 1]
