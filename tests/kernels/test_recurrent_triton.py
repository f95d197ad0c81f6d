"""The recurrent arithmetic in Triton: one order of rounding in every form, and close to float64.

Shapes: 16 key heads and 32 value heads of 128, as in the published Qwen3.5 models.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from tests.gpu import GPU
from tests.tolerance import assert_bitwise, assert_close, differing
from vllm_invariant.ops import conv_triton, recurrent_torch, recurrent_triton, reference

pytestmark = list(GPU)

DEVICE = "cuda"
H, G, D, TAPS = 16, 32, 128, 4
CHANNELS = 2 * H * D + G * D
LONG = 513


def ints(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def flags(values: Sequence[bool]) -> torch.Tensor:
    return torch.tensor(values, device=DEVICE)


def starts_of(lengths: Sequence[int]) -> torch.Tensor:
    return ints([sum(lengths[:i]) for i in range(len(lengths) + 1)])


@dataclass
class Case:
    """One sequence's inputs: x (T, channels), a and b (T, G), and the pools its states live in."""

    x: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    weight: torch.Tensor
    states: torch.Tensor
    taps: torch.Tensor

    @classmethod
    def random(cls, tokens: int, slots: int = 8, seed: int = 0) -> "Case":
        draw = torch.Generator().manual_seed(seed)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=draw)

        parts = (
            normal(tokens, CHANNELS).bfloat16(),
            normal(tokens, G).bfloat16(),
            normal(tokens, G).bfloat16(),
            -torch.linspace(1.0, 8.0, G),  # memories from about 3 tokens to about 3,000
            0.5 * normal(G),
            (0.4 * normal(CHANNELS, TAPS)).bfloat16(),
            0.3 * normal(slots, G, D, D),
            normal(slots, TAPS - 1, CHANNELS).bfloat16(),
        )
        return cls(*(part.to(DEVICE) for part in parts))

    def run(self, rows: Sequence[slice], slots: object, begun: Sequence[bool] | None = None, **rest):
        """Rows of the sequence as sequences of their own, one call; (rows, G, D) bf16.  Moves states on."""
        lengths = [each.stop - each.start for each in rows]
        x, a, b = (torch.cat([part[each] for each in rows]) for part in (self.x, self.a, self.b))
        out = torch.full((len(x), G, D), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        recurrent_triton.recurrent_step(
            x,
            a,
            b,
            self.a_log,
            self.dt_bias,
            self.states,
            out,
            slots=slots if isinstance(slots, torch.Tensor) else ints(slots),
            cu_seqlens=starts_of(lengths),
            has_initial_state=None if begun is None else flags(begun),
            **rest,
        )
        return out

    def convolve(self, rows: Sequence[slice], slots: Sequence[int], begun: Sequence[bool]) -> torch.Tensor:
        """The convolution of these rows; moves its states on."""
        return conv_triton.causal_conv1d(
            torch.cat([self.x[each] for each in rows]),
            self.weight,
            None,
            self.taps,
            slots=ints(slots),
            cu_seqlens=starts_of([each.stop - each.start for each in rows]),
            has_initial_state=flags(begun),
        )


def pieces(length: int, draw: random.Random) -> list[slice]:
    """The rows of a sequence in random pieces, many of one token among them."""
    cuts = {0, length, *(draw.randrange(1, length) for _ in range(draw.choice((1, 2, 5, 20))))}
    cuts |= {cut + 1 for cut in cuts if cut < length}
    return [slice(start, end) for start, end in pairwise(sorted(cuts))]


def test_any_split() -> None:
    """513 tokens in random pieces, 200 draws: the outputs and the state of one call."""
    case = Case.random(LONG, slots=3)
    first = case.states[1].clone()
    whole = case.run([slice(0, LONG)], [1], [True])
    final = case.states[1].clone()
    moved = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for seed in range(200):
        case.states[1] = first
        parts = [case.run([rows], [1]) for rows in pieces(LONG, random.Random(seed))]
        moved += (torch.cat(parts).view(torch.int16) != whole.view(torch.int16)).sum()
        moved += (case.states[1].view(torch.int32) != final.view(torch.int32)).sum()
    assert int(moved) == 0


def test_decoded_token_by_token_among_others() -> None:
    """Every token by a decode step of 33 sequences; the rest are other tokens on other states."""
    tokens, others = 64, 32
    case, decoded = Case.random(tokens, slots=40), Case.random(tokens, slots=40)
    whole = case.run([slice(0, tokens)], [5])
    for t in range(tokens):
        rows = [slice((t + i) % tokens, (t + i) % tokens + 1) for i in range(others + 1)]
        slots = [5, *(s for s in range(1, others + 2) if s != 5)]
        out = decoded.run(rows, slots)
        assert_bitwise(out[:1], whole[t : t + 1], f"token {t}")
    assert_bitwise(decoded.states[5], case.states[5], "state")


@pytest.mark.parametrize("accepted", [1, 2, 4])
def test_verification_keeps_the_state_after_each_token(accepted: int) -> None:
    case, decoded = Case.random(4, slots=12), Case.random(4, slots=12)
    kept = [4, 9, 2, 7]
    decoded.states[1] = case.states[kept[accepted - 1]]
    out = case.run([slice(0, 4)], ints([kept]), num_accepted=ints([accepted]))
    for t, slot in enumerate(kept):
        assert_bitwise(out[t : t + 1], decoded.run([slice(t, t + 1)], [1]), f"token {t}")
        assert_bitwise(case.states[slot], decoded.states[1], f"state after token {t}")


def test_sequences_together_as_if_alone() -> None:
    """Empty, one token, many; one from nothing; one is padding."""
    rows = [slice(0, 1), slice(9, 9), slice(0, 300), slice(4, 6), slice(70, 71), slice(100, 229)]
    slots, begun = [6, 5, 4, 3, 0, 1], [True, True, False, True, True, True]
    case, alone = Case.random(300), Case.random(300)
    out = case.run(rows, slots, begun)
    each = [alone.run([r], [s], [g]) for r, s, g in zip(rows, slots, begun, strict=True)]
    assert_bitwise(out, torch.cat(each), "outputs")
    assert_bitwise(case.states, alone.states, "states")
    assert not bool(out[303].any()), "padding"
    assert_bitwise(case.states[0], Case.random(300).states[0], "the null block")


def exact(case: Case, tokens: int, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and state by the recurrence in float64; the state as (G, V, K)."""
    q, k, v = (x.reshape(1, tokens, -1, D) for x in case.x.double().split([H * D, H * D, G * D], dim=1))
    g, beta = reference.gating(*(x.double() for x in (case.a, case.b, case.a_log, case.dt_bias)))
    first = case.states[slot : slot + 1].transpose(2, 3)
    out, state = reference.recurrent_gated_delta_rule(
        q, k, v, g[None], beta[None], initial_state=first, normalise_qk=True, dtype=torch.float64
    )
    return out[0], state[0].transpose(1, 2)


def rms(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x.double() - y).square().mean().sqrt())


def test_no_less_accurate_than_the_chunk_kernels() -> None:
    """Distance from float64, of outputs and of the state, against FLA's chunk kernels on the same inputs."""
    from vllm.third_party.flash_linear_attention.ops.chunk import chunk_gated_delta_rule

    from vllm_invariant import cuda

    cuda.pin_launches(D, D, "bfloat16", untested=False)
    case = Case.random(LONG, seed=7)
    expected, state = exact(case, LONG, 1)
    g, beta = reference.gating(case.a.float(), case.b.float(), case.a_log, case.dt_bias)
    q, k, v = (x.reshape(1, LONG, -1, D).contiguous() for x in case.x.split([H * D, H * D, G * D], dim=1))
    chunk_out, chunk_state = chunk_gated_delta_rule(
        q, k, v, g.unsqueeze(0), beta.unsqueeze(0), initial_state=case.states[1:2].clone(),
        output_final_state=True, cu_seqlens=ints([0, LONG]), use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    out = case.run([slice(0, LONG)], [1])
    assert_close(out, expected)
    ours, theirs = rms(out, expected), rms(chunk_out[0], expected)
    ours_state, theirs_state = rms(case.states[1], state), rms(chunk_state[0], state)
    print(f"rms from float64, ours against chunk: outputs {ours:.3e}, {theirs:.3e}")
    print(f"state {ours_state:.3e}, {theirs_state:.3e}")
    assert ours <= theirs
    assert ours_state <= theirs_state


def test_another_order_is_seen() -> None:
    """The same recurrence with its sums in PyTorch's order: the comparisons above can fail."""
    case, other = Case.random(LONG), Case.random(LONG)
    case.run([slice(0, LONG)], [1])
    q, k, v = (x.reshape(LONG, -1, D) for x in other.x.split([H * D, H * D, G * D], dim=1))
    fixed = (other.a, other.b, other.a_log, other.dt_bias, other.states.transpose(2, 3))
    recurrent_torch.recurrent_gated_delta_rule(q, k, v, *fixed, [0, LONG], [1], [True])
    assert_close(case.states[1], other.states[1], torch.bfloat16)
    assert differing(case.states[1], other.states[1]) > 0


def test_heads_without_a_launch_are_refused() -> None:
    case = Case.random(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(recurrent_triton.LAUNCH, (D, D))
        with pytest.raises(ValueError, match="no pinned launch for heads of 128x128"):
            case.run([slice(0, 1)], [1])


def test_a_decode_step_can_be_captured() -> None:
    """Convolution and recurrence in a CUDA graph, padding rows included, give an eager step's bits."""
    eager, graph = Case.random(6), Case.random(6)
    slots, begun, starts = (
        ints([3, 1, 2, 0]),
        torch.ones(4, dtype=torch.bool, device=DEVICE),
        ints([0, 1, 2, 3, 3]),
    )
    out = torch.zeros(4, G, D, dtype=torch.bfloat16, device=DEVICE)

    def step(case: Case) -> None:
        qkv = conv_triton.causal_conv1d(
            case.x[:4], case.weight, None, case.taps, slots=slots, cu_seqlens=starts, has_initial_state=begun
        )
        recurrent_triton.recurrent_step(
            qkv, case.a[:4], case.b[:4], case.a_log, case.dt_bias, case.states, out,
            slots=slots, cu_seqlens=starts,
        )  # fmt: skip

    step(eager)
    expected = out.clone()
    states, taps = graph.states.clone(), graph.taps.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # else it writes the states while they are cloned
    with torch.cuda.stream(stream):
        step(graph)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        step(graph)
    graph.states.copy_(states)
    graph.taps.copy_(taps)
    captured.replay()
    assert_bitwise(out, expected, "outputs")
    assert_bitwise(graph.states, eager.states, "states")
    assert_bitwise(graph.taps, eager.taps, "taps")


# --- convolution -----------------------------------------------------------------------------------


@pytest.mark.parametrize("begun", [False, True])
def test_convolution_agrees_with_the_reference(begun: bool) -> None:
    case = Case.random(200)
    before = case.taps[1:2].float() if begun else None
    out = case.convolve([slice(0, 200)], [1], [begun])
    expected, state = reference.causal_conv1d(case.x.float().unsqueeze(0), case.weight.float(), None, before)
    assert_close(out, expected[0])
    assert_bitwise(case.taps[1], state[0].bfloat16(), "state")


@pytest.mark.parametrize("step", [*range(1, 9), 16, 64, 199])
@pytest.mark.parametrize("begun", [False, True])
def test_convolution_in_chunks_of_any_length(step: int, begun: bool) -> None:
    """Chunks of 1 (a decode's) to 8 tokens, and of the lengths blocks end at."""
    case, cut = Case.random(200), Case.random(200)
    whole = case.convolve([slice(0, 200)], [1], [begun])
    parts = [cut.convolve([slice(s, min(s + step, 200))], [1], [begun or s > 0]) for s in range(0, 200, step)]
    assert_bitwise(torch.cat(parts), whole, "rows")
    assert_bitwise(cut.taps, case.taps, "state")


def test_convolution_of_sequences_together_as_if_alone() -> None:
    """More sequences than one block of ends, empty ones among them."""
    draw = random.Random(0)
    rows = [slice(s, s + draw.choice((0, 1, 1, 2, 3, 40))) for s in (draw.randrange(150) for _ in range(150))]
    slots, begun = list(range(1, 151)), [draw.random() < 0.7 for _ in rows]
    case, alone = Case.random(200, slots=151), Case.random(200, slots=151)
    out = case.convolve(rows, slots, begun)
    each = [
        alone.convolve([r], [s], [g]) for r, s, g in zip(rows, slots, begun, strict=True) if r.stop > r.start
    ]
    assert_bitwise(out, torch.cat(each), "rows")
    assert_bitwise(case.taps, alone.taps, "states")
