"""Block sizes set by hand (F57): on the grid they work, off it they are refused by name."""

import pytest

from tests.harness.compare import assert_same
from tests.harness.engine import Engines, asks
from tests.harness.prompts import prompt

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("factor", [2, None], ids=["two-blocks", "1024"])
def test_a_larger_block_on_the_grid(engines: Engines, factor: int | None) -> None:
    """F01's prompts, for a block of twice the computed size and for one of 1,024 tokens."""
    b = factor * engines.block if factor else 1024
    lengths = (b - 1, b + 1, b + 37, 2 * b - 7, 2 * b + 63)
    requests = asks([prompt(n, seed=40) for n in lengths], max_tokens=6)
    expected = engines.solo(requests)
    engine = engines.get(block_size=b)
    assert engine.block == b
    assert_same(expected, engine.run(requests).results, "cold")
    warm = engine.run(requests)
    assert [r.cached for r in warm.results] == [(n - 1) // engine.unit * engine.unit for n in lengths]
    assert_same(expected, warm.results, "hits among others")
    for request, want in zip(requests, expected, strict=True):
        run = engine.run([request])
        assert run.results[0].cached > 0
        assert_same([want], run.results, "hit alone")


@pytest.mark.parametrize(
    ("option", "value", "works"),
    [
        ("block_size", 48, 64),
        ("block_size", 96, 128),
        ("block_size", 272, 320),
        ("mamba_block_size", 264, 320),
        ("prefix_match_unit", 16, 64),
        ("prefix_match_unit", 96, 128),
    ],
)
def test_off_the_grid_is_refused(engines: Engines, option: str, value: int, works: int) -> None:
    """The error names the option, the value given and a value that works."""
    name = "--" + option.replace("_", "-")
    with pytest.raises(ValueError, match=f"{name} {value} is not a multiple of the 64.*use {name} {works}"):
        engines.config(**{option: value})
