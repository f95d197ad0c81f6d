"""Stock's kernels on a GPU, launched as the package pins them: what a row's bits may depend on.

Shapes: 16 key heads and 32 value heads of 128, as in the published Qwen3.5 models.
"""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.gpu import GPU
from tests.harness import device
from tests.tolerance import assert_bitwise, differing

pytestmark = list(GPU)

HEADS, VALUE_HEADS, DIM = 16, 32, 128


@pytest.fixture(scope="module", autouse=True)
def invariant() -> None:
    """What a worker does before it builds a model with heads of this size."""
    device.activate()
    from vllm.model_executor.determinism import batch_invariant

    from vllm_invariant import cuda

    batch_invariant.init_batch_invariance()
    cuda.pin_launches(DIM, DIM, "bfloat16", untested=False)


@dataclass(frozen=True)
class Tokens:
    """Inputs of the chunk kernels.

    q, k: (1, T, H, D) bf16; v: (1, T, HV, D) bf16; g, beta: (1, T, HV) fp32.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    @classmethod
    def random(cls, count: int, seed: int = 0) -> "Tokens":
        """Normalised keys and queries, mild decay."""
        draw = torch.Generator("cuda").manual_seed(seed)

        def normal(heads: int) -> torch.Tensor:
            return torch.randn(1, count, heads, DIM, generator=draw, device="cuda")

        q, k = (torch.nn.functional.normalize(normal(HEADS), dim=-1).bfloat16() for _ in range(2))
        v = normal(VALUE_HEADS).bfloat16()
        g, beta = (torch.rand(1, count, VALUE_HEADS, generator=draw, device="cuda") for _ in range(2))
        return cls(q, k, v, -0.1 * g, beta)

    def __getitem__(self, rows: slice) -> "Tokens":
        return Tokens(*(x[:, rows].contiguous() for x in self.all()))

    def all(self) -> tuple[torch.Tensor, ...]:
        """In the order of the kernels' arguments."""
        return self.q, self.k, self.v, self.g, self.beta


def state_of(sequences: int, seed: int = 1) -> torch.Tensor:
    """(sequences, HV, D, D) fp32."""
    draw = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(sequences, VALUE_HEADS, DIM, DIM, generator=draw, device="cuda")


def chunk(
    tokens: Tokens, state: torch.Tensor | None, lengths: Sequence[int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed sequences through the chunk kernels: (T, HV, D) outputs, (sequences, HV, D, D) states."""
    from vllm_invariant.cuda import FLA

    run = importlib.import_module(f"{FLA}.chunk").chunk_gated_delta_rule
    ends = torch.tensor([0, *(lengths or [tokens.q.shape[1]])]).cumsum(0).to("cuda", torch.int32)
    initial = None if state is None else state.clone()
    out, final = run(*tokens.all(), initial_state=initial, output_final_state=True, cu_seqlens=ends)
    return out[0], final


def test_every_autotuner_has_one_candidate() -> None:
    """Nothing is left to time, before a launch and after it."""
    from vllm_invariant.cuda import FLA
    from vllm_invariant.ops import launch

    chunk(Tokens.random(130), state_of(1))
    row = launch.lookup(launch.Key(torch.cuda.get_device_capability(), "bfloat16", DIM, DIM))
    for name, (module, kernel) in launch.KERNELS.items():
        (config,) = launch.autotuner(getattr(importlib.import_module(f"{FLA}.{module}"), kernel)).configs
        assert config.num_warps == row[name].warps
        assert config.kwargs == dict(row[name].tiles)


@pytest.mark.parametrize("cut", [64, 128, 256, 512])
def test_cut_on_the_grid(cut: int) -> None:
    """Two calls, the second from the first one's state: outputs and state of one call."""
    tokens, state = Tokens.random(589), state_of(1)
    whole, final = chunk(tokens, state)
    head, between = chunk(tokens[:cut], state)
    tail, last = chunk(tokens[cut:], between)
    assert_bitwise(torch.cat([head, tail]), whole, f"outputs, cut at {cut}")
    assert_bitwise(last, final, f"state, cut at {cut}")


def test_cut_off_the_grid_is_seen() -> None:
    """A cut at 100 moves bits: the grid is needed, and the comparison sees it."""
    tokens, state = Tokens.random(589), state_of(1)
    whole, _ = chunk(tokens, state)
    head, between = chunk(tokens[:100], state)
    tail, _ = chunk(tokens[100:], between)
    assert differing(torch.cat([head, tail]), whole) > 0


@pytest.mark.parametrize("kept", [1, 63, 64, 65, 100, 191])
def test_later_tokens_do_not_matter(kept: int) -> None:
    """A token has the same bits whatever follows it."""
    tokens, state = Tokens.random(192), state_of(1)
    assert_bitwise(chunk(tokens[:kept], state)[0], chunk(tokens, state)[0][:kept])


def test_alone_and_third_of_five() -> None:
    """A packed sequence has the bits it has by itself (F08)."""
    lengths, which = (70, 129, 192, 1, 300), 2
    tokens, states = Tokens.random(sum(lengths)), state_of(len(lengths))
    packed, finals = chunk(tokens, states, lengths)
    rows = slice(sum(lengths[:which]), sum(lengths[: which + 1]))
    alone, final = chunk(tokens[rows], states[which : which + 1])
    assert_bitwise(packed[rows], alone)
    assert_bitwise(finals[which : which + 1], final)


def test_no_state_and_a_state_of_zeros() -> None:
    """An absent initial state is one of zeros (F08)."""
    tokens = Tokens.random(192)
    absent, zeros = chunk(tokens, None), chunk(tokens, torch.zeros_like(state_of(1)))
    for one, other in zip(absent, zeros, strict=True):
        assert_bitwise(one, other)


def test_thirty_repeats_give_one_hash() -> None:
    """No race between the programs of a prefill (F44)."""
    lengths = (65, 513, 2000)
    tokens, states = Tokens.random(sum(lengths)), state_of(len(lengths))
    hashes = set()
    for _ in range(30):
        parts = chunk(tokens, states, lengths)
        raw = b"".join(part.cpu().view(torch.uint8).numpy().tobytes() for part in parts)
        hashes.add(hashlib.sha256(raw).hexdigest())
    assert len(hashes) == 1


def rows_that_move(guard: ModuleType, rows: list[int], dtype: torch.dtype) -> int:
    """Elements of the first rows of the gated norm that differ between these row counts.

    Args:
        guard: the module with the kernel.
        rows: row counts.
        dtype: of the output; float32 shows what rounding to bfloat16 mostly hides.

    """
    draw = torch.Generator("cuda").manual_seed(3)
    x, z = (torch.randn(max(rows), DIM, generator=draw, device="cuda").bfloat16() for _ in range(2))
    weight = torch.rand(DIM, generator=draw, device="cuda").bfloat16()
    moved = torch.zeros((), dtype=torch.int64, device="cuda")
    first = None
    for count in rows:
        out = torch.empty(count, DIM, dtype=dtype, device="cuda")
        guard.layer_norm_fwd(x[:count], weight, None, 1e-6, z=z[:count], out=out, is_rms_norm=True)
        first = out if first is None else first
        shared = min(len(first), count)
        moved += (out[:shared] != first[:shared]).sum()
    return int(moved)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gated_norm_of_any_number_of_rows(dtype: torch.dtype) -> None:
    """A row's bits are the same among 1 to 4,096 rows."""
    from vllm_invariant.cuda import FLA

    guard = importlib.import_module(f"{FLA}.layernorm_guard")
    assert {guard.calc_rows_per_block(count, torch.device("cuda", 0)) for count in (1, 300, 4096)} == {1}
    assert rows_that_move(guard, [4096, *range(1, 4096)], dtype) == 0


def test_stock_norm_is_seen() -> None:
    """Stock's own choice of rows per program moves bits between 64 and 4,096 rows."""
    from vllm_invariant.cuda import FLA

    name = f"{FLA}.stock_layernorm_guard"
    path = importlib.util.find_spec(f"{FLA}.layernorm_guard").origin
    spec = importlib.util.spec_from_file_location(name, path)
    stock = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(stock)
        assert rows_that_move(stock, [64, 4096], torch.float32) > 0
    finally:
        del sys.modules[name]


# (outputs, inputs) of the linear layers: 8-layer shape of 1,024 and its vocabulary, then the tiny one.
LINEARS = [
    (12288, 1024),
    (64, 1024),
    (1024, 4096),
    (6144, 1024),
    (1024, 3072),
    (5120, 1024),
    (8192, 1024),
    (1536, 256),
]


@pytest.mark.parametrize("shape", LINEARS, ids=lambda shape: "x".join(map(str, shape)))
def test_linear_of_any_number_of_rows(shape: tuple[int, int]) -> None:
    """Every row of a linear layer has the same bits among 1 to 2,048 rows, from two offsets."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    draw = torch.Generator("cuda").manual_seed(4)
    layer = SimpleNamespace(weight=(torch.randn(shape, generator=draw, device="cuda") * 0.05).bfloat16())
    x = torch.randn(2048, shape[1], generator=draw, device="cuda").bfloat16()
    method = UnquantizedLinearMethod()
    expected = method.apply(layer, x)
    moved = torch.zeros((), dtype=torch.int64, device="cuda")
    for rows in [*range(1, 130), *range(130, 2048, 37), 2048]:
        for start in {0, min(37, 2048 - rows)}:
            moved += (method.apply(layer, x[start : start + rows]) != expected[start : start + rows]).sum()
    assert int(moved) == 0
