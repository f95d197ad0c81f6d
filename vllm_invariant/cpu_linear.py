# In a vLLM branch: vllm/model_executor/layers/utils.py.
"""Linear layers of the CPU engine, in row tiles of one fixed shape.

oneDNN and the AMX kernels stock picks from choose their blocking from the number of rows, so a
row's bits follow the batch.  With a fixed number of rows they do not, wherever in the tile the row
stands and whatever the others hold.  So each call here gets exactly `ROWS` rows, the last ones
padded with zeros.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

ROWS = 32  # of 8, 16, 32, 64 the fastest on a prefill; decode batches pay for the padding

Linear = Callable[[torch.Tensor, Any, torch.Tensor | None], torch.Tensor]

_kernels: list[Linear] = []  # a custom op takes no Python object: it takes an index into this


def run_tiled(kernel: Linear, x: torch.Tensor, bias: torch.Tensor | None, rows: int = ROWS) -> torch.Tensor:
    """Apply ``kernel`` to ``x`` (..., in_features), ``rows`` rows at a time.

    Returns:
        (..., out_features).

    """
    flat = x.reshape(-1, x.shape[-1])
    count = flat.shape[0]
    padded = torch.nn.functional.pad(flat, (0, 0, 0, -count % rows))
    tiles = [kernel(tile.contiguous(), None, bias) for tile in padded.split(rows)]
    return torch.cat(tiles)[:count].reshape(*x.shape[:-1], -1).contiguous()


@torch.library.custom_op("vllm_invariant::cpu_linear", mutates_args=())
def cpu_linear(x: torch.Tensor, bias: torch.Tensor | None, kernel: int, out_features: int) -> torch.Tensor:
    """`run_tiled` as one opaque operator, so that torch.compile neither unrolls nor refuses it."""
    return run_tiled(_kernels[kernel], x, bias)


@cpu_linear.register_fake
def _(x: torch.Tensor, bias: torch.Tensor | None, kernel: int, out_features: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


def tile_dispatch(stock: Any) -> Any:
    """Wrap stock's choice of a CPU kernel for a layer, to call what it chose in row tiles."""

    @functools.wraps(stock)
    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        shape = tuple(layer.weight.shape)
        stock(layer, remove_weight)
        if len(shape) != 2 or not hasattr(layer, "cpu_linear"):
            return  # a convolution's or an expert's weight: no linear layer
        weight = None if remove_weight and layer.weight.numel() == 0 else layer.weight
        chosen = layer.cpu_linear
        _kernels.append(lambda x, _, bias: chosen(x, weight, bias))
        index, out_features = len(_kernels) - 1, shape[0]
        layer.cpu_linear = lambda x, _, bias: torch.ops.vllm_invariant.cpu_linear(
            x, bias, index, out_features
        )

    return dispatch_cpu_unquantized_gemm
