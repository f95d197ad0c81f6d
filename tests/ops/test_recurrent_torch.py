"""The recurrent arithmetic in PyTorch: exact against itself in every form, close to the reference."""

import random
from itertools import pairwise

import pytest
import torch

from tests.ops.inputs import Shape, a_log
from tests.tolerance import assert_bitwise, assert_close, differing
from vllm_invariant.ops import recurrent_torch, reference

HEADS = [Shape(), Shape(key_heads=1, value_heads=3, key_dim=16, value_dim=24)]
each_heads = pytest.mark.parametrize("heads", HEADS, ids=str)
TAPS, CHANNELS = 4, 96


class Layer:
    """Inputs of one sequence, and the recurrence on any of its tokens."""

    def __init__(self, heads: Shape, tokens: int, seed: int = 0, slots: int = 8) -> None:
        draw = torch.Generator().manual_seed(seed)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=draw)

        keys, values = (heads.key_heads, heads.key_dim), (heads.value_heads, heads.value_dim)
        self.inputs = [normal(tokens, *size).bfloat16() for size in (keys, keys, values)]
        self.inputs += [normal(tokens, heads.value_heads).bfloat16() for _ in "ab"]
        self.fixed = a_log(heads), 0.5 * normal(heads.value_heads)
        self.pool = normal(slots, heads.value_heads, heads.key_dim, heads.value_dim)

    def run(self, rows: list[slice], slots: list, continues: list[bool] | None = None, **rest):
        """These rows of the sequence, as sequences of their own laid end to end; updates ``pool``."""
        starts = [0]
        for each in rows:
            starts.append(starts[-1] + each.stop - each.start)
        inputs = [torch.cat([x[each] for each in rows]) for x in self.inputs]
        return recurrent_torch.recurrent_gated_delta_rule(
            *inputs, *self.fixed, self.pool, starts, slots, continues or [True] * len(rows), **rest
        )


def pieces(length: int, draw: random.Random) -> list[slice]:
    """The rows of a sequence in random pieces, one-token pieces among them."""
    cuts = sorted({0, length, *(draw.randrange(1, length) for _ in range(draw.randrange(1, 9)))})
    return [slice(start, end) for start, end in pairwise(cuts)]


@each_heads
def test_agrees_with_the_reference(heads):
    layer = Layer(heads, 40)
    first = layer.pool[2].clone()
    out = layer.run([slice(0, 40)], [2])
    q, k, v, a, b = (x.float() for x in layer.inputs)
    g, beta = reference.gating(a, b, *layer.fixed)
    expected, state = reference.recurrent_gated_delta_rule(
        *(x.unsqueeze(0) for x in (q, k, v, g, beta)), initial_state=first.unsqueeze(0), normalise_qk=True
    )
    assert_close(out, expected[0])
    assert_close(layer.pool[2], state[0])


@each_heads
@pytest.mark.parametrize("seed", range(10))
def test_any_split(heads, seed):
    """Outputs and state of one call, whatever the pieces: prefill and decode are the same thing."""
    draw = random.Random(seed)
    layer, cut = Layer(heads, 150), Layer(heads, 150)
    whole = layer.run([slice(0, 150)], [0], [False])
    parts = [cut.run([rows], [0], [rows.start > 0]) for rows in pieces(150, draw)]
    assert_bitwise(torch.cat(parts), whole, "outputs")
    assert_bitwise(cut.pool[0], layer.pool[0], "state")


@each_heads
def test_decoded_token_by_token(heads):
    layer, decoded = Layer(heads, 70), Layer(heads, 70)
    whole = layer.run([slice(0, 70)], [0])
    rows = torch.cat([decoded.run([slice(t, t + 1)], [0]) for t in range(70)])
    assert_bitwise(rows, whole, "outputs")
    assert_bitwise(decoded.pool[0], layer.pool[0], "state")


@each_heads
def test_verification_keeps_the_state_after_each_token(heads):
    layer, decoded = Layer(heads, 4), Layer(heads, 4)
    out = layer.run([slice(0, 4)], [[3, 5, 6, 7]], sources=[0])
    for t, slot in enumerate([3, 5, 6, 7]):
        row = decoded.run([slice(t, t + 1)], [0])
        assert_bitwise(out[t : t + 1], row, f"token {t}")
        assert_bitwise(layer.pool[slot], decoded.pool[0], f"state after token {t}")


@each_heads
def test_sequences_together_as_if_alone(heads):
    """Lengths from none to many in one call, in any order, one of them from nothing."""
    rows = [slice(0, 1), slice(5, 5), slice(0, 33), slice(10, 12), slice(7, 8), slice(0, 70)]
    slots, continues = [6, 5, 4, 3, 2, 1], [True, True, False, True, True, True]
    layer, alone = Layer(heads, 70), Layer(heads, 70)
    out = layer.run(rows, slots, continues)
    parts = [alone.run([r], [s], [c]) for r, s, c in zip(rows, slots, continues, strict=True)]
    assert_bitwise(out, torch.cat(parts), "outputs")
    assert_bitwise(layer.pool, alone.pool, "states")


@each_heads
def test_a_state_that_is_not_gone_on_from_is_zeros(heads):
    layer, clean = Layer(heads, 9), Layer(heads, 9)
    clean.pool.zero_()
    assert_bitwise(layer.run([slice(0, 9)], [1], [False]), clean.run([slice(0, 9)], [1]), "outputs")
    assert differing(layer.run([slice(0, 9)], [2]), clean.run([slice(0, 9)], [2])) > 0


def test_another_order_of_rounding_is_seen():
    """The comparison sees a sum over key_dim taken in another order."""
    layer, other = Layer(HEADS[0], 70), Layer(HEADS[0], 70)
    whole = layer.run([slice(0, 70)], [0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrent_torch, "sum_by_halving", lambda x, dim: x.sum(dim))
        assert differing(other.run([slice(0, 70)], [0]), whole) > 0


def test_key_dim_must_be_a_power_of_two():
    layer = Layer(Shape(key_dim=24), 2)
    with pytest.raises(ValueError, match="power of two, got 24"):
        layer.run([slice(0, 2)], [0])


@pytest.mark.parametrize("width", [1, 3, 4, 32])
def test_elements_of_a_tile_are_the_same_at_every_row(width):
    """exp, sigmoid and softplus do not depend on the row, its company or the number of rows."""
    values = 4 * torch.randn(700, width, generator=torch.Generator().manual_seed(1))

    def function(x):
        return x.exp(), x.sigmoid(), torch.nn.functional.softplus(x), torch.nn.functional.silu(x)

    whole = recurrent_torch.in_row_tiles(function, values)
    for start, end in [(0, 1), (1, 2), (5, 70), (63, 64), (130, 131), (333, 350), (699, 700), (1, 700)]:
        for got, want in zip(recurrent_torch.in_row_tiles(function, values[start:end]), whole, strict=True):
            assert_bitwise(got, want[start:end], f"rows {start} to {end}")


# --- convolution -----------------------------------------------------------------------------------


def conv(x, pool, starts, slots, continues):
    draw = torch.Generator().manual_seed(3)
    weight = (0.4 * torch.randn(CHANNELS, TAPS, generator=draw)).bfloat16()
    bias = torch.randn(CHANNELS, generator=draw)
    return recurrent_torch.causal_conv1d(x, weight, bias, pool, starts, slots, continues), weight, bias


def conv_case(tokens: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(2)
    return (
        torch.randn(tokens, CHANNELS, generator=draw).bfloat16(),
        torch.randn(4, TAPS - 1, CHANNELS, generator=draw).bfloat16(),
    )


def test_convolution_agrees_with_the_reference():
    x, pool = conv_case()
    before = pool[1].float()
    out, weight, bias = conv(x, pool, [0, 200], [1], [True])
    expected, state = reference.causal_conv1d(
        x.float().unsqueeze(0), weight.float(), bias, before.unsqueeze(0)
    )
    assert_close(out, expected[0])
    assert_bitwise(pool[1], state[0].bfloat16(), "state")


@pytest.mark.parametrize("step", [*range(1, 9), 16, 64, 199])
@pytest.mark.parametrize("continues", [False, True])
def test_convolution_in_chunks_of_any_length(step, continues):
    """Chunks of 1 (a decode's) to 8 tokens, and of the lengths blocks end at."""
    x, pool = conv_case()
    chunked = pool.clone()
    whole, *_ = conv(x, pool, [0, 200], [0], [continues])
    parts = [
        conv(x[s : s + step], chunked, [0, len(x[s : s + step])], [0], [continues or s > 0])[0]
        for s in range(0, 200, step)
    ]
    assert_bitwise(torch.cat(parts), whole, "rows")
    assert_bitwise(chunked, pool, "state")


def test_convolution_of_sequences_together_as_if_alone():
    x, pool = conv_case(12)
    alone = pool.clone()
    starts, slots, continues = [0, 1, 1, 9, 12], [3, 1, 0, 2], [True, True, False, True]
    out, *_ = conv(x, pool, starts, slots, continues)
    parts = [
        conv(x[s:e], alone, [0, e - s], [slot], [goes_on])[0]
        for s, e, slot, goes_on in zip(starts, starts[1:], slots, continues, strict=False)
    ]
    assert_bitwise(out, torch.cat(parts), "rows")
    assert_bitwise(pool, alone, "states")
