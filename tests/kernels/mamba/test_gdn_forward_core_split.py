"""The core of a GDN layer on cached rows alone and in front of prefills: the same bits, at no tolerance."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu import GPU, on_either
from tests.harness import device
from tests.harness.engine import Engines
from tests.kernels.mamba.layer_step import LayerStep, Outcome, Row
from tests.tolerance import assert_bitwise, differing

pytestmark = pytest.mark.engine

# vLLM reads some of these while it is imported, so a fixture would set them too late.
os.environ.update(device.ENVIRONMENT)

# (tokens computed before, tokens of the step): from nothing, from the grid, one token left of a prompt.
PREFILLS = {
    "one": [(0, 65)],
    "remainder": [(64, 1)],
    "many": [(0, 300), (64, 1), (128, 130), (0, 1), (320, 64)],
}


@pytest.fixture(scope="module")
def step(checkpoint: Path) -> Iterator[LayerStep]:
    """The first GDN layer of an idle engine."""
    builder = Engines(checkpoint)
    yield LayerStep(builder.get(enable_prefix_caching=True, max_num_seqs=32).runner)
    builder.close()


def cached_rows(count: int) -> list[Row]:
    """Rows that decode, after prompts of different lengths."""
    return [Row(slot=1 + i, computed=70 + 37 * i) for i in range(count)]


def prompt_rows(kind: str) -> list[Row]:
    """Rows that prefill."""
    return [
        Row(40 + i, computed, tokens, prefilling=True) for i, (computed, tokens) in enumerate(PREFILLS[kind])
    ]


def assert_equal(actual: Outcome, expected: Outcome, what: str) -> None:
    """Outputs and both states of every row, at atol=0, rtol=0."""
    pairs = zip(actual.rows, expected.rows, actual.states, expected.states, strict=True)
    for i, (row, wanted, states, wanted_states) in enumerate(pairs):
        assert bool(row.isfinite().all()) and bool(row.any()), f"{what}: row {i} holds no result"
        torch.testing.assert_close(row, wanted, atol=0, rtol=0)
        assert_bitwise(row, wanted, f"{what}: output of row {i}")
        for name, state, wanted_state in zip(
            ("convolution", "recurrent"), states, wanted_states, strict=True
        ):
            assert_bitwise(state, wanted_state, f"{what}: {name} state of row {i}")


def part(outcome: Outcome, rows: slice) -> Outcome:
    """Some rows of an outcome."""
    return Outcome(outcome.rows[rows], outcome.states[rows])


@on_either
@pytest.mark.parametrize("kind", PREFILLS)
@pytest.mark.parametrize("count", [1, 8, 31])
def test_rows_alone_and_in_a_mixed_step(step: LayerStep, count: int, kind: str, machine: str) -> None:
    """Cached rows alone, each by itself, and in front of prefills; prefills alone and behind them."""
    decodes, prefills = cached_rows(count), prompt_rows(kind)
    metadata = step.metadata(decodes + prefills)
    assert (metadata.num_decodes, metadata.num_prefills) == (count, len(prefills))
    mixed = step.run(decodes + prefills)
    assert_equal(part(mixed, slice(0, count)), step.run(decodes), "cached rows")
    assert_equal(part(mixed, slice(count, None)), step.run(prefills), "prefills")
    for i in (0, count - 1):
        assert_equal(part(mixed, slice(i, i + 1)), step.run([decodes[i]]), f"cached row {i} by itself")


@on_either
def test_another_state_is_seen(step: LayerStep, machine: str) -> None:
    """The comparison reaches the states: rows that differ in nothing else give other outputs."""
    row = cached_rows(1)[0]
    plain = step.run([row])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "scale", step.scale * (1 + 2**-7))
        other = step.run([row])
    assert differing(other.rows[0], plain.rows[0]) > 0


@pytest.mark.parametrize("count", [pytest.param(31, marks=GPU)])
def test_stock_core_is_seen(step: LayerStep, count: int) -> None:
    """Stock's core moves the bits of cached rows when a prefill joins them: what the split is there for."""
    decodes = cached_rows(count)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(type(step.layer), "_forward_core")
        mixed = part(step.run(decodes + prompt_rows("one")), slice(0, count))
        alone = step.run(decodes)
    moved = sum(differing(a, b) for a, b in zip(mixed.rows, alone.rows, strict=True))
    moved += sum(differing(a[1], b[1]) for a, b in zip(mixed.states, alone.states, strict=True))
    assert moved > 0
