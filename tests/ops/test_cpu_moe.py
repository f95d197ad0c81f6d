"""Experts, router and shared expert of the CPU engine: a token's bits do not follow how many there are."""

import pytest
import torch

from tests.ops import cpu_kernels  # noqa: F401  (skips where vLLM is not a CPU build)
from tests.tolerance import assert_bitwise, assert_close, differing
from vllm_invariant import cpu_linear, cpu_moe

EXPERTS, TOP_K, HIDDEN, WIDTH = 8, 2, 1024, 512
MOST = 64


@pytest.fixture(scope="module")
def inputs() -> dict[str, torch.Tensor]:
    """Weights of one layer and (MOST, HIDDEN) tokens; the router's first two rows are equal."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, std: float = 0.05) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * std).bfloat16()

    router = normal(EXPERTS, HIDDEN, std=HIDDEN**-0.5)
    router[1] = router[0]
    return {
        "x": normal(MOST, HIDDEN, std=1.0),
        "w13": normal(EXPERTS, 2 * WIDTH, HIDDEN),
        "w2": normal(EXPERTS, HIDDEN, WIDTH),
        "router": router,
        "gate": normal(1, HIDDEN, std=HIDDEN**-0.5),
    }


def linear(weight: torch.Tensor):
    """A linear layer as the engine runs it under the flag."""
    return lambda x: cpu_linear.run_tiled(lambda t, _, bias: torch.nn.functional.linear(t, weight), x, None)


def route(inputs: dict[str, torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Router weights and expert ids, (rows, TOP_K) each, by stock's CPU router."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    router = CPURouter(TOP_K, EXPERTS)
    return router._compute_routing(x, linear(inputs["router"])(x), None)


def experts(inputs: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The routed experts' sum, (rows, HIDDEN)."""
    return cpu_moe.run_experts(x, inputs["w13"], inputs["w2"], *route(inputs, x))


def shared(inputs: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """A shared expert behind its gate, as stock's module computes it."""
    from vllm.model_executor.layers.activation import SiluAndMul

    hidden = SiluAndMul.forward_native(linear(inputs["w13"][0])(x))
    return torch.sigmoid(linear(inputs["gate"])(x)) * linear(inputs["w2"][0])(hidden)


PARTS = {
    "experts": experts,
    "shared expert": shared,
    "router weights": lambda inputs, x: route(inputs, x)[0],
    "router choice": lambda inputs, x: route(inputs, x)[1],
}
each_part = pytest.mark.parametrize("part", list(PARTS))


@each_part
def test_a_row_is_the_same_for_every_row_count(inputs: dict[str, torch.Tensor], part: str) -> None:
    x = inputs["x"]
    whole = PARTS[part](inputs, x)
    for rows in range(1, MOST + 1):
        assert_bitwise(PARTS[part](inputs, x[:rows].contiguous()), whole[:rows], f"{part}, {rows} rows")


@each_part
def test_a_row_is_the_same_wherever_it_stands(inputs: dict[str, torch.Tensor], part: str) -> None:
    x = inputs["x"]
    whole = PARTS[part](inputs, x)
    for seed in range(5):
        order = torch.randperm(MOST, generator=torch.Generator().manual_seed(seed))
        assert_bitwise(PARTS[part](inputs, x[order]), whole[order], f"{part}, shuffled by {seed}")


def test_ties_break_the_same_way(inputs: dict[str, torch.Tensor]) -> None:
    """The two equal router rows are tied in every token; at the last place only one of them is chosen."""
    x = inputs["x"]
    logits = linear(inputs["router"])(x)
    assert_bitwise(logits[:, 0], logits[:, 1], "the tie")
    _, ids = route(inputs, x)
    assert ids.lt(2).sum(-1).eq(1).any(), "void: no tie at the last place"
    for row in range(MOST):
        assert_bitwise(route(inputs, x[row : row + 1])[1], ids[row : row + 1], f"row {row} alone")
        copies = x[row : row + 1].repeat(33, 1)
        assert_bitwise(route(inputs, copies)[1], ids[row : row + 1].repeat(33, 1), f"row {row}, 33 copies")


def test_agrees_with_transformers(inputs: dict[str, torch.Tensor]) -> None:
    from transformers import Qwen3_5MoeTextConfig
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeExperts

    sizes = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "moe_intermediate_size": WIDTH}
    config = Qwen3_5MoeTextConfig(**sizes)
    config._experts_implementation = "eager"
    oracle = Qwen3_5MoeExperts(config)
    oracle.gate_up_proj.data, oracle.down_proj.data = inputs["w13"].float(), inputs["w2"].float()
    weights, ids = route(inputs, inputs["x"])
    expected = oracle(inputs["x"].float(), ids.long(), weights)
    actual = experts(inputs, inputs["x"])
    scale = expected.std()
    assert_close(actual.float() / scale, expected / scale, torch.bfloat16)


def test_agrees_with_stock(inputs: dict[str, torch.Tensor]) -> None:
    """Stock's portable kernel, on the same routing."""
    from vllm import _custom_ops as ops

    x = inputs["x"]
    weights, ids = route(inputs, x)
    packed = [ops.cpu_prepack_moe_weight(inputs[name], "vec") for name in ("w13", "w2")]
    expected = torch.empty_like(x)
    ops.cpu_fused_moe(expected, x, *packed, None, None, weights, ids, "silu", "vec", False)
    scale = expected.float().std()
    assert_close(experts(inputs, x).float() / scale, expected.float() / scale, torch.bfloat16)


def test_tiles() -> None:
    """Pairs of an expert stay in order, at most ROWS to a tile; an expert without tokens has none."""
    ids = torch.tensor([3, 0, 3, 3, 0] + [3] * 40)
    tiles = cpu_moe.tiles_of(ids)
    assert [(e, len(pairs)) for e, pairs in tiles] == [(0, 2), (3, 32), (3, 11)]
    assert tiles[0][1].tolist() == [1, 4] and tiles[1][1].tolist()[:4] == [0, 2, 3, 5]


def test_whole_shares_move_bits(inputs: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule turned off.  Void where this CPU's products happen not to follow their row count."""
    x = inputs["x"].repeat(4, 1)
    x += 0.01 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole = experts(inputs, x)
    assert_bitwise(experts(inputs, x[:40].contiguous()), whole[:40], "the rule on")
    monkeypatch.setattr(cpu_moe, "run_tile", cpu_moe.expert)
    tiles_of = cpu_moe.tiles_of
    monkeypatch.setattr(cpu_moe, "tiles_of", lambda ids: tiles_of(ids, rows=1 << 30))
    whole = experts(inputs, x)
    moved = sum(differing(experts(inputs, x[:n].contiguous()), whole[:n]) for n in range(1, 65))
    if moved == 0:
        pytest.skip("expert products give one row the same bits for every row count on this CPU")
