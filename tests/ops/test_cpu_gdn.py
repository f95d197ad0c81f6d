"""What the chunk arithmetic relies on in stock's CPU kernels of the delta rule."""

import pytest
import torch

from tests.ops import cpu_kernels
from tests.ops.inputs import Shape, a_log, delta_rule, tokens_of
from tests.tolerance import assert_bitwise, assert_close, differing
from vllm_invariant.arithmetic import CHUNK
from vllm_invariant.ops import reference

# Heads of the tiny checkpoint, and as many key heads as value heads.
HEADS = [Shape(key_heads=2, value_heads=4), Shape(key_heads=3, value_heads=3, key_dim=64, value_dim=64)]
each_heads = pytest.mark.parametrize("heads", HEADS, ids=str)


def sequence(heads: Shape, tokens: int, seed: int = 0) -> list[torch.Tensor]:
    shape = Shape(1, tokens, heads.key_heads, heads.value_heads, heads.key_dim, heads.value_dim)
    return cpu_kernels.as_served(delta_rule(shape, seed)[0])


def pool(heads: Shape, slots: int) -> torch.Tensor:
    return torch.zeros(slots, heads.value_heads, heads.key_dim, heads.value_dim)


@each_heads
@pytest.mark.parametrize("tokens", [1, 64, 200])
def test_chunk_agrees_with_the_reference(heads, tokens):
    inputs, states = sequence(heads, tokens), pool(heads, 3)
    out = cpu_kernels.chunk(inputs, states, [tokens], [1])
    expected, state = reference.chunk_gated_delta_rule(*(x.float() for x in inputs), normalise_qk=True)
    assert_close(out, expected)
    assert_close(states[1], state[0], torch.bfloat16)
    assert_bitwise(states[[0, 2]], torch.zeros_like(states[[0, 2]]), "slots of others")


@each_heads
@pytest.mark.parametrize("cut", [1, 16, 32, 64, 100, 128, 192, 256])
def test_chunk_cut(heads, cut):
    """On the grid the cut costs nothing; off it the rest of the sequence has other bits."""
    tokens = 321
    inputs, states = sequence(heads, tokens), pool(heads, 3)
    whole = cpu_kernels.chunk(inputs, states, [tokens], [0])
    head = cpu_kernels.chunk(tokens_of(inputs, 0, cut), states, [cut], [1])
    tail = cpu_kernels.chunk(tokens_of(inputs, cut), states, [tokens - cut], [1])
    assert_bitwise(head, whole[:, :cut], "rows before the cut")
    if cut % CHUNK.grid == 0:
        assert_bitwise(tail, whole[:, cut:], "rows after the cut")
        assert_bitwise(states[1], states[0], "state")
    else:
        assert differing(tail, whole[:, cut:]) and differing(states[1], states[0])


@each_heads
def test_chunk_takes_several_sequences_as_if_alone(heads):
    lengths, slots = [65, 1, 200, 64, 321, 63], [5, 0, 3, 1, 4, 2]
    sequences = [sequence(heads, n, seed=n) for n in lengths]
    together, alone = pool(heads, 6), pool(heads, 6)
    rows = [torch.cat(parts, dim=1) for parts in zip(*sequences, strict=True)]
    out = cpu_kernels.chunk(rows, together, lengths, slots)
    for inputs, slot, begin, end in zip(
        sequences, slots, cpu_kernels.starts(lengths), cpu_kernels.starts(lengths)[1:], strict=False
    ):
        expected = cpu_kernels.chunk(inputs, alone, [end - begin], [slot])
        assert_bitwise(out[:, begin:end], expected, f"rows of the sequence in slot {slot}")
    assert_bitwise(together, alone, "states")


@each_heads
@pytest.mark.parametrize("tokens", [65, 129, 321])
def test_chunk_takes_a_one_token_remainder(heads, tokens):
    """The last token of a prompt of 1 mod 64 tokens, alone in its step or beside another prompt."""
    inputs, other = sequence(heads, tokens), sequence(heads, 70, seed=1)
    states = pool(heads, 4)
    whole = cpu_kernels.chunk(inputs, states, [tokens], [0])
    for slot in (1, 2):
        cpu_kernels.chunk(tokens_of(inputs, 0, tokens - 1), states, [tokens - 1], [slot])
    last = tokens_of(inputs, tokens - 1)
    alone = cpu_kernels.chunk(last, states, [1], [1])
    beside = [torch.cat(parts, dim=1) for parts in zip(other, last, strict=True)]
    assert_bitwise(alone, whole[:, -1:], "alone")
    assert_bitwise(cpu_kernels.chunk(beside, states, [70, 1], [3, 2])[:, 70:], whole[:, -1:], "in company")
    assert_bitwise(states[1], states[0], "state, alone")
    assert_bitwise(states[2], states[0], "state, in company")


@each_heads
def test_decode_of_a_remainder_would_differ(heads):
    """Why a prompt's last token may not go to the decode kernel."""
    inputs, states = sequence(heads, 65), pool(heads, 2)
    whole = cpu_kernels.chunk(inputs, states, [65], [0])
    cpu_kernels.chunk(tokens_of(inputs, 0, 64), states, [64], [1])
    q, k, v, g, beta = (x.float() for x in tokens_of(inputs, 64))
    decoded, _ = reference.recurrent_gated_delta_rule(
        q, k, v, g, beta, initial_state=states[1:], normalise_qk=True
    )
    assert_close(whole[:, -1:], decoded)
    assert differing(whole[:, -1:], decoded.bfloat16())


def decode_rows(heads: Shape, rows: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Inputs of ``rows`` decodes, the states they start from and dt_bias."""
    shape = Shape(rows, 1, heads.key_heads, heads.value_heads, heads.key_dim, heads.value_dim)
    (q, k, v, _, _), states = delta_rule(shape)
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(2, rows, heads.value_heads, generator=generator).bfloat16()
    dt_bias = torch.randn(heads.value_heads, generator=generator).bfloat16()
    return [q.bfloat16(), k.bfloat16(), v.bfloat16(), a, b], states, dt_bias


@each_heads
def test_decode_agrees_with_the_reference(heads):
    (q, k, v, a, b), states, dt_bias = decode_rows(heads, 5)
    updated = states.clone()
    out = cpu_kernels.update([q, k, v, a, b], a_log(heads), dt_bias, updated, list(range(5)))
    g, beta = reference.gating(a.float(), b.float(), a_log(heads), dt_bias.float())
    expected, state = reference.recurrent_gated_delta_rule(
        q.float(),
        k.float(),
        v.float(),
        g.unsqueeze(1),
        beta.unsqueeze(1),
        initial_state=states,
        normalise_qk=True,
    )
    assert_close(out, expected.squeeze(1))
    assert_close(updated, state, torch.bfloat16)


@each_heads
@pytest.mark.parametrize("rows", [2, 7, 33])
def test_decode_row_is_the_same_alone_and_in_company(heads, rows):
    inputs, states, dt_bias = decode_rows(heads, rows)
    together = states.clone()
    slots = list(reversed(range(rows)))
    out = cpu_kernels.update(inputs, a_log(heads), dt_bias, together, slots)
    for row in sorted({0, 1, rows // 2, rows - 1}):
        alone = states.clone()
        one = [x[row : row + 1] for x in inputs]
        expected = cpu_kernels.update(one, a_log(heads), dt_bias, alone, [slots[row]])
        assert_bitwise(out[row : row + 1], expected, f"row {row}")
        assert_bitwise(together[slots[row]], alone[slots[row]], f"state of row {row}")


@pytest.mark.parametrize("value_heads", [4, 12, 32])
def test_gating_row_is_the_same_alone_and_in_company(value_heads):
    shape = Shape(value_heads=value_heads)
    (_, _, _, a, b), _, dt_bias = decode_rows(shape, 70)

    def gating(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return cpu_kernels.ops.fused_gdn_gating_cpu(
            A_log=a_log(shape), a=a[rows].contiguous(), b=b[rows].contiguous(), dt_bias=dt_bias
        )

    g, beta = gating(slice(None))
    expected_g, expected_beta = reference.gating(a.float(), b.float(), a_log(shape), dt_bias.float())
    assert_close(g[0], expected_g)
    assert_close(beta[0], expected_beta)
    for row in range(70):
        one_g, one_beta = gating(slice(row, row + 1))
        assert_bitwise(one_g[0, 0], g[0, row], f"g of row {row}")
        assert_bitwise(one_beta[0, 0], beta[0, row], f"beta of row {row}")
