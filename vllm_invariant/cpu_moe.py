# In a vLLM branch: vllm/model_executor/layers/fused_moe/experts/cpu_moe.py.
"""Experts of the CPU engine, in row tiles of one fixed shape.

Stock's grouped kernels hand an expert all of its tokens at once, and how many those are follows the
company.  None of them claims batch invariance, so stock finds no backend for an unquantized mixture
of experts under the flag.  Here every matrix product has exactly `ROWS` rows, the last ones padded
with zeros, and a token's experts are added up in the order in which its router named them.
"""

import functools
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

ROWS = 32


def expert(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """One expert's SwiGLU.

    Args:
        x: (rows, hidden).
        gate_up: (2 * width, hidden), the gate's rows first.
        down: (hidden, width).

    Returns:
        (rows, hidden).

    """
    gate, up = torch.nn.functional.linear(x, gate_up).chunk(2, dim=-1)
    return torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, down)


def run_tile(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """`expert` on at most `ROWS` rows, computed as exactly `ROWS`."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, ROWS - len(x)))
    return expert(padded, gate_up, down)[: len(x)]


def tiles_of(experts: torch.Tensor, rows: int = ROWS) -> list[tuple[int, torch.Tensor]]:
    """Split (token, place) pairs by expert, at most ``rows`` to a tile.

    Args:
        experts: (pairs,) integer, the expert of each pair; below zero if it is on another rank.

    Returns:
        (expert, indices of its pairs) of each tile; experts without a token have none.

    """
    order = experts.argsort(stable=True)[int(experts.lt(0).sum()) :]
    counts = experts[order].bincount().tolist()
    shares = enumerate(order.split(counts))
    return [(e, tile) for e, share in shares if len(share) for tile in share.split(rows)]


def run_experts(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Every token through its experts.

    Args:
        x: (tokens, hidden).
        w13: (experts, 2 * width, hidden).
        w2: (experts, hidden, width).
        weights: (tokens, top k) float32.
        ids: (tokens, top k) integer, each token's experts by their place in ``w13``; below zero if an expert
            is on another rank, which then adds its part.

    Returns:
        (tokens, hidden), of ``x``'s dtype.

    """
    tokens, top_k = ids.shape
    out = x.new_zeros(tokens * top_k, x.shape[-1])
    for e, pairs in tiles_of(ids.flatten().long()):
        out[pairs] = run_tile(x[pairs // top_k], w13[e], w2[e])
    # One product and one sum at a time: a fused or a vectorised reduction may round in another order.
    parts = out.view(tokens, top_k, -1).float().unbind(1)
    total = parts[0] * weights[:, :1]
    for place in range(1, top_k):
        total += parts[place] * weights[:, place : place + 1]
    return total.to(x.dtype)


@torch.library.custom_op("vllm_invariant::cpu_experts", mutates_args=())
def cpu_experts(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """`run_experts` as one opaque operator: its loop follows the data, which torch.compile refuses."""
    return run_experts(x, w13, w2, weights, ids)


@cpu_experts.register_fake
def _(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    return torch.empty_like(x)


class TiledCPUExperts(CPUUnquantizedExperts):
    """Unquantized experts, one call per tile of one expert's tokens."""

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation == MoEActivation.SILU

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return not moe_parallel_config.use_all2all_kernels

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Weights stay as they were loaded."""

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *args: Any,
        expert_map: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """Write (tokens, hidden) to ``output``; see `run_experts` for the other shapes.

        ``expert_map``, (experts of all ranks,), has an expert's place on this rank, or -1.
        """
        ids = topk_ids if expert_map is None else expert_map[topk_ids.long()]
        output.copy_(torch.ops.vllm_invariant.cpu_experts(hidden_states, w1, w2, topk_weights.float(), ids))


def offer(stock: Any) -> Any:
    """Wrap stock's list of expert kernels: on the CPU ours is asked first."""

    @functools.wraps(stock)
    def backend_to_kernel_cls(backend: UnquantizedMoeBackend) -> list[Any]:
        found = stock(backend)
        return [TiledCPUExperts, *found] if backend == UnquantizedMoeBackend.CPU else found

    return backend_to_kernel_cls
