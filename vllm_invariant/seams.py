# In a vLLM branch: nothing; these are the places the branch would edit.
"""The ledger of upstream symbols this package overrides, replaces or reads, and their probes.

Every probe reads upstream's source text with ``ast``: nothing is imported, so all of them run
before anything is installed, in every process, on any machine.  One failed probe means that
nothing is installed at all.  ``SEAMS.md`` has a row for each entry, by name.
"""

import ast
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vllm_invariant.ops import launch


@dataclass(frozen=True)
class Seam:
    """One upstream symbol.

    Attributes:
        name: its row in SEAMS.md.
        module: dotted module.
        symbol: ``name`` or ``Class.name`` in that module.
        args: parameter names that must come first, in this order, or None if it is no function.

    """

    name: str
    module: str
    symbol: str
    args: tuple[str, ...] | None = None


_SCHED = "vllm.v1.core.sched.scheduler"
_GDN = "vllm.v1.attention.backends.gdn_attn"
_LAYER = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
_REGISTRY = "vllm.v1.attention.backends.registry"
_CPU = "vllm.v1.attention.backends.cpu_attn"
_CPU_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe"
_FLA = "vllm.third_party.flash_linear_attention.ops"

SEAMS = (
    Seam("S1", _REGISTRY, "MambaAttentionBackendEnum.register", ("cls", "name", "value")),
    Seam("S1", _REGISTRY, "register_backend", ("backend", "class_path", "is_mamba")),
    Seam("S2", "vllm.model_executor.custom_op", "PluggableLayer.register_oot", ("cls",)),
    Seam("S2", _LAYER, "QwenGatedDeltaNetAttention.__init__", ("self", "config", "vllm_config")),
    Seam("S2", "vllm.model_executor.layers.mamba.gdn.base", "GatedDeltaNetAttention.mamba_type", ("self",)),
    Seam(
        "S3",
        _GDN,
        "GDNAttentionMetadataBuilder.build",
        (
            "self",
            "common_prefix_len",
            "common_attn_metadata",
            "num_accepted_tokens",
            "num_decode_draft_tokens_cpu",
            "fast_build",
        ),
    ),
    Seam(
        "S3",
        "vllm.v1.attention.backends.utils",
        "compute_causal_conv1d_metadata",
        ("query_start_loc_p_cpu", "device"),
    ),
    Seam("S4", "vllm.config.scheduler", "SchedulerConfig.get_scheduler_cls", ("self",)),
    Seam(
        "S5",
        _SCHED,
        "Scheduler._mamba_block_aligned_split",
        (
            "self",
            "request",
            "num_new_tokens",
            "num_new_local_computed_tokens",
            "num_external_computed_tokens",
        ),
    ),
    Seam("S5", _SCHED, "Scheduler.schedule", ("self",)),
    Seam("S5", _SCHED, "Scheduler.__init__", ("self", "vllm_config", "kv_cache_config")),
    Seam("S6", _SCHED, "Scheduler._get_local_prefix_cache_hit", ("self", "request")),
    Seam(
        "S6",
        "vllm.v1.core.kv_cache_coordinator",
        "KVCacheCoordinator.find_longest_cache_hit",
        ("self", "block_hashes", "max_cache_hit_length"),
    ),
    Seam(
        "S6",
        "vllm.v1.core.kv_cache_coordinator",
        "KVCacheCoordinator.cache_blocks",
        ("self", "request", "num_computed_tokens"),
    ),
    Seam(
        "S6",
        "vllm.v1.core.single_type_kv_cache_manager",
        "SingleTypeKVCacheManager.cache_blocks",
        ("self", "request", "num_tokens"),
    ),
    Seam("S7", "vllm.model_executor.models.config", "MODELS_CONFIG_MAP"),
    Seam(
        "S7",
        "vllm.model_executor.models.config",
        "VerifyAndUpdateConfig.verify_and_update_config",
        ("vllm_config",),
    ),
    Seam("S8", "vllm.model_executor.determinism.batch_invariant", "init_batch_invariance", ()),
    Seam(
        "S9",
        _CPU,
        "CPUAttentionMetadataBuilder.build",
        ("self", "common_prefix_len", "common_attn_metadata", "fast_build"),
    ),
    Seam(
        "S9",
        _CPU,
        "CPUAttentionBackendImpl.forward",
        ("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
    ),
    Seam("S9", "vllm._custom_ops", "cpu_attn_get_scheduler_metadata", ("num_reqs", "num_heads")),
    Seam(
        "S10",
        "vllm.distributed.kv_transfer.kv_connector.v1.ssm_conv_transfer_utils",
        "derive_mamba_conv_split",
        ("mamba_spec", "local_tp"),
    ),
    Seam(
        "S11",
        "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention",
        "_causal_conv1d_fwd_cpu",
        ("x", "weight", "bias", "conv_states", "query_start_loc", "cache_indices", "has_initial_state"),
    ),
    Seam(
        "S26",
        "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention",
        "_cpu_gdn_attention_nonspec",
        ("layer", "attn_metadata_i", "mixed_qkv", "b", "a", "core_attn_out"),
    ),
    Seam(
        "S12",
        "vllm.model_executor.layers.utils",
        "dispatch_cpu_unquantized_gemm",
        ("layer", "remove_weight"),
    ),
    Seam(
        "S13",
        "vllm.v1.worker.utils",
        "copy_kv_cache_blocks_inplace",
        ("kv_caches", "num_blocks", "kv_cache_block_copies"),
    ),
    Seam(
        "S14",
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._determine_batch_execution_and_padding",
        ("self", "num_tokens", "num_reqs"),
    ),
    Seam(
        "S15",
        "vllm.v1.worker.gpu.model_runner",
        "GPUModelRunner.gather_batch_req_state",
        ("self", "scheduler_output", "dummy_run"),
    ),
    Seam("S16", "vllm.v1.worker.gpu_model_runner", "GPUModelRunner.sample_tokens", ("self",)),
    Seam("S17", _SCHED, "Scheduler._preempt_request", ("self", "request")),
    Seam("S17", _SCHED, "Scheduler.add_request", ("self", "request")),
    Seam("S18", _SCHED, "Scheduler.make_stats", ("self",)),
    Seam("S18", "vllm.v1.metrics.loggers", "load_stat_logger_plugin_factories", ()),
    Seam("S19", "vllm.v1.engine.input_processor", "InputProcessor.process_inputs", ("self", "request_id")),
    Seam("S20", f"{_FLA}.layernorm_guard", "calc_rows_per_block", ("M", "device")),
    Seam(
        "S21",
        _LAYER,
        "QwenGatedDeltaNetAttention._forward_core",
        ("self", "mixed_qkv", "b", "a", "core_attn_out"),
    ),
    Seam(
        "S21",
        _LAYER,
        "QwenGatedDeltaNetAttention._forward_core_decode_non_spec",
        ("self", "mixed_qkv", "b", "a", "core_attn_out", "attn_metadata"),
    ),
    Seam(
        "S23",
        "vllm.v1.core.block_pool",
        "BlockPool.cache_partial_block",
        ("self", "request", "block", "num_tokens", "kv_cache_group_id", "block_size"),
    ),
    Seam("S23", "vllm.v1.core.single_type_kv_cache_manager", "FullAttentionManager"),
    Seam("S23", _SCHED, "Scheduler._free_request", ("self", "request")),
    Seam(
        "S24",
        "vllm.model_executor.layers.mamba.abstract",
        "MambaBase.get_kv_cache_spec",
        ("self", "vllm_config"),
    ),
    Seam("S24", f"{_FLA}.chunk_delta_h", "chunk_gated_delta_rule_fwd_h", ("k", "w", "u")),
    Seam(
        "S24",
        "vllm.model_executor.layers.mamba.checkpoint",
        "MambaPrefillCheckpointExporter.export",
        ("self", "checkpoint"),
    ),
    Seam(
        "S25",
        _GDN,
        "GDNAttentionMetadataBuilder.__init__",
        ("self", "kv_cache_spec", "layer_names", "vllm_config", "device"),
    ),
    Seam(
        "S25",
        _GDN,
        "GDNAttentionMetadataBuilder.update_block_table",
        ("self", "metadata", "blk_table", "slot_mapping"),
    ),
    Seam(
        "S27",
        "vllm.model_executor.layers.fused_moe.oracle.unquantized",
        "backend_to_kernel_cls",
        ("backend",),
    ),
    Seam(
        "S27",
        _CPU_EXPERTS,
        "CPUUnquantizedExperts.apply",
        ("self", "output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids"),
    ),
    Seam("S27", _CPU_EXPERTS, "CPUUnquantizedExperts.process_weights_after_loading", ("self", "layer")),
    *(
        Seam("S27", _CPU_EXPERTS, f"CPUUnquantizedExperts.{name}", args)
        for name, args in (
            ("_supports_activation", ("activation",)),
            ("_supports_parallel_config", ("moe_parallel_config",)),
        )
    ),
    Seam(
        "S28",
        "vllm.model_executor.layers.fused_moe.fused_moe",
        "get_default_config",
        ("M", "E", "N", "K", "topk", "dtype", "block_shape"),
    ),
    Seam("S29", "vllm.distributed.parallel_state", "get_tp_group", ()),
    Seam(
        "S30",
        "vllm.model_executor.determinism.batch_invariant",
        "linear_batch_invariant",
        ("input", "weight", "bias"),
    ),
    Seam(
        "S29",
        "vllm.distributed.device_communicators.custom_all_reduce",
        "CustomAllreduce.should_custom_ar",
        ("self", "inp"),
    ),
    *(Seam("S22", f"{_FLA}.{module}", kernel) for module, kernel in launch.KERNELS.values()),
)


@cache
def _tree(module: str) -> ast.Module | None:
    """The parsed source of an upstream module, found without importing it."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        return None
    base = Path(next(iter(spec.submodule_search_locations))).joinpath(*rest)
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return ast.parse(path.read_text())
    return None


def _find(body: list[ast.stmt], name: str) -> ast.stmt | None:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return node
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(t, ast.Name) and t.id == name for t in targets):
            return node
    return None


def probe(seam: Seam) -> str | None:
    """Why a seam does not fit, or None if it does."""
    tree = _tree(seam.module)
    if tree is None:
        return f"{seam.name}: module {seam.module} is gone"
    node: Any = tree
    for part in seam.symbol.split("."):
        node = _find(node.body, part)
        if node is None:
            return f"{seam.name}: {seam.module}.{seam.symbol} is gone"
    if seam.args is None:
        return None
    found = tuple(a.arg for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
    if found[: len(seam.args)] != seam.args:
        return f"{seam.name}: {seam.module}.{seam.symbol} now takes {found}, not {seam.args}"
    return None


def moved() -> list[str]:
    """What is wrong with the installed vLLM, one sentence a seam.  Empty if all fit."""
    return [problem for seam in SEAMS if (problem := probe(seam)) is not None]


def replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace ``owner.name`` by ``wrap(stock)``, once however often it is called."""
    stock = getattr(owner, name)
    if getattr(stock, "vllm_invariant", False):
        return
    ours = wrap(stock)
    ours.vllm_invariant = True
    setattr(owner, name, ours)


def replace_in(module: Any, name: str, wrap: Callable[[Any], Any], *importers: str) -> None:
    """Replace a function where it is defined, and in modules that already imported its name."""
    replace(module, name, wrap)
    for importer in importers:
        if importer in sys.modules:
            replace(sys.modules[importer], name, wrap)
