# In a vLLM branch: vllm/model_executor/determinism/batch_invariant_configs.py.
"""Router and shared expert under batch invariance, on a GPU: small products with pinned launches.

On Hopper stock keeps cuBLASLt from splitting the depth of a product, which makes it invariant.  A product
with few columns then runs on a few of the GPU's processors, and a decode step of a few tokens waits for
the router and the shared expert.  Stock's own persistent kernel takes small tiles as well; its launch
may follow the number of tokens as the experts' may (see `ops.moe_launch`).
"""

import functools
from typing import Any

import torch
from vllm.model_executor.determinism.batch_invariant import matmul_kernel_persistent
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.utils.platform_utils import num_compute_units

from vllm_invariant.ops.moe_launch import LINEARS, Launch, capability, choose


def matmul(x: torch.Tensor, weight: torch.Tensor, launch: Launch) -> torch.Tensor:
    """``x @ weight.T``.

    Args:
        x: (rows, depth) bfloat16.
        weight: (columns, depth) bfloat16.
        launch: its tiles, warps and stages.

    Returns:
        (rows, columns) bfloat16.

    """
    (rows, depth), columns = x.shape, weight.shape[0]
    out = x.new_empty(rows, columns)
    tile_rows, tile_columns, tile_depth = launch.tile
    tiles = -(-rows // tile_rows) * -(-columns // tile_columns)
    matmul_kernel_persistent[(min(num_compute_units(x.device.index), tiles),)](
        *(x, weight, out, None),
        *(rows, columns, depth),
        *(x.stride(0), x.stride(1), weight.stride(1), weight.stride(0), out.stride(0), out.stride(1), 1),
        BLOCK_SIZE_M=tile_rows,
        BLOCK_SIZE_N=tile_columns,
        BLOCK_SIZE_K=tile_depth,
        GROUP_SIZE_M=launch.group,
        NUM_SMS=num_compute_units(x.device.index),
        A_LARGE=False,
        B_LARGE=False,
        C_LARGE=False,
        HAS_BIAS=False,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    return out


class PinnedLinearMethod(UnquantizedLinearMethod):
    """A linear layer whose launches come from a row of `LINEARS`."""

    def __init__(self, row: tuple[Launch, ...]) -> None:
        super().__init__()
        self.row = row

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        """(..., depth) to (..., columns); ``bias`` is None."""
        rows = x.reshape(-1, x.shape[-1])
        out = matmul(rows, layer.weight, choose(self.row, len(rows)))
        return out.view(*x.shape[:-1], out.shape[-1])


def pin(layer: Any) -> None:
    """Pin one linear layer, if the table has its shape."""
    row = LINEARS.get((capability(), layer.output_size, layer.input_size))
    if row is not None and type(layer.quant_method) is UnquantizedLinearMethod and layer.bias is None:
        layer.quant_method = PinnedLinearMethod(row)


def pin_small_products(stock: Any) -> Any:
    """Wrap the sparse block's ``__init__``."""

    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        pin(self.gate)
        pin(self.shared_expert_gate)
        if self.shared_expert is not None:
            pin(self.shared_expert.gate_up_proj)
            pin(self.shared_expert.down_proj)

    return __init__
