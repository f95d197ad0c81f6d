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
    names = [f"r{row}" for row in range(len(discarded))]
    return SimpleNamespace(
        input_batch=SimpleNamespace(generators=generators, num_reqs=len(discarded), req_ids=names),
        discard_request_mask=SimpleNamespace(np=mask),
        execute_model_state=object(),
        optimistic_seq_lens_cpu=torch.full((len(discarded) + padding,), 10),
        requests={name: SimpleNamespace() for name in names},
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


def draw(worker: Any, position: int) -> float:
    """The number that the only row draws for a position."""
    worker.optimistic_seq_lens_cpu[0] = position
    generator = worker.input_batch.generators[0]
    return hold_generators(lambda self: float(torch.rand(1, generator=generator)))(worker)


def test_a_position_drawn_again_gets_what_it_got():
    worker = runner([False], seeded=[0])
    first = [draw(worker, position) for position in (10, 11, 12)]
    assert len(set(first)) == 3
    assert [draw(worker, position) for position in (11, 12)] == first[1:]
    worker.input_batch.generators[0].manual_seed(0)  # undisturbed
    undisturbed = [float(torch.rand(1, generator=worker.input_batch.generators[0])) for _ in range(4)]
    assert first == undisturbed[:3]


def test_only_the_last_draws_are_kept():
    worker = runner([False], seeded=[0])
    for position in range(10, 40):
        draw(worker, position)
    assert [p for p, _ in worker.requests["r0"].invariant_draws] == [36, 37, 38, 39]


def test_a_step_with_nothing_to_sample_moves_nothing():
    worker = runner([False], seeded=[0])
    worker.execute_model_state = None
    before = states(worker)
    hold_generators(lambda self: None)(worker)
    assert states(worker) == before and not vars(worker.requests["r0"])
