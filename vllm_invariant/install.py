# In a vLLM branch: nothing; these are the edits the branch would make in place.
"""Puts the package's classes into the seams.  Both steps may run any number of times."""

import functools
import logging
from typing import Any

from vllm_invariant import preflight, seams
from vllm_invariant.gate import Verdict

logger = logging.getLogger("vllm.vllm_invariant")

_BACKEND = "vllm_invariant.backend.QwenGDNAttentionBackend"
_BACKEND_NAME = "QWEN_GDN_ATTN"
_CPU_ATTENTION = "vllm_invariant.cpu_attention.TiledCPUAttentionBackend"


def in_engine(verdict: Verdict) -> None:
    """Everything that does not need stock's kernels: in every vLLM process.

    Args:
        verdict: what `gate.judge` said of this process's platform.

    """
    from vllm.config.scheduler import SchedulerConfig
    from vllm.model_executor.determinism import batch_invariant
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import (
        AttentionBackendEnum,
        MambaAttentionBackendEnum,
        register_backend,
    )
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.metrics import loggers

    from vllm_invariant.metrics import add_stat_logger
    from vllm_invariant.requests import check_inputs

    if _BACKEND_NAME not in MambaAttentionBackendEnum.__members__:
        MambaAttentionBackendEnum.register(_BACKEND_NAME, _BACKEND)
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, _CPU_ATTENTION)
    seams.replace(SchedulerConfig, "get_scheduler_cls", _scheduler_cls)
    seams.replace(batch_invariant, "init_batch_invariance", _init_batch_invariance)
    _wrap_model_configs(verdict)
    seams.replace_in(
        loggers, "load_stat_logger_plugin_factories", add_stat_logger, "vllm.v1.engine.async_llm"
    )
    seams.replace(InputProcessor, "process_inputs", check_inputs)
    logger.info("vllm-invariant is in place (%s).", verdict.reason)


def _scheduler_cls(stock: Any) -> Any:
    @functools.wraps(stock)
    def get_scheduler_cls(self: Any) -> Any:
        chosen = stock(self)
        if self.scheduler_cls is not None:
            return chosen  # the user's own; preflight refuses it for a GDN model

        from vllm_invariant.scheduler import grid_scheduler_class

        return grid_scheduler_class(chosen)

    return get_scheduler_cls


def _init_batch_invariance(stock: Any) -> Any:
    @functools.wraps(stock)
    def init_batch_invariance() -> None:
        from vllm.platforms import current_platform

        # Stock installs Triton overrides for the GPU even where there is none, and dies in them.
        if not current_platform.is_cpu():
            stock()
        in_worker()

    return init_batch_invariance


def in_worker() -> None:
    """What needs stock's kernels: in each worker, before the model is built."""
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.platforms import current_platform

    from vllm_invariant.layer import InvariantQwenGatedDeltaNetAttention, QwenGatedDeltaNetAttention

    if QwenGatedDeltaNetAttention.__name__ not in op_registry_oot:
        QwenGatedDeltaNetAttention.register_oot(InvariantQwenGatedDeltaNetAttention)
    _on_every_worker()
    if current_platform.is_cuda():
        from vllm_invariant import cuda

        cuda.pin_norm()
        cuda.keep_chunk_states()
        cuda.keep_remainders_out_of_decode_graphs()
        cuda.launch_experts_by_shape()
        cuda.tile_linears_by_rows()
    if current_platform.is_cpu():
        _on_cpu_workers()


def _on_every_worker() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1 import ssm_conv_transfer_utils
    from vllm.v1.worker import utils
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from vllm_invariant.block_copy import copy_whole_pages
    from vllm_invariant.kv_transfer import split_as_gdn
    from vllm_invariant.sampling import hold_generators

    seams.replace(GPUModelRunner, "sample_tokens", hold_generators)
    seams.replace_in(
        utils,
        "copy_kv_cache_blocks_inplace",
        copy_whole_pages,
        "vllm.v1.worker.gpu_model_runner",
        "vllm.v1.worker.gpu.model_runner",
    )
    connectors = "vllm.distributed.kv_transfer.kv_connector.v1"
    seams.replace_in(
        ssm_conv_transfer_utils,
        "derive_mamba_conv_split",
        split_as_gdn,
        f"{connectors}.nixl.base_worker",
        f"{connectors}.moriio.moriio_connector",
    )


def _on_cpu_workers() -> None:
    from vllm.model_executor.layers import utils as layer_utils
    from vllm.model_executor.layers.fused_moe.oracle import unquantized
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    from vllm_invariant import cpu_math
    from vllm_invariant.cpu_conv import accept_one_token
    from vllm_invariant.cpu_linear import tile_dispatch
    from vllm_invariant.cpu_moe import offer
    from vllm_invariant.cpu_recurrent import one_recurrence

    cpu_math.settle()  # before the model is built, whose rotary table is its first use of them
    seams.replace(gdn_attention, "_causal_conv1d_fwd_cpu", accept_one_token)
    seams.replace(gdn_attention, "_cpu_gdn_attention_nonspec", one_recurrence)
    seams.replace(layer_utils, "dispatch_cpu_unquantized_gemm", tile_dispatch)
    seams.replace(unquantized, "backend_to_kernel_cls", offer)


def _wrap_model_configs(verdict: Verdict) -> None:
    """Run defaults and preflight when the engine config of a shown model class is made."""
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    for architecture in preflight.ARCHITECTURES:
        stock = MODELS_CONFIG_MAP.get(architecture, VerifyAndUpdateConfig)
        if getattr(stock, "vllm_invariant", False):
            continue
        MODELS_CONFIG_MAP[architecture] = _model_config(stock, verdict)


def _model_config(stock: Any, verdict: Verdict) -> Any:
    class InvariantModelConfig(stock):
        vllm_invariant = True

        @classmethod
        def verify_and_update_config(cls, vllm_config: Any) -> None:
            stock.verify_and_update_config(vllm_config)
            preflight.set_defaults(vllm_config)
            options = preflight.check_engine(vllm_config)
            if verdict.untested_gpu and not options.allow_untested_gpu:
                raise ValueError(
                    preflight.refuse(
                        f"this GPU ({verdict.reason})",
                        'SM90, or additional_config={"vllm_invariant": {"allow_untested_gpu": true}}',
                    )
                )

    return InvariantModelConfig
