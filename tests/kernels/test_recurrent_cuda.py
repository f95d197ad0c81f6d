"""The CUDA recurrence: one token's bits in every form, at every cut, in every company.

On a GPU the library runs.  Elsewhere the same source runs on the host, each thread of a block a fiber
(tests/csrc), over fewer tokens and draws.
"""

import random
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from tests.gpu import on_either
from tests.harness import device
from tests.tolerance import assert_bitwise, differing
from vllm_invariant.ops import recurrent_cuda, reference

pytestmark = [on_either]
DEVICE = device.NAME

DIM = 128
SLOTS = 16
TOKENS, DRAWS, KEY_HEADS, VALUE_HEADS = {"cuda": (513, 200, 2, 4), "cpu": (53, 8, 1, 2)}[DEVICE]
ROOT = Path(__file__).parents[2]


def build_for_the_host(target: Path) -> Path:
    """The kernels' source and the fibers, compiled without contraction of products and sums."""
    flags = ["-O2", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", "-Wno-unknown-pragmas"]
    folders = [f"-I{ROOT / 'tests' / 'csrc'}", f"-I{ROOT / 'csrc'}"]
    source = str(ROOT / "tests" / "csrc" / "recurrent.cpp")
    subprocess.run(["g++", *flags, *folders, source, "-o", str(target)], check=True)
    return target


@pytest.fixture(scope="module", autouse=True)
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The library that `recurrent_step` calls."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            loaded = recurrent_cuda.load(build_for_the_host(tmp_path_factory.mktemp("csrc") / "recurrent.so"))
            patch.setattr(recurrent_cuda, "library", lambda: loaded)
            patch.setattr(recurrent_cuda, "_device_and_stream", lambda state: (0, None))
        yield


@pytest.fixture(autouse=True)
def here(machine: str) -> None:
    """Counts the GPU's case where it cannot run."""


@dataclass(frozen=True)
class Layer:
    """Inputs of T tokens of one layer: after the convolution, and before gating."""

    mixed_qkv: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor

    @classmethod
    def random(cls, tokens: int, heads: tuple[int, int] = (KEY_HEADS, VALUE_HEADS), seed: int = 0) -> "Layer":
        """Unit-scale inputs; memories from about 3 tokens to about 3,000."""
        draw = torch.Generator(DEVICE).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw, device=DEVICE)

        key_heads, value_heads = heads
        return cls(
            normal(tokens, (2 * key_heads + value_heads) * DIM).bfloat16(),
            normal(tokens, value_heads).bfloat16(),
            normal(tokens, value_heads).bfloat16(),
            -torch.linspace(1.0, 8.0, value_heads, device=DEVICE),
            0.5 * normal(value_heads),
        )

    def rows(self, start: int, end: int) -> "Layer":
        return replace(self, mixed_qkv=self.mixed_qkv[start:end], a=self.a[start:end], b=self.b[start:end])

    @property
    def heads(self) -> int:
        return self.A_log.numel()

    def run(self, state: torch.Tensor, slots: torch.Tensor, longest: int, **options) -> torch.Tensor:
        """One launch; outputs of rows it does not write stay NaN."""
        out = torch.full((len(self.a), self.heads, DIM), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        recurrent_cuda.recurrent_step(
            self.mixed_qkv, self.a, self.b, self.A_log, self.dt_bias, state, out,
            slots=slots, max_query_len=longest, **options,
        )  # fmt: skip
        return out


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def starts(lengths: list[int]) -> torch.Tensor:
    return ints(0, *torch.tensor(lengths).cumsum(0).tolist())


def pool(heads: int = VALUE_HEADS, seed: int = 1) -> torch.Tensor:
    draw = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(SLOTS, heads, DIM, DIM, generator=draw, device=DEVICE)


@pytest.fixture(scope="module")
def layer() -> Layer:
    return Layer.random(TOKENS)


@pytest.fixture(scope="module")
def whole(layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and state of all tokens in one prefill from slot 3's state."""
    state = pool()
    out = layer.run(state, ints(3), TOKENS, cu_seqlens=ints(0, TOKENS))
    assert not out.isnan().any() and not torch.equal(state[3], pool()[3])
    return out, state[3]


def pieces(tokens: int, draw: random.Random) -> list[int]:
    """Random lengths that add up to ``tokens``: single tokens, verifications, and chunks."""
    lengths = []
    while (left := tokens - sum(lengths)) > 0:
        widest = draw.choice([1, 2, 4, 8, 9, 16, 17, 32, 64, 100, 300, 513])
        lengths.append(min(left, draw.randint(1, widest)))
    return lengths


def test_any_cut(layer: Layer, whole) -> None:
    """Outputs and state are those of one prefill; single tokens run as decodes and as prefills."""
    for seed in range(DRAWS):
        draw = random.Random(seed)
        state, outputs, done = pool(), [], 0
        for length in pieces(TOKENS, draw):
            rows = layer.rows(done, done + length)
            options = {} if length == 1 and draw.random() < 0.5 else {"cu_seqlens": ints(0, length)}
            outputs.append(rows.run(state, ints(3), length, **options))
            done += length
        assert_bitwise(torch.cat(outputs), whole[0], f"outputs, draw {seed}")
        assert_bitwise(state[3], whole[1], f"state, draw {seed}")


@pytest.mark.parametrize("longest", [1, 8, 9, TOKENS, 100_000])
def test_the_bound_on_lengths_moves_no_bit(layer: Layer, whole, longest: int) -> None:
    state = pool()
    assert_bitwise(layer.run(state, ints(3), longest, cu_seqlens=ints(0, TOKENS)), whole[0])
    assert_bitwise(state[3], whole[1])


def test_every_launch_shape_has_the_same_bits(layer: Layer, whole) -> None:
    """Also those that the library would not choose for this many tokens."""
    names = recurrent_cuda.shapes()
    assert len(names) > 2
    for shape, name in enumerate(names):
        state = pool()
        out = layer.run(state, ints(3), TOKENS, cu_seqlens=ints(0, TOKENS), shape=shape)
        assert_bitwise(out, whole[0], name)
        assert_bitwise(state[3], whole[1], name)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_verification_keeps_every_state(layer: Layer, whole, width: int) -> None:
    """``width`` tokens a call, each state in its own slot; the next call goes on from any of them."""
    state, done = pool(), 0
    slots = torch.arange(1, width + 1, dtype=torch.int32, device=DEVICE)[None]
    state[1] = pool()[3]
    alone = pool()
    draw, accepted = random.Random(width), 1
    while done + width <= min(TOKENS, 64):
        rows = layer.rows(done, done + width)
        options = {"cu_seqlens": ints(0, width), "num_accepted": ints(accepted)}
        out = rows.run(state, slots, width, **options, shape=draw.choice([-1, 0, 1]))
        accepted = draw.randint(1, width)
        for j in range(width):
            one = layer.rows(done + j, done + j + 1)
            if j < accepted:
                assert_bitwise(out[j], one.run(alone, ints(3), 1)[0], f"output of token {done + j}")
                assert_bitwise(state[j + 1], alone[3], f"state after token {done + j}")
        done += accepted
    assert_bitwise(state[width + 1 :], pool()[width + 1 :], "slots nobody named")


def test_a_batch_of_any_lengths(layer: Layer) -> None:
    """Every sequence of a batch has the bits it has alone; slots are shuffled, one row is padding."""
    lengths = [1, TOKENS, 3, 18, 1, 17, 33, 2]
    slots = [5, 2, 9, 1, 0, 14, 7, 3]
    sequences = [Layer.random(length, seed=10 + i) for i, length in enumerate(lengths)]
    together = replace(
        layer,
        mixed_qkv=torch.cat([s.mixed_qkv for s in sequences]),
        a=torch.cat([s.a for s in sequences]),
        b=torch.cat([s.b for s in sequences]),
    )
    state = pool()
    fresh = torch.tensor([i % 3 == 1 for i in range(len(lengths))], device=DEVICE)
    options = {"cu_seqlens": starts(lengths), "has_initial_state": ~fresh}
    out = together.run(state, ints(*slots), max(lengths), **options)
    expected = pool()
    for i, rows in enumerate(out.split(lengths)):
        one = replace(together, mixed_qkv=sequences[i].mixed_qkv, a=sequences[i].a, b=sequences[i].b)
        if slots[i] == 0:
            assert_bitwise(rows, torch.zeros_like(rows), "padding")
            continue
        if fresh[i]:
            expected[slots[i]] = 0
        alone = one.run(expected, ints(slots[i]), lengths[i], cu_seqlens=ints(0, lengths[i]))
        assert_bitwise(rows, alone, f"sequence {i}")
    assert_bitwise(state, expected, "states")


@pytest.mark.parametrize("batch", [1, 2, 3, 8, 15])
def test_a_decode_batch(layer: Layer, batch: int) -> None:
    """A row has the same bits in a batch of any size, as a decode and as a sequence of one token."""
    rows = layer.rows(0, batch)
    slots = torch.randperm(SLOTS - 1, generator=torch.Generator().manual_seed(batch))[:batch] + 1
    slots = slots.to(torch.int32).to(DEVICE)
    state, expected = pool(), pool()
    out = rows.run(state, slots, 1)
    for i in range(batch):
        alone = layer.rows(i, i + 1).run(expected, slots[i : i + 1], 64, cu_seqlens=ints(0, 1))
        assert_bitwise(out[i], alone[0], f"row {i}")
    assert_bitwise(state, expected, "states")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_share_of_the_heads(rank: int) -> None:
    """Half of the heads, as one of two ranks has them, have the bits they have among all."""
    keys, values = {"cuda": (16, 32), "cpu": (2, 4)}[DEVICE]
    all_heads, lengths, slots = Layer.random(TOKENS, (keys, values)), [TOKENS - 1, 1], ints(3, 5)
    options = {"slots": slots, "longest": TOKENS, "cu_seqlens": starts(lengths)}
    state = pool(values)
    out = all_heads.run(state, **options)
    key_heads, value_heads = (slice(rank * n // 2, (rank + 1) * n // 2) for n in (keys, values))
    parts = all_heads.mixed_qkv.unflatten(1, (-1, DIM)).split([keys, keys, values], dim=1)
    mine = [part[:, heads] for part, heads in zip(parts, (key_heads, key_heads, value_heads), strict=True)]
    share = Layer(
        torch.cat(mine, dim=1).flatten(1),
        all_heads.a[:, value_heads].contiguous(),
        all_heads.b[:, value_heads].contiguous(),
        all_heads.A_log[value_heads].contiguous(),
        all_heads.dt_bias[value_heads].contiguous(),
    )
    own = pool(values)[:, value_heads].contiguous()
    assert_bitwise(share.run(own, **options), out[:, value_heads].contiguous(), "outputs")
    assert_bitwise(own, state[:, value_heads].contiguous(), "states")


def test_reading_from_another_slot(layer: Layer, whole) -> None:
    """The state read stays as it was."""
    state = pool()
    out = layer.run(state, ints(6), TOKENS, cu_seqlens=ints(0, TOKENS), initial_slots=ints(3))
    assert_bitwise(out, whole[0])
    assert_bitwise(state[6], whole[1])
    assert_bitwise(state[3], pool()[3])


def test_strides_of_a_cache_page(layer: Layer, whole) -> None:
    """States between other data, and rows cut out of wider ones, as the engine has them."""
    page = torch.full((SLOTS, VALUE_HEADS * DIM * DIM + 64), 7.0, device=DEVICE)
    state = page[:, 64:].unflatten(1, (VALUE_HEADS, DIM, DIM))
    state.copy_(pool())
    wide = [torch.cat([x, x], dim=1)[:, : x.shape[1]] for x in (layer.mixed_qkv, layer.a, layer.b)]
    strided = replace(layer, mixed_qkv=wide[0], a=wide[1], b=wide[2])
    out = strided.run(state, ints(3), TOKENS, cu_seqlens=ints(0, TOKENS))
    assert_bitwise(out, whole[0])
    assert_bitwise(state[3], whole[1])
    assert bool((page[:, :64] == 7.0).all())


def test_an_empty_sequence_touches_nothing(layer: Layer) -> None:
    """Padded rows of a CUDA graph have no tokens."""
    state = pool()
    layer.rows(0, 2).run(state, ints(1, 2, 3), 2, cu_seqlens=ints(0, 2, 2, 2))
    assert_bitwise(state[2:], pool()[2:])


def test_parameters_in_either_precision(layer: Layer) -> None:
    """float32 parameters that are bfloat16 numbers give the bits that bfloat16 ones give."""
    rounded = replace(layer, A_log=layer.A_log.bfloat16(), dt_bias=layer.dt_bias.bfloat16())
    widened = replace(
        layer, **{name: getattr(rounded, name).float() for name in ("A_log", "dt_bias", "a", "b")}
    )
    narrow, wide = pool(), pool()
    out = rounded.run(narrow, ints(3), TOKENS, cu_seqlens=ints(0, TOKENS))
    assert_bitwise(widened.run(wide, ints(3), TOKENS, cu_seqlens=ints(0, TOKENS)), out)
    assert_bitwise(wide, narrow)


def test_a_captured_graph_replays_the_same_bits(layer: Layer, whole) -> None:
    """Lengths and slots are read when the graph runs."""
    if DEVICE == "cpu":
        pytest.skip("there are no graphs without a GPU")
    state, slots, cu_seqlens = pool(), ints(5), ints(0, 1)
    layer.run(state, slots, TOKENS, cu_seqlens=cu_seqlens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.run(state, slots, TOKENS, cu_seqlens=cu_seqlens)
    state.copy_(pool())
    slots.copy_(ints(3))
    cu_seqlens.copy_(ints(0, TOKENS))
    graph.replay()
    assert_bitwise(out, whole[0])
    assert_bitwise(state[3], whole[1])


# --- closeness --------------------------------------------------------------------------------------


def in_plain_torch(
    layer: Layer, initial: torch.Tensor, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence of the reference.  ``initial``: (G, V, K).  Returns (T, G, V) and (G, V, K)."""
    mixed = layer.mixed_qkv.to("cpu", dtype)
    key_heads = (mixed.shape[1] // DIM - layer.heads) // 2
    widths = [key_heads * DIM, key_heads * DIM, layer.heads * DIM]
    q, k, v = (x.unflatten(1, (-1, DIM)) for x in mixed.split(widths, dim=1))
    a, b, a_log, dt_bias = (x.to("cpu", dtype) for x in (layer.a, layer.b, layer.A_log, layer.dt_bias))
    g, beta = reference.gating(a, b, a_log, dt_bias)
    out, state = reference.recurrent_gated_delta_rule(
        *(x[None] for x in (q, k, v, g, beta)),
        initial_state=initial.to("cpu", dtype).mT[None],
        normalise_qk=True,
        dtype=dtype,
    )
    return out[0], state[0].mT


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((actual.double().cpu() - expected).norm() / expected.norm())


def test_state_and_outputs_against_float64(layer: Layer, whole) -> None:
    """The state keeps fp32's precision; outputs are rounded once, to bfloat16."""
    out, state = in_plain_torch(layer, pool()[3])
    assert error(whole[1], state) < 1e-5
    assert error(whole[0], out) < 2.0**-8


def test_another_order_has_other_bits(layer: Layer, whole) -> None:
    """So the comparisons above can fail: the same recurrence, in float32 and in PyTorch's order."""
    _, state = in_plain_torch(layer, pool()[3], torch.float32)
    assert error(state, whole[1].double().cpu()) < 1e-5
    assert differing(state.contiguous(), whole[1].cpu()) > 0


def test_no_worse_than_the_chunk_kernel(layer: Layer, whole) -> None:
    """Stock's chunk prefill of the same tokens, in its own layout and launched as the package pins it."""
    if DEVICE == "cpu":
        pytest.skip("stock's chunk kernels need a GPU")
    device.activate()
    from vllm.third_party.flash_linear_attention.ops.chunk import chunk_gated_delta_rule
    from vllm.third_party.flash_linear_attention.ops.fused_gdn_prefill_post_conv import fused_post_conv_prep

    from vllm_invariant import cuda

    cuda.pin_launches(DIM, DIM, "bfloat16", untested=False)
    prepared = fused_post_conv_prep(
        layer.mixed_qkv, layer.a, layer.b, layer.A_log, layer.dt_bias, KEY_HEADS, DIM, DIM
    )
    chunk_out, chunk_state = chunk_gated_delta_rule(
        *(x[None] for x in prepared),
        initial_state=pool()[3][None],
        output_final_state=True,
        cu_seqlens=ints(0, TOKENS),
    )
    out, state = in_plain_torch(layer, pool()[3])
    assert error(whole[0], out) <= error(chunk_out[0], out)
    assert error(whole[1], state) <= error(chunk_state[0], state)
