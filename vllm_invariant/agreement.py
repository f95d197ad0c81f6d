# In a vLLM branch: vllm/distributed/agreement.py.
"""Before the first request, the ranks of a tensor-parallel group agree on all that decides bits.

Each rank adds its share to the same sums.  A rank of another version, on another GPU or with another launch
table would still give a fixed answer, but not the one that a boot on other machines gives.
"""

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

import vllm_invariant
from vllm_invariant import preflight
from vllm_invariant.arithmetic import Arithmetic
from vllm_invariant.ops import launch, linear_launch, moe_launch, recurrent_cuda

# Read by vLLM or by a library under it, in each process by itself.
VARIABLES = (
    "VLLM_BATCH_INVARIANT",
    "VLLM_CUSTOM_ALLREDUCE_ALGO",
    "VLLM_ALLREDUCE_USE_SYMM_MEM",
    "VLLM_PLUGINS",
    "VLLM_USE_V2_MODEL_RUNNER",
    "VLLM_USE_BREAKABLE_CUDAGRAPH",
    "VLLM_SSM_CONV_STATE_LAYOUT",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
)


def facts(arithmetic: Arithmetic) -> dict[str, str]:
    """What this process computes with, by name.

    Args:
        arithmetic: of the model's GDN layers.

    """
    import vllm
    from vllm.platforms import current_platform

    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "triton": getattr(sys.modules.get("triton"), "__version__", "none"),
        "vllm_invariant": vllm_invariant.__version__,
        "device": f"{current_platform.get_device_name()}, {current_platform.get_device_capability()}",
        "gdn_arithmetic": arithmetic.name,
        "compiled recurrence": _recurrence(arithmetic),
        "launch table": _digest(repr(launch.TABLE).encode()),
        "launch table of the experts": _digest(repr(moe_launch.TABLE).encode()),
        "launch table of linear layers": _digest(repr(linear_launch.TABLE).encode()),
        **{f"environment variable {name}": os.environ.get(name, "unset") for name in VARIABLES},
    }


def _recurrence(arithmetic: Arithmetic) -> str:
    if not arithmetic.decode_equals_prefill or not recurrent_cuda.is_available():
        return "not used"
    return _digest(recurrent_cuda.LIBRARY.read_bytes())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def difference(ranks: Sequence[Mapping[str, str]]) -> str | None:
    """The first fact that is not the same on all ranks, in words, or None.

    Args:
        ranks: the facts of each rank, in rank order.

    """
    for name in dict.fromkeys(name for each in ranks for name in each):
        values: dict[str, list[int]] = {}
        for rank, each in enumerate(ranks):
            values.setdefault(each.get(name, "unknown"), []).append(rank)
        if len(values) > 1:
            return f"{name}: " + ", ".join(
                f"{value} on rank {' and '.join(map(str, where))}" for value, where in values.items()
            )
    return None


def check(mine: Mapping[str, str], group: Any) -> None:
    """Compare the facts of this rank with those of every other.  All ranks call it, in the same order.

    Args:
        mine: of this rank; see `facts`.
        group: a process group of the CPU.

    Raises:
        ValueError: on every rank, if one differs: which fact, and its values by rank.

    """
    ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, dict(mine), group=group)
    if (found := difference(ranks)) is not None:
        raise ValueError(
            preflight.refuse(
                f"a tensor-parallel group with {found}",
                "the same on every rank",
                "computes with two things that may round differently",
            )
        )
