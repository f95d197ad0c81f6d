"""Tiles of the CPU attention: where they are cut."""

from hypothesis import given
from hypothesis import strategies as st

from tests.ops import cpu_kernels  # noqa: F401  (skips where vLLM is not a CPU build)
from vllm_invariant import cpu_attention
from vllm_invariant.arithmetic import CHUNK, RECURRENT

TILE = CHUNK.grid
positions = st.integers(0, 5000)


@given(computed=positions, rows=st.integers(0, 700))
def test_tiles_cover_the_rows_in_order(computed, rows):
    pieces = cpu_attention.tile_rows(computed, rows, TILE)
    edges = [0, *(end for _, end in pieces)]
    assert [begin for begin, _ in pieces] == edges[:-1]
    assert edges[-1] == rows
    assert all(begin < end for begin, end in pieces)


@given(computed=positions, rows=st.integers(1, 700))
def test_a_tile_stays_between_two_grid_positions(computed, rows):
    for begin, end in cpu_attention.tile_rows(computed, rows, TILE):
        assert (computed + begin) // TILE == (computed + end - 1) // TILE


@given(chunks=st.lists(st.integers(1, 10), min_size=1, max_size=6), last=st.integers(1, 130))
def test_chunks_that_end_on_the_grid_give_the_tiles_of_one_chunk(chunks, last):
    """So the tile a row falls into does not depend on how its prompt was cut."""
    total = TILE * sum(chunks) + last
    whole = cpu_attention.tile_rows(0, total, TILE)
    cut, start = [], 0
    for rows in [*(TILE * steps for steps in chunks), last]:
        cut += [(start + b, start + e) for b, e in cpu_attention.tile_rows(start, rows, TILE)]
        start += rows
    assert cut == whole


@given(computed=positions, rows=st.integers(0, 700))
def test_one_row_a_tile_with_the_recurrent_arithmetic(computed, rows):
    """So a prompt's row is computed by the call that a decoded row gets."""
    assert cpu_attention.tile_rows(computed, rows, RECURRENT.grid) == [(i, i + 1) for i in range(rows)]
