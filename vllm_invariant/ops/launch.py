# In a vLLM branch: vllm/third_party/flash_linear_attention/ops/launch_table.py.
"""Launch parameters of the chunk kernels, from a written table.

FLA's chunk kernels choose tile sizes, warps and stages by timing candidates at first use.  The
choice decides the order in which a kernel rounds, and a timing differs from boot to boot and from
rank to rank.  So under batch invariance each of them has exactly one candidate.

The figures in the table were picked by ``benchmarks/tune_launch.py`` on the named GPU: the candidate
with the smallest geometric mean of slowdowns over its shapes.  Any row gives invariant bits; two
rows give different ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Launch:
    """One candidate of a Triton autotuner.

    Attributes:
        warps: warps per program.
        stages: software-pipelining depth; None leaves Triton's default.
        tiles: compile-time tile sizes, by the kernel's own names.

    """

    warps: int
    stages: int | None = None
    tiles: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Key:
    """What a row of the table depends on.

    Attributes:
        capability: compute capability (major, minor).
        dtype: of q, k and v: ``"bfloat16"``.
        head_k_dim, head_v_dim: head sizes.

    """

    capability: tuple[int, int]
    dtype: str
    head_k_dim: int
    head_v_dim: int

    def __str__(self) -> str:
        major, minor = self.capability
        return f"SM{major}{minor} {self.dtype} {self.head_k_dim}x{self.head_v_dim}"


# (module under the FLA package, kernel name) of every autotuned kernel on the path, in call order.
KERNELS = {
    "cumsum": ("cumsum", "chunk_local_cumsum_scalar_kernel"),
    "kkt": ("chunk_scaled_dot_kkt", "chunk_scaled_dot_kkt_fwd_kernel"),
    "inverse": ("solve_tril", "merge_16x16_to_64x64_inverse_kernel"),
    "w_u": ("wy_fast", "recompute_w_u_fwd_kernel"),
    "state": ("chunk_delta_h", "chunk_gated_delta_rule_fwd_kernel_h_blockdim64"),
    "output": ("chunk_o", "chunk_fwd_kernel_o"),
}

TABLE: dict[Key, dict[str, Launch]] = {
    # NVIDIA H200, torch 2.11.0+cu130, triton 3.6.0.
    Key((9, 0), "bfloat16", 128, 128): {
        "cumsum": Launch(warps=1),
        "kkt": Launch(warps=2, stages=3, tiles={"BK": 64}),
        "inverse": Launch(warps=2, stages=5),
        "w_u": Launch(warps=4, stages=3),
        "state": Launch(warps=4, stages=3, tiles={"BV": 32}),
        "output": Launch(warps=4, stages=4, tiles={"BK": 128, "BV": 128}),
    },
}


def lookup(key: Key) -> dict[str, Launch]:
    """The row for ``key``.

    Raises:
        ValueError: if there is none, with how to add one.

    """
    if key not in TABLE:
        known = ", ".join(map(str, TABLE))
        raise ValueError(
            f"no pinned launch parameters for the GDN chunk kernels on {key} (known: {known}). "
            "Run benchmarks/tune_launch.py on that GPU and add the row it prints to "
            "vllm_invariant/ops/launch.py."
        )
    return TABLE[key]


def autotuner(kernel: Any) -> Any:
    """The autotuner inside a decorated Triton kernel.

    Raises:
        ValueError: if the kernel is not autotuned.

    """
    while kernel is not None and not hasattr(kernel, "configs"):
        kernel = getattr(kernel, "fn", None)
    if kernel is None:
        raise ValueError("the kernel is not autotuned any more")
    return kernel


def pin(kernel: Any, launch: Launch) -> None:
    """Leave a decorated Triton kernel's autotuner one candidate: ``launch``.

    Args:
        kernel: what upstream's module holds: a kernel under ``triton.autotune`` and perhaps
            ``triton.heuristics``.

    """
    import triton

    tuner = autotuner(kernel)
    stages = {} if launch.stages is None else {"num_stages": launch.stages}
    tuner.configs = [triton.Config(dict(launch.tiles), num_warps=launch.warps, **stages)]
    tuner.cache.clear()
