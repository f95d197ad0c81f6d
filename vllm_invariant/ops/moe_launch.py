# In a vLLM branch: vllm/model_executor/layers/fused_moe/fused_moe.py, get_default_config.
"""Launch parameters of the Triton experts under batch invariance, from a written table.

Under the flag stock launches every expert product in one way, and with it the experts take 1.2 to 1.9
times as long as without the flag.  But a launch may follow the number of tokens, if every launch of the
row gives the same bits: the kernel adds up each element along ascending depth, in steps of the matrix
instruction, and tiles, warps and stages change who does it but not the order.
``benchmarks/tune_moe.py`` classes launches by their bits; a row of the table holds launches of one class,
and ``tests/kernels/test_moe_launch.py`` runs each row's launches against each other.

A row is for one rank's share.  Two ranks of the 35B-A3B shape have experts half as wide, or half as many with
expert parallelism, and no row yet: then stock's launch is taken, which under the flag is one for every
number of tokens and so is invariant by itself.
"""

import functools
import logging
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("vllm.vllm_invariant")


@dataclass(frozen=True)
class Key:
    """What a row of the table depends on.

    Attributes:
        capability: compute capability (major, minor).
        experts: number of experts on one rank.
        width: of one rank's share of an expert.
        hidden: of the model.

    """

    capability: tuple[int, int]
    experts: int
    width: int
    hidden: int


@dataclass(frozen=True)
class Launch:
    """One launch of the experts' kernel.

    Attributes:
        tokens: it is used up to this number of tokens in a step; None is without end.
        tile: rows, columns and depth of a tile.
        warps: warps per program.
        stages: software-pipelining depth.
        group: tile rows that share weights.

    """

    tokens: int | None
    tile: tuple[int, int, int]
    warps: int
    stages: int
    group: int = 1

    def config(self) -> dict[str, int]:
        """As vLLM's kernel takes it."""
        m, n, k = self.tile
        return {
            "BLOCK_SIZE_M": m,
            "BLOCK_SIZE_N": n,
            "BLOCK_SIZE_K": k,
            "GROUP_SIZE_M": self.group,
            "SPLIT_K": 1,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


# NVIDIA H200, torch 2.11.0+cu130, triton 3.6.0.
TABLE: dict[Key, tuple[Launch, ...]] = {
    Key((9, 0), experts=256, width=512, hidden=2048): (
        Launch(4, (16, 32, 128), warps=4, stages=4),
        Launch(16, (16, 128, 64), warps=4, stages=4),
        Launch(512, (16, 128, 128), warps=8, stages=3),
        Launch(None, (64, 128, 64), warps=4, stages=3),
    ),
    Key((9, 0), experts=512, width=512, hidden=2048): (
        Launch(4, (16, 32, 128), warps=4, stages=4),
        Launch(16, (16, 64, 64), warps=4, stages=4),
        Launch(512, (16, 128, 128), warps=8, stages=3),
        Launch(None, (64, 128, 64), warps=4, stages=3),
    ),
}


def choose(row: tuple[Launch, ...], tokens: int) -> Launch:
    """The launch for a step of ``tokens`` tokens: the first whose range holds them."""
    return next(launch for launch in row if launch.tokens is None or tokens <= launch.tokens)


def by_shape(stock: Any) -> Any:
    """Wrap stock's default launch of the experts: from the table, where it has a row."""

    @functools.wraps(stock)
    def get_default_config(
        M: int, E: int, N: int, K: int, topk: int, dtype: str | None, block_shape: list[int] | None = None
    ) -> dict[str, int]:
        row = TABLE.get(Key(capability(), E, N, K)) if dtype is None and block_shape is None else None
        if row is None:
            return stock(M, E, N, K, topk, dtype, block_shape)
        return choose(row, M).config()

    return get_default_config


@functools.cache
def capability() -> tuple[int, int]:
    """Compute capability of this process's GPU."""
    from vllm.platforms import current_platform

    found = current_platform.get_device_capability()
    return (found.major, found.minor)
