# In a vLLM branch: vllm/model_executor/layers/fused_moe/fused_moe.py, get_default_config.
"""Launch parameters of the Triton experts under batch invariance, from a written table.

Under the flag stock launches every expert product in one way, which costs a decode step several times
its normal launch.  A launch may follow the number of tokens after all, if every launch of the row
rounds in the same order: each element is one chain of matrix instructions over ascending depth, so
that tile sizes, warps and stages do not matter as long as the instruction stays the same.
``benchmarks/tune_moe.py`` classes launches by their bits; a row holds launches of one class, and
``tests/kernels/test_moe_launch.py`` runs each row against itself.
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
        experts: number of experts.
        width: of one expert.
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


TABLE: dict[Key, tuple[Launch, ...]] = {}


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
