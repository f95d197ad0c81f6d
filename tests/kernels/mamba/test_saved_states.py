"""States saved inside a prefill are those of a prefill that stops there."""

import pytest
import torch

from tests.gpu import GPU
from tests.kernels.mamba.test_launch_and_norm import VALUE_HEADS, Tokens, chunk, invariant, state_of
from tests.tolerance import assert_bitwise, differing

__all__ = ["invariant"]  # a fixture of every test here

pytestmark = list(GPU)

LENGTHS = [2064, 64, 700, 1, 130, 129]
OFFSETS = [1984, 0, 640, 0, 64, 128]


@pytest.fixture(scope="module")
def rows() -> tuple[Tokens, torch.Tensor]:
    """Tokens of all rows, and the states they start from."""
    return Tokens.random(sum(LENGTHS), seed=5), state_of(len(LENGTHS), seed=6)


def test_states_outputs_and_ends(rows: tuple[Tokens, torch.Tensor]) -> None:
    """At each place the state of a cut; everything else as without saving."""
    from vllm_invariant import checkpoint, cuda

    cuda.keep_chunk_states()
    tokens, states = rows
    plain = chunk(tokens, states, LENGTHS)
    places = checkpoint.find_places(OFFSETS, LENGTHS, torch.device("cuda"))
    with checkpoint.saving(places):
        saving = chunk(tokens, states, LENGTHS)
    assert_bitwise(saving[0], plain[0])
    assert_bitwise(saving[1], plain[1])
    assert places.states is not None and places.states.shape == (len(LENGTHS), VALUE_HEADS, 128, 128)
    start = 0
    for row, (length, offset) in enumerate(zip(LENGTHS, OFFSETS, strict=True)):
        if offset:
            _, cut = chunk(tokens[start : start + offset], states[row : row + 1], [offset])
            assert_bitwise(places.states[row : row + 1], cut)
            assert differing(places.states[row], saving[1][row]), "the end is not the place"
        else:
            assert_bitwise(places.states[row], states[row])
        start += length


def test_nothing_is_saved_outside_the_block(rows: tuple[Tokens, torch.Tensor]) -> None:
    """A later call is stock's again."""
    from vllm_invariant import checkpoint, cuda

    cuda.keep_chunk_states()
    tokens, states = rows
    places = checkpoint.find_places(OFFSETS, LENGTHS, torch.device("cuda"))
    with checkpoint.saving(places):
        pass
    chunk(tokens, states, LENGTHS)
    assert places.states is None
