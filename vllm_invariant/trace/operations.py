# In a vLLM branch: not needed (a tool for users).
"""Operations inside a GDN layer that are functions and not modules, so that no hook sees them.

The layer calls a short list of functions: convolution, gate, recurrence.  In a trace process, and
only there, each is wrapped to show its result.  A function that is gone is named in the report; its
operation then shows up only in what follows it.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_CPU_GDN = "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention"
_OPS = "vllm._custom_ops"
_LAYER = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"


@dataclass(frozen=True)
class Operation:
    """One function.

    Attributes:
        module, symbol: where the layer looks it up.
        name: of the operation, the same for all functions that do it: ``recurrence``, ...
        axis: of its results that counts tokens.
        cached: it computes cached rows, which stand in front of a step; else prefills, at its end.
        results: names of the tensors it returns, as many as are watched.
        out: the argument it writes to, if it returns nothing.

    """

    module: str
    symbol: str
    name: str
    axis: int
    cached: bool
    results: tuple[str, ...] = ("output",)
    out: str | None = None


_GATE = ("q", "k", "v", "gate", "beta")

OPERATIONS = {
    "cpu": (
        Operation(_CPU_GDN, "_causal_conv1d_update_cpu", "conv1d", 0, True),
        Operation(_CPU_GDN, "_causal_conv1d_fwd_cpu", "conv1d", 1, False),
        Operation(_CPU_GDN, "causal_conv1d_update_cpu", "conv1d", 0, True),
        Operation(_CPU_GDN, "causal_conv1d_torch", "conv1d", 1, False),
        Operation(_OPS, "fused_gdn_gating_cpu", "gate", 1, False, ("gate", "beta")),
        Operation(_OPS, "fused_sigmoid_gating_delta_rule_update_cpu", "recurrence", 0, True),
        Operation(_OPS, "chunk_gated_delta_rule_cpu", "recurrence", 1, False),
    ),
    "cuda": (
        Operation(_LAYER, "causal_conv1d_update", "conv1d", 0, True),
        Operation(_LAYER, "causal_conv1d_fn", "conv1d", 1, False),
        Operation(_LAYER, "fused_post_conv_prep", "gate", 0, False, _GATE),
        Operation(_LAYER, "fused_sigmoid_gating_delta_rule_update", "recurrence", 1, True),
        Operation(_LAYER, "fused_recurrent_gated_delta_rule_packed_decode", "recurrence", 0, True, out="out"),
        Operation(_LAYER, "fla_chunk_gated_delta_rule", "recurrence", 1, False),
        Operation(_LAYER, "fi_chunk_gated_delta_rule", "recurrence", 1, False),
    ),
}

Show = Callable[[Operation, str, torch.Tensor, str], None]


def watch(device: str, show: Show, before: Callable[[], None]) -> tuple[str, ...]:
    """Wrap the functions of this device.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        show: called with the operation, the tensor's name, the tensor with tokens first, and the
            function's name, after each call.
        before: called before each call.

    Returns:
        What could not be watched, one sentence each.

    """
    gone = []
    for op in OPERATIONS[device]:
        module = importlib.import_module(op.module)
        if hasattr(module, op.symbol):
            setattr(module, op.symbol, _wrap(op, show, before, getattr(module, op.symbol)))
        else:
            gone.append(f"{op.name}: {op.module}.{op.symbol} is gone")
    return tuple(gone)


_inside: list[list[str]] = []  # of each watched call that runs now, the watched calls it made


def _wrap(op: Operation, show: Show, before: Callable[[], None], stock: Any) -> Any:
    @functools.wraps(stock)
    def operation(*args: Any, **kwargs: Any) -> Any:
        if _inside:  # part of another one, which is the one that is shown
            _inside[-1].append(stock.__name__)
            return stock(*args, **kwargs)
        before()
        _inside.append([])
        try:
            result = stock(*args, **kwargs)
        finally:
            ran = " > ".join((stock.__name__, *_inside.pop()))
        written = kwargs[op.out] if op.out is not None else result
        tensors = written if isinstance(written, tuple) else (written,)
        for name, tensor in zip(op.results, tensors, strict=False):
            if isinstance(tensor, torch.Tensor):
                show(op, name, tensor.transpose(0, op.axis), ran)
        return result

    return operation
