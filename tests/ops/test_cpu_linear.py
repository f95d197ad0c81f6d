"""Row tiles of one shape make a linear layer's rows independent of how many there are."""

import pytest
import torch

from tests.ops import cpu_kernels  # noqa: F401  (skips where vLLM is not a CPU build)
from tests.tolerance import assert_bitwise, assert_close, differing
from vllm_invariant import cpu_linear

# (out_features, in_features): the tiny checkpoint's, and wider ones that stock gives to oneDNN.
SHAPES = [(1536, 256), (8, 256), (256, 512), (1024, 1024), (384, 2048)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
MOST = 200


def layer_and_rows(shape: tuple[int, int], rows: int) -> tuple[torch.nn.Linear, torch.Tensor]:
    """A bf16 linear layer and (rows, in_features) inputs."""
    out_features, in_features = shape
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(in_features, out_features, bias=False, dtype=torch.bfloat16)
    layer.weight.requires_grad_(False)
    layer.weight.copy_(0.05 * torch.randn(shape, generator=generator))
    return layer, torch.randn(rows, in_features, generator=generator).bfloat16()


def dispatched(layer: torch.nn.Linear, *, tiled: bool):
    """What stock chooses for a layer, as a function of (rows, in_features), in row tiles or as it is."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm as replaced

    stock = getattr(replaced, "__wrapped__", replaced)
    (cpu_linear.tile_dispatch(stock) if tiled else stock)(layer, False)
    return lambda x: layer.cpu_linear(x, layer.weight, None)


def elements_that_move(run, x: torch.Tensor) -> int:
    """Elements that differ from those of the widest call, over all row counts."""
    whole = run(x)
    return sum(differing(run(x[:rows].contiguous()), whole[:rows]) for rows in range(1, len(x)))


@each_shape
def test_agrees_with_torch(shape):
    layer, x = layer_and_rows(shape, 70)
    expected = x.float() @ layer.weight.float().T
    assert_close(dispatched(layer, tiled=True)(x), expected)


@each_shape
def test_every_row_is_the_same_for_every_row_count(shape):
    layer, x = layer_and_rows(shape, MOST)
    run = dispatched(layer, tiled=True)
    whole = run(x)
    for rows in range(1, MOST + 1):
        assert_bitwise(run(x[:rows].contiguous()), whole[:rows], f"{rows} rows")


@each_shape
def test_a_row_is_the_same_wherever_it_stands(shape):
    layer, x = layer_and_rows(shape, 100)
    run = dispatched(layer, tiled=True)
    whole = run(x)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(1))
    assert_bitwise(run(x[order]), whole[order], "shuffled")
    for first in (1, 7, 31, 32, 33, 99):
        assert_bitwise(run(x[first:].contiguous()), whole[first:], f"from row {first}")


def test_stock_moves_bits_with_the_row_count():
    """The rule turned off.  Void where stock's kernels happen to be row-count invariant."""
    moved = {}
    for shape in SHAPES:
        layer, x = layer_and_rows(shape, 65)
        moved[shape] = elements_that_move(dispatched(layer, tiled=False), x)
    if not any(moved.values()):
        pytest.skip("stock's CPU linears give one row the same bits for 1 to 65 rows on this CPU")
    assert max(moved.values()) > 0


def test_shapes_and_bias():
    """Leading axes are kept, the padding is cut off, and the kernel sees nothing but full tiles."""
    seen = []

    def kernel(x: torch.Tensor, _: object, bias: torch.Tensor | None) -> torch.Tensor:
        seen.append(x.shape[0])
        return x[:, :2] + bias

    x = torch.arange(2 * 35 * 3, dtype=torch.float32).reshape(2, 35, 3)
    out = cpu_linear.run_tiled(kernel, x, torch.ones(2), rows=32)
    assert_bitwise(out, x[..., :2] + 1, "rows")
    assert out.is_contiguous() and seen == [32, 32, 32]


def test_leaves_alone_what_is_no_linear_layer():
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.zeros(8, 1, 4))
    cpu_linear.tile_dispatch(lambda layer, remove_weight: None)(layer, False)
    assert not hasattr(layer, "cpu_linear")
