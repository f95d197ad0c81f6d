"""Linear layers by rows: the table's ranges, and on a GPU that no tile moves a bit of stock's."""

from typing import Any

import pytest
import torch

from tests.gpu import GPU
from tests.tolerance import assert_bitwise, assert_close
from vllm_invariant.ops import linear_launch
from vllm_invariant.ops.linear_launch import Launch, Tile

COUNTS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1023, 2050)

# (columns, depth): GDN projections, attention, MLP, head and router of the shapes that are measured, halves
# of two of them, and what fits no tile.
SHAPES = [
    (12288, 1024), (64, 1024), (1024, 4096), (5120, 1024), (1024, 3584), (8192, 1024), (12288, 2048),
    (256, 2048), (1, 2048), (2048, 512), (6144, 1024), (1024, 1792), (100, 72), (33, 1000),
]  # fmt: skip

each_launch = pytest.mark.parametrize(
    "launch", linear_launch.TABLE.values(), ids=map(str, linear_launch.TABLE)
)
each_shape = pytest.mark.parametrize(
    "weight", [pytest.param(shape, marks=GPU, id=f"{shape[0]}x{shape[1]}") for shape in SHAPES], indirect=True
)


@each_launch
def test_ranges_cover_every_number_of_rows(launch: Launch) -> None:
    ends = [tile.up_to for tile in launch.tiles]
    assert ends[-1] is None and ends[:-1] == sorted(set(ends[:-1]))


@each_launch
def test_a_tile_is_whole_matrix_instructions(launch: Launch) -> None:
    """Sixteen deep: the sum's order is that of the instruction."""
    assert all(size % 16 == 0 for tile in launch.tiles for size in (tile.rows, tile.columns, tile.depth))


@pytest.fixture(scope="module")
def weight(request: pytest.FixtureRequest) -> torch.Tensor:
    """(columns, depth) on the GPU."""
    columns, depth = request.param
    draw = torch.Generator("cuda").manual_seed(0)
    return (depth**-0.5 * torch.randn(columns, depth, generator=draw, device="cuda")).bfloat16()


def rows_for(weight: torch.Tensor) -> torch.Tensor:
    """(most rows, depth) on the GPU."""
    draw = torch.Generator("cuda").manual_seed(1)
    return torch.randn(max(COUNTS), weight.shape[1], generator=draw, device="cuda").bfloat16()


def stock_linear() -> Any:
    """Stock's own, also where an engine of this process has replaced it."""
    from vllm.model_executor.determinism import batch_invariant

    stock = batch_invariant.linear_batch_invariant
    return getattr(stock, "__wrapped__", stock)


def launches() -> dict[str, Launch]:
    """The table's, and each of its tiles for every number of rows."""
    found = {}
    for key, launch in linear_launch.TABLE.items():
        found[f"{key}"] = launch
        for tile in launch.tiles:
            size = (tile.rows, tile.columns, tile.depth, tile.stages)
            tiles = tuple(Tile(end, *size) for end in (1, 2, 3, None))
            found[f"{key}, {tile}"] = Launch(tiles, launch.warps, launch.programs)
    return found


@each_shape
def test_no_tile_moves_a_bit(weight: torch.Tensor) -> None:
    """Whatever the number of rows and wherever a row stands: the bits of stock's kernel."""
    from vllm_invariant.ops.linear_triton import linear

    x = rows_for(weight)
    whole = stock_linear()(x, weight)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(2)).cuda()
    for name, launch in launches().items():
        for count in COUNTS:
            assert_bitwise(linear(x[:count], weight, launch), whole[:count], f"{name}, {count} rows")
        assert_bitwise(linear(x[order], weight, launch), whole[order], f"{name}, shuffled")


@each_shape
def test_agrees_with_float32(weight: torch.Tensor) -> None:
    from vllm_invariant.ops.linear_triton import linear

    x = rows_for(weight)[:300]
    expected = x.float() @ weight.float().T
    for launch in launches().values():
        assert_close(linear(x, weight, launch) / expected.std(), expected / expected.std(), torch.bfloat16)


@pytest.mark.parametrize("weight", [pytest.param((1024, 4096), marks=GPU)], indirect=True)
def test_the_order_of_the_sum_is_what_decides(weight: torch.Tensor) -> None:
    """Two halves of the depth, each in order, have other bits: the comparisons above can fail."""
    from vllm_invariant.ops.linear_triton import linear

    (launch, *_), x, half = linear_launch.TABLE.values(), rows_for(weight), weight.shape[1] // 2
    halves = [
        linear(x[:, part], weight[:, part].contiguous(), launch).float()
        for part in (slice(half), slice(half, None))
    ]
    assert not torch.equal(sum(halves).bfloat16(), linear(x, weight, launch))


@pytest.mark.parametrize("weight", [pytest.param((1024, 1024), marks=GPU)], indirect=True)
def test_rows_may_lie_apart_and_have_more_dimensions(weight: torch.Tensor) -> None:
    from vllm_invariant.ops.linear_triton import linear

    (launch, *_) = linear_launch.TABLE.values()
    x = rows_for(weight)
    expected = linear(x[:40], weight, launch)
    apart = torch.stack([x[:40], -x[:40]], dim=1)[:, 0]
    assert not apart.is_contiguous()
    assert_bitwise(linear(apart, weight, launch), expected, "apart")
    assert_bitwise(linear(x[:40].view(5, 8, -1), weight, launch).view(40, -1), expected, "three dimensions")


@pytest.mark.parametrize("weight", [pytest.param((1024, 1024), marks=GPU)], indirect=True)
def test_one_graph_of_torch_compile_serves_any_number_of_rows(weight: torch.Tensor) -> None:
    """The tile is chosen when the kernel runs, so nothing is compiled again, and the bits are the same."""
    from vllm_invariant.cuda_linear import by_rows

    (launch, *_) = linear_launch.TABLE.values()
    ours, x, graphs = by_rows(launch)(stock_linear()), rows_for(weight), []

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        graphs.append(graph)
        return compile_fx(graph, inputs)

    compiled = torch.compile(lambda rows: ours(rows, weight), backend=backend)
    for count in (40, 2050, 17, 300):
        rows = x[:count]
        torch._dynamo.mark_dynamic(rows, 0)  # as vLLM has it: nothing else of a layer varies
        assert_bitwise(compiled(rows), ours(rows, weight), f"{count} rows")
    assert len(graphs) == 1


@pytest.mark.parametrize("weight", [pytest.param((64, 128), marks=GPU)], indirect=True)
def test_what_it_is_not_for_goes_to_stock(weight: torch.Tensor) -> None:
    """A bias, other types, weights and rows that lie across."""
    from vllm_invariant.cuda_linear import by_rows

    asked = []
    ours = by_rows(linear_launch.TABLE[9, 0])(lambda *inputs: asked.append(inputs))
    x, bias = rows_for(weight)[:4], weight[:, 0].contiguous()
    ours(x, weight)
    assert not asked
    across = weight.T.contiguous().T
    others = [(x, weight, bias), (x.half(), weight.half(), None), (x.float(), weight.float(), None)]
    others += [(x, across, None), (x.T.contiguous().T, weight, None)]
    for inputs in others:
        ours(*inputs)
    assert [len(inputs) for inputs in asked] == [3] * len(others)
    for got, inputs in zip(asked, others, strict=True):
        assert all(a is b for a, b in zip(got, inputs, strict=True))
