"""The experts' launch table: its ranges, and on a GPU that all launches of a row give the same bits."""

import pytest
import torch

from tests.gpu import GPU
from tests.tolerance import assert_bitwise, assert_close
from vllm_invariant.ops import moe_launch
from vllm_invariant.ops.moe_launch import Key, Launch

# Both sides of every step a launch, a block or a kernel choice was seen to follow.
COUNTS = (1, 2, 7, 8, 9, 12, 13, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1023)
TOP_K = {256: 8, 512: 10}

each_row = pytest.mark.parametrize("key", moe_launch.TABLE, ids=lambda k: f"{k.experts}x{k.width}")


@each_row
def test_ranges_cover_every_number_of_tokens(key: Key) -> None:
    ends = [launch.tokens for launch in moe_launch.TABLE[key]]
    assert ends[-1] is None and ends[:-1] == sorted(set(ends[:-1]))


def test_the_first_range_that_holds_the_tokens_is_taken() -> None:
    row = (Launch(8, (16, 64, 128), 4, 4), Launch(None, (32, 64, 64), 4, 3, group=8))
    chosen = [moe_launch.choose(row, tokens).tile[0] for tokens in (1, 8, 9, 100_000)]
    assert chosen == [16, 16, 32, 32]
    assert row[1].config()["GROUP_SIZE_M"] == 8


def test_what_the_table_has_no_row_for_is_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another shape or GPU, and anything quantized."""
    monkeypatch.setattr(moe_launch, "capability", lambda: (9, 0))
    monkeypatch.setattr(moe_launch, "TABLE", {Key((9, 0), 4, 32, 64): (Launch(None, (16, 64, 128), 4, 4),)})
    ours = moe_launch.by_shape(lambda *args: {"stock": args[0]})
    assert ours(5, 4, 32, 64, 2, None)["BLOCK_SIZE_K"] == 128
    for others in (
        (5, 8, 32, 64, 2, None),
        (5, 4, 32, 64, 2, "fp8_w8a8"),
        (5, 4, 32, 64, 2, None, [128, 128]),
    ):
        assert ours(*others) == {"stock": 5}


# One rank's share of the 35B-A3B shape at tensor-parallel size 2: of each expert, or of the experts.
SHARES = [Key((9, 0), experts=256, width=256, hidden=2048), Key((9, 0), experts=128, width=512, hidden=2048)]
each_share = pytest.mark.parametrize("key", SHARES, ids=lambda k: f"{k.experts}x{k.width}")


@each_share
def test_stock_has_one_launch_for_a_share(key: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the flag, and through the table, which has no row for it."""
    fused_moe = pytest.importorskip("vllm.model_executor.layers.fused_moe.fused_moe")
    flag = vars(fused_moe.envs)  # an engine in this process keeps what it read of the environment
    monkeypatch.setitem(flag, "VLLM_BATCH_INVARIANT", True)
    monkeypatch.setattr(moe_launch, "capability", lambda: (9, 0))
    assert key not in moe_launch.TABLE
    get_default_config = getattr(fused_moe.get_default_config, "__wrapped__", fused_moe.get_default_config)
    ours = moe_launch.by_shape(get_default_config)
    launches = [ours(count, key.experts, key.width, key.hidden, 8, None) for count in (*COUNTS, 100_000)]
    assert all(launch == launches[0] for launch in launches)
    fused_moe.get_moe_configs.cache_clear()
    assert fused_moe.get_moe_configs(key.experts, key.width, None) is None
    monkeypatch.setitem(flag, "VLLM_BATCH_INVARIANT", False)
    free = [get_default_config(count, key.experts, key.width, key.hidden, 8, None) for count in COUNTS]
    assert any(launch != free[0] for launch in free), "void: stock has one launch without the flag, too"
    fused_moe.get_moe_configs.cache_clear()


class Layer:
    """Random experts of a row's shape, on the GPU."""

    def __init__(self, key: Key) -> None:
        random = {"generator": torch.Generator("cuda").manual_seed(0), "device": "cuda"}
        self.w13 = 0.05 * torch.randn(key.experts, 2 * key.width, key.hidden, **random).bfloat16()
        self.w2 = 0.05 * torch.randn(key.experts, key.hidden, key.width, **random).bfloat16()
        self.x = torch.randn(max(COUNTS), key.hidden, **random).bfloat16()
        scores = torch.randn(max(COUNTS), key.experts, **random).softmax(-1).topk(TOP_K[key.experts])
        self.weights = scores.values / scores.values.sum(-1, keepdim=True)
        self.ids = scores.indices.int()

    def run(self, rows: slice | torch.Tensor, launch: Launch) -> torch.Tensor:
        """Experts of some rows, all with one launch."""
        from vllm.model_executor.layers.fused_moe import fused_experts, override_config

        with override_config(launch.config()):
            return fused_experts(self.x[rows], self.w13, self.w2, self.weights[rows], self.ids[rows])


@pytest.fixture(scope="module")
def layer(request: pytest.FixtureRequest) -> Layer:
    """One layer at a time: gigabytes."""
    return Layer(request.param)


rows_on_gpu = pytest.mark.parametrize(
    "layer",
    [pytest.param(key, marks=GPU, id=f"{key.experts}x{key.width}") for key in moe_launch.TABLE],
    indirect=True,
)


@rows_on_gpu
def test_launches_of_a_row_round_alike(layer: Layer, request: pytest.FixtureRequest) -> None:
    """Whatever the number of tokens and the launch, and wherever a row stands."""
    key = request.node.callspec.params["layer"]
    first, *_ = row = moe_launch.TABLE[key]
    whole = layer.run(slice(None), first)
    for launch in row:
        for count in COUNTS:
            assert_bitwise(layer.run(slice(count), launch), whole[:count], f"{launch}, {count} tokens")
        order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(1)).cuda()
        assert_bitwise(layer.run(order, launch), whole[order], f"{launch}, shuffled")


@pytest.mark.parametrize(
    ("layer", "shared_out"),
    [
        pytest.param(SHARES[0], False, marks=GPU, id="half-as-wide"),
        pytest.param(Key((9, 0), experts=256, width=512, hidden=2048), True, marks=GPU, id="half-as-many"),
    ],
    indirect=["layer"],
)
def test_a_share_rounds_alike(layer: Layer, shared_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By stock's launch, whatever the number of tokens; with expert parallelism other ranks have the rest."""
    from vllm.model_executor.layers.fused_moe import fused_experts

    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    experts = len(layer.w13)
    mine = experts // 2 if shared_out else experts
    options = {}
    if shared_out:
        places = [e if e < mine else -1 for e in range(experts)]
        options = {
            "global_num_experts": experts,
            "expert_map": torch.tensor(places, dtype=torch.int32, device="cuda"),
        }

    def run(count: int) -> torch.Tensor:
        return fused_experts(
            layer.x[:count],
            layer.w13[:mine],
            layer.w2[:mine],
            layer.weights[:count],
            layer.ids[:count],
            **options,
        )

    whole = run(len(layer.x))
    for count in COUNTS:
        assert_bitwise(run(count), whole[:count], f"{count} tokens")


@rows_on_gpu
def test_agrees_with_float32(layer: Layer, request: pytest.FixtureRequest) -> None:
    """Every launch, on a few tokens."""
    expected = torch.zeros_like(layer.x[:16], dtype=torch.float32)
    for row in range(16):
        for weight, e in zip(layer.weights[row], layer.ids[row].tolist(), strict=True):
            gate, up = (layer.w13[e].float() @ layer.x[row].float()).chunk(2)
            expected[row] += weight * (layer.w2[e].float() @ (torch.nn.functional.silu(gate) * up))
    scale = expected.std()
    for launch in moe_launch.TABLE[request.node.callspec.params["layer"]]:
        assert_close(layer.run(slice(16), launch).float() / scale, expected / scale, torch.bfloat16)
