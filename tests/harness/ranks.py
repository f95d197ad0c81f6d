"""What one rank's worker is made of.  These functions run in that rank's process; see `Engine.on_ranks`."""

import functools
import sys
from typing import Any

import pytest

from tests.harness import device


def modes(worker: Any) -> dict[str, Any]:
    """Classes and modes, the same on every rank."""
    from vllm.model_executor.layers.linear import linear_batch_invariant

    layer, attention = _module(worker, "0.linear_attn"), _module(worker, "3.self_attn.attn")
    compilation = worker.model_runner.vllm_config.compilation_config
    return {
        "layer": name_of(type(layer)),
        "gdn backend": layer.mamba_type.name,
        "attention": name_of(type(attention.impl)),
        "linears by rows": getattr(linear_batch_invariant, "vllm_invariant", False),
        "runner": type(worker.model_runner).__module__,
        "mode": compilation.mode.name,
        "graphs": compilation.cudagraph_mode.name,
        "plugin modules": sorted(name for name in sys.modules if name.startswith("vllm_invariant.")),
    }


def share(worker: Any) -> dict[str, Any]:
    """This rank's share of the model, and who adds the shares up.

    Sizes are of the weights: GDN value heads, (query rows, hidden) of attention, (experts, width) of the
    experts.
    """
    from vllm.distributed.parallel_state import get_tp_group

    group, experts = get_tp_group(), getattr(_module(worker, "0.mlp"), "experts", None)
    weights = None if experts is None else dict(experts.named_parameters())
    w2 = None if weights is None else next(w for name, w in weights.items() if name.endswith("w2_weight"))
    custom = getattr(group.device_communicator, "ca_comm", None)
    return {
        "rank": group.rank_in_group,
        "ranks": group.world_size,
        "value heads": _module(worker, "0.linear_attn").A_log.shape[0],
        "query heads": _module(worker, "3.self_attn").num_heads,
        "experts": None if w2 is None else (w2.shape[0], w2.shape[2]),
        "all-reduce": "custom" if custom is not None and not custom.disabled else "the device's own",
    }


# --- rules turned off in the workers of a running engine --------------------------------------------

_patch = pytest.MonkeyPatch()  # of this process


def _round_long_sums_once_more(patch: pytest.MonkeyPatch) -> None:
    """The sum over the ranks follows the message's length, as where an algorithm is chosen by size."""
    from vllm.distributed.device_communicators import cpu_communicator, cuda_communicator

    def rounding(stock: Any) -> Any:
        @functools.wraps(stock)
        def all_reduce(self: Any, message: Any) -> Any:
            total = stock(self, message)
            return total if len(total) <= 32 else (256 * total).round() / 256

        return all_reduce

    for cls in (cpu_communicator.CpuCommunicator, cuda_communicator.CudaCommunicator):
        patch.setattr(cls, "all_reduce", rounding(cls.all_reduce))


SUM = "one all-reduce"
RULES = {SUM: _round_long_sums_once_more, **device.BATCH_RULES, **device.MOE_RULES}


def turn_off(rule: str, worker: Any) -> None:
    """Until `restore`."""
    RULES[rule](_patch)


def restore(worker: Any) -> None:
    """All rules on again."""
    _patch.undo()


def _module(worker: Any, name: str) -> Any:
    return worker.model_runner.get_model().get_submodule(f"model.layers.{name}")


def name_of(cls: type) -> str:
    """Where a class is defined."""
    return f"{cls.__module__}.{cls.__qualname__}"
