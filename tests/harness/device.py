"""All that differs between the CPU engine and a GPU.  Nothing else in the engine tests asks."""

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

NAME = "cuda" if torch.cuda.is_available() else "cpu"

# Must be set before vLLM is imported, in this process and in every process the tests start.
ENVIRONMENT = {
    "VLLM_BATCH_INVARIANT": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # A test process may have asked for its GPUs, after which a forked worker cannot use them.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # Else vLLM wants a memory node of its own for each rank on a CPU.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

# Cache memory of one engine: about 170,000 tokens of the tiny model.
OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 512 << 20}
if NAME == "cuda":
    OPTIONS["gpu_memory_utilization"] = 0.1  # only what must be free at start: several suites share a GPU

# Of an engine without the package.  On a GPU stock would use FlashInfer, which need not be installed.
STOCK_OPTIONS: dict[str, Any] = {}
if NAME == "cuda":
    STOCK_OPTIONS["additional_config"] = {"gdn_prefill_backend": "triton"}

# What vLLM makes of an engine that is not eager.
COMPILED = {"cpu": "DYNAMO_TRACE_ONCE", "cuda": "VLLM_COMPILE"}[NAME]

# Attention implementation of an engine under the flag, and of a stock one.
ATTENTION = {
    "cpu": ("vllm_invariant.cpu_attention.TiledCPUAttentionImpl", "CPUAttentionBackendImpl"),
    "cuda": ("FlashAttentionImpl", "FlashAttentionImpl"),
}[NAME]


def activate() -> None:
    """Set the environment and install the plugin in this process (idempotent)."""
    os.environ.update(ENVIRONMENT)
    from vllm_invariant.plugin import register

    register()


# Stock's CPU chunk kernel rounds a bfloat16 state after every 64 tokens, cut there or not.
ROUNDS_A_NARROW_STATE_AT_CUTS = NAME == "cuda"


# Values of async_scheduling.  vLLM's CPU platform turns it off whatever is asked.
ASYNC_SCHEDULING = [
    pytest.param(False, id="sync"),
    pytest.param(
        True,
        id="async",
        marks=pytest.mark.skipif(NAME == "cpu", reason="the CPU engine has no async scheduling"),
    ),
]


# --- rules that only this device needs, and how to turn each off ------------------------------------


def _stock_cpu_attention(patch: pytest.MonkeyPatch) -> None:
    """Stock's kernel tiles the whole step at once."""
    from vllm_invariant.cpu_attention import TiledCPUAttentionImpl

    patch.delattr(TiledCPUAttentionImpl, "forward")


def _whole_step_linears(patch: pytest.MonkeyPatch) -> None:
    """Linear kernels see all rows of the step at once."""
    from vllm_invariant import cpu_linear

    patch.setattr(cpu_linear, "run_tiled", lambda kernel, x, bias: kernel(x, None, bias))


# Each is guarded by the batch axis: with it off, requests that share a step differ from SOLO.
BATCH_RULES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "cpu": {"attention tiles": _stock_cpu_attention, "linear tiles": _whole_step_linears},
    "cuda": {},
}[NAME]


def _whole_shares(patch: pytest.MonkeyPatch) -> None:
    """Each expert gets all of its tokens at once."""
    from vllm_invariant import cpu_moe

    patch.setattr(cpu_moe, "tiles_of", functools.partial(cpu_moe.tiles_of, rows=1 << 30))
    patch.setattr(cpu_moe, "run_tile", cpu_moe.expert)


def _narrow_router_weights(patch: pytest.MonkeyPatch) -> None:
    """Router weights in six bits above 32 tokens: a rounding that follows the company.

    The experts' launches have no rule to turn off: all that were tried give the same bits.
    """
    from vllm.model_executor.layers.fused_moe.router.fused_moe_router import FusedMoERouter

    stock = FusedMoERouter.select_experts

    def select_experts(self: Any, *args: Any, **kwargs: Any) -> Any:
        weights, ids = stock(self, *args, **kwargs)
        return ((64 * weights).round() / 64 if len(weights) > 32 else weights), ids

    patch.setattr(FusedMoERouter, "select_experts", select_experts)


# What keeps an expert's bits apart from the step's number of tokens, turned off or broken.
MOE_RULES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {"router weights": _narrow_router_weights}
if NAME == "cpu":
    MOE_RULES["tiles of experts"] = _whole_shares


# --- the axis form ---------------------------------------------------------------------------------

# Attention backends of the device with which decode and prefill agree in bits.
ATTENTION_BACKENDS = {"cpu": ("CPU_ATTN",), "cuda": ("FLASH_ATTN", "TRITON_ATTN")}[NAME]


def _stock_prefill(patch: pytest.MonkeyPatch) -> None:
    """Steps with a prompt go to stock's kernels."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    from vllm_invariant import cpu_recurrent

    stock, ours = gdn_attention._cpu_gdn_attention_nonspec.__wrapped__, cpu_recurrent.run
    patch.setattr(
        cpu_recurrent, "run", lambda layer, m, *rest: (stock if m.num_prefills else ours)(layer, m, *rest)
    )


def _another_order_for_prefill(patch: pytest.MonkeyPatch) -> None:
    """A sequence of more than one token has its sums taken in PyTorch's order."""
    from vllm_invariant import cuda_recurrent
    from vllm_invariant.ops import recurrent_torch

    ours = cuda_recurrent.recurrence()

    def step(qkv: Any, a: Any, b: Any, a_log: Any, dt_bias: Any, state: Any, out: Any, **rest: Any) -> None:
        if rest["max_query_len"] == 1:
            ours(qkv, a, b, a_log, dt_bias, state, out, **rest)
            return
        heads, value_dim, key_dim = state.shape[1:]
        q, k, v = qkv.split([(qkv.shape[1] - heads * value_dim) // 2] * 2 + [heads * value_dim], dim=1)
        out.copy_(
            recurrent_torch.recurrent_gated_delta_rule(
                q.reshape(len(q), -1, key_dim),
                k.reshape(len(k), -1, key_dim),
                v.reshape(len(v), -1, value_dim),
                *(a, b, a_log, dt_bias, state.transpose(2, 3)),
                *(rest[name].tolist() for name in ("cu_seqlens", "slots", "has_initial_state")),
            )
        )

    patch.setattr(cuda_recurrent, "recurrence", lambda: step)


FORM_RULES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "cpu": {"linear tiles": _whole_step_linears, "one recurrence": _stock_prefill},
    "cuda": {"one recurrence": _another_order_for_prefill},
}[NAME]
