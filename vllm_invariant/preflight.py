# In a vLLM branch: vllm/config/vllm.py, beside the other cross-field checks.
"""Refuse, at start and by name, what has not been shown.

`set_defaults` fills in what the user left open, `check_engine` judges the whole engine config, and
`check_blocks` judges the block sizes once vLLM has resolved them.  The first error found is raised
as a ``ValueError`` that names the option and the value that works.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

from vllm_invariant import grid
from vllm_invariant.arithmetic import CHUNK
from vllm_invariant.config import InvariantConfig

logger = logging.getLogger("vllm.vllm_invariant")

FLAG = "VLLM_BATCH_INVARIANT=1"

# Tokens of stock's own attention block: hits may land this often where the arithmetic's grid allows it.
FINEST_HIT = 16

# Model classes that were shown invariant.  A wrapper is the same language model beside a vision tower.
WRAPPERS = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
EXPERTS = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration", "Qwen3NextForCausalLM")
ARCHITECTURES = tuple(dict.fromkeys(("Qwen3_5ForCausalLM", *EXPERTS, *WRAPPERS)))


# Attention backends whose decode and prefill agree in bits under the flag.
SAME_IN_DECODE = ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN")

# What stock takes for expert parallelism unless told otherwise; without data parallelism it moves nothing.
ALL2ALL = "allgather_reducescatter"

# Tensor-parallel sizes that were shown.  Each gives the same bits as itself.
TENSOR_PARALLEL = (1, 2)


def refuse(option: str, works: str, why: str = "is not shown to be batch-invariant yet") -> str:
    """One message in the one form."""
    return f"{FLAG}: {option} {why}; use {works}."


def set_defaults(vllm_config: Any) -> None:
    """Fill in what the user left open, with a log line each.

    Runs once, while the engine config is made, before anything reads these fields.
    """
    step = InvariantConfig.from_additional_config(vllm_config.additional_config).arithmetic.grid
    cache = vllm_config.cache_config
    if cache.mamba_ssm_cache_dtype == "auto":
        cache.mamba_ssm_cache_dtype = "float32"
        logger.info("%s: recurrent state is kept in float32.", FLAG)
    unit = grid.shared(step, FINEST_HIT)
    if not cache.user_specified_block_size and step > 1:
        # The hybrid block becomes the smallest multiple of this that holds a state page.
        cache.block_size = unit
        cache.user_specified_block_size = True
    if cache.enable_prefix_caching and cache.prefix_match_unit is None:
        cache.prefix_match_unit = unit
        logger.info("%s: prefix-cache hits land every %d tokens.", FLAG, cache.prefix_match_unit)
    # Inductor: nothing chosen by timing, combo kernels included (two ways to fuse, the faster kept).
    inductor = vllm_config.compilation_config.inductor_compile_config
    inductor["deterministic"] = True
    inductor["benchmark_combo_kernel"] = False
    passes = vllm_config.compilation_config.pass_config
    if vllm_config.parallel_config.tensor_parallel_size > 1 and passes.fuse_allreduce_rms is None:
        # Stock leaves it off under the flag, at every optimization level; nothing rests on that here.
        passes.fuse_allreduce_rms = False
        logger.info("%s: all-reduce and norm are not fused.", FLAG)
    extra = vllm_config.additional_config
    if isinstance(extra, dict) and extra.get("gdn_prefill_backend", "auto") == "auto":
        extra["gdn_prefill_backend"] = "triton"  # FLA's chunk kernels; ignored on CPU


def _model(config: Any) -> Iterator[str | None]:
    model = config.model_config
    if model.architecture not in ARCHITECTURES:
        yield refuse(f"model class {model.architecture}", f"one of {', '.join(ARCHITECTURES)}")
    if model.architecture in WRAPPERS and not model.multimodal_config.language_model_only:
        yield refuse("image and video input", "--language-model-only")
    if model.runner_type != "generate":
        yield refuse(f"--runner {model.runner_type}", "--runner generate")
    if str(model.dtype).removeprefix("torch.") != "bfloat16":
        yield refuse(f"--dtype {str(model.dtype).removeprefix('torch.')}", "--dtype bfloat16")
    if model.quantization is not None:
        yield refuse(f"--quantization {model.quantization}", "an unquantized checkpoint")


def _cache(config: Any) -> Iterator[str | None]:
    cache, step = config.cache_config, _options(config).arithmetic.grid
    if cache.mamba_ssm_cache_dtype != "float32":
        yield refuse(
            f"--mamba-ssm-cache-dtype {cache.mamba_ssm_cache_dtype}",
            "--mamba-ssm-cache-dtype float32",
            "rounds the state at every chunk end, so the bits follow the cuts",
        )
    if cache.cache_dtype not in ("auto", "bfloat16"):
        yield refuse(f"--kv-cache-dtype {cache.cache_dtype}", "--kv-cache-dtype auto")
    if cache.enable_prefix_caching and cache.mamba_cache_mode not in ("align", "none"):
        yield refuse(f"--mamba-cache-mode {cache.mamba_cache_mode}", "--mamba-cache-mode align")
    for option, value in (
        ("--block-size", cache.block_size if cache.user_specified_block_size else None),
        ("--mamba-block-size", cache.mamba_block_size),
        ("--prefix-match-unit", cache.prefix_match_unit),
    ):
        if cache.enable_prefix_caching and value is not None and not grid.is_on(value, step):
            yield refuse(
                f"{option} {value}",
                f"{option} {grid.round_block(value, step)}",
                f"is not a multiple of the {step}-token grid",
            )


def _scheduler(config: Any) -> Iterator[str | None]:
    scheduler, step = config.scheduler_config, _options(config).arithmetic.grid
    if not scheduler.enable_chunked_prefill:
        yield refuse("--no-enable-chunked-prefill", "--enable-chunked-prefill")
    need = grid.min_budget(scheduler.max_num_seqs, step)
    if scheduler.max_num_batched_tokens < need:
        yield refuse(
            f"--max-num-batched-tokens {scheduler.max_num_batched_tokens}",
            f"--max-num-batched-tokens {need} or more, or a smaller --max-num-seqs",
            f"cannot fit one {step}-token grid step beside {scheduler.max_num_seqs - 1} decodes",
        )
    threshold = scheduler.long_prefill_token_threshold
    if 0 < threshold < step:
        yield refuse(
            f"--long-prefill-token-threshold {threshold}",
            f"--long-prefill-token-threshold {step} or more",
            f"is below one {step}-token grid step",
        )
    if scheduler.scheduler_cls is not None:
        yield refuse("--scheduler-cls", "the default scheduler", "replaces the scheduler that keeps the grid")


def _features(config: Any) -> Iterator[str | None]:
    if config.speculative_config is not None:
        yield refuse("speculative decoding", "no --speculative-config")
    if config.kv_transfer_config is not None:
        yield refuse("a KV connector", "no --kv-transfer-config")
    if config.lora_config is not None:
        yield refuse("LoRA", "no --enable-lora")
    extra = config.additional_config
    backend = extra.get("gdn_prefill_backend", "auto") if isinstance(extra, dict) else "auto"
    if backend not in ("auto", "triton"):
        yield refuse(f'gdn_prefill_backend="{backend}"', 'gdn_prefill_backend="triton"')


def _parallel(config: Any) -> Iterator[str | None]:
    parallel = config.parallel_config
    size = parallel.tensor_parallel_size
    if size not in TENSOR_PARALLEL:
        works = " or ".join(map(str, TENSOR_PARALLEL))
        yield refuse(f"--tensor-parallel-size {size}", f"--tensor-parallel-size {works}")
    for option, value in (
        ("--pipeline-parallel-size", parallel.pipeline_parallel_size),
        ("--data-parallel-size", parallel.data_parallel_size),
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size),
        ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size),
    ):
        if value > 1:
            yield refuse(f"{option} {value}", f"{option} 1")
    for option in ("enable-eplb", "enable-dbo"):
        if getattr(parallel, option.replace("-", "_")):
            yield refuse(f"--{option}", f"--no-{option}")
    if parallel.ubatch_size > 1:
        yield refuse(f"--ubatch-size {parallel.ubatch_size}", "--ubatch-size 0")
    if size == 1:
        return
    if (arithmetic := _options(config).arithmetic).decode_equals_prefill:
        yield refuse(
            f'gdn_arithmetic="{arithmetic.name}" with --tensor-parallel-size {size}',
            f'gdn_arithmetic="{CHUNK.name}", or --tensor-parallel-size 1',
        )
    if (executor := parallel.distributed_executor_backend) not in (None, "mp"):
        yield refuse(f"--distributed-executor-backend {executor}", "--distributed-executor-backend mp")
    if parallel.enable_batch_sharded_sampling:
        yield refuse("--enable-batch-sharded-sampling", "--no-enable-batch-sharded-sampling")
    if config.compilation_config.pass_config.fuse_allreduce_rms:
        yield refuse(
            '"fuse_allreduce_rms": true in --compilation-config',
            '"pass_config": {"fuse_allreduce_rms": false}',
            "takes another all-reduce for small messages",
        )
    if config.device_config.device_type == "cuda" and parallel.disable_custom_all_reduce:
        yield refuse(
            f"--disable-custom-all-reduce with --tensor-parallel-size {size}",
            "--no-disable-custom-all-reduce",
            "leaves the sum to NCCL, whose order follows the message's size",
        )


def _experts(config: Any) -> Iterator[str | None]:
    if config.model_config.architecture not in EXPERTS:
        return
    parallel, kernels = config.parallel_config, ("auto", "triton")
    arithmetic = _options(config).arithmetic
    if arithmetic.decode_equals_prefill and config.device_config.device_type == "cuda":
        yield refuse(
            f'gdn_arithmetic="{arithmetic.name}" for a mixture of experts on a GPU',
            f'gdn_arithmetic="{CHUNK.name}"',
        )
    if parallel.enable_expert_parallel:
        if parallel.tensor_parallel_size == 1:
            yield refuse("--enable-expert-parallel", "--no-enable-expert-parallel", "needs a second GPU")
        if (manager := parallel.all2all_backend) != ALL2ALL:
            yield refuse(f"--all2all-backend {manager}", f"--all2all-backend {ALL2ALL}")
        if (placement := parallel.expert_placement_strategy) != "linear":
            yield refuse(f"--expert-placement-strategy {placement}", "--expert-placement-strategy linear")
    if (backend := config.kernel_config.moe_backend) not in kernels:
        yield refuse(f"--moe-backend {backend}", "--moe-backend auto")
    if not getattr(config.model_config.hf_text_config, "norm_topk_prob", True):
        yield refuse("norm_topk_prob=false in the model's config", "a model that normalizes router weights")


def _attention(config: Any) -> Iterator[str | None]:
    arithmetic, chosen = _options(config).arithmetic, config.attention_config
    if not arithmetic.decode_equals_prefill:
        return
    for backend in (chosen.backend, *chosen.backend_per_kind.values()):
        if backend is not None and backend.name not in SAME_IN_DECODE:
            yield refuse(
                f"--attention-backend {backend.name}",
                f"--attention-backend {' or '.join(SAME_IN_DECODE)}",
                f"was not shown to compute a generated token as it computes a prompt's, which "
                f'gdn_arithmetic="{arithmetic.name}" promises',
            )


RULES: tuple[Callable[[Any], Iterator[str | None]], ...] = (
    _model,
    _cache,
    _scheduler,
    _features,
    _parallel,
    _experts,
    _attention,
)


def _options(config: Any) -> InvariantConfig:
    return InvariantConfig.from_additional_config(config.additional_config)


def problems(vllm_config: Any) -> Iterator[str]:
    """Everything in an engine config that is refused, one sentence each."""
    for rule in RULES:
        yield from filter(None, rule(vllm_config))


def check_engine(vllm_config: Any) -> InvariantConfig:
    """Judge the whole engine config.

    Returns:
        The project's own options.

    Raises:
        ValueError: naming the first option that is refused and the value that works.

    """
    options = _options(vllm_config)
    for problem in problems(vllm_config):
        raise ValueError(problem)
    return options


def check_blocks(step: int, *, caching: bool, block_size: int, hash_block_size: int) -> None:
    """Judge the block sizes that vLLM settled on.

    Args:
        step: the arithmetic's grid, tokens.
        caching: prefix caching is on.  Without it no state is ever cut at a block.
        block_size: the scheduler's block, tokens: states are cached at its multiples.
        hash_block_size: hits land on its multiples, tokens.

    Raises:
        ValueError: if either lies off the grid.

    """
    if not caching:
        return
    for option, value in (("--block-size", block_size), ("--prefix-match-unit", hash_block_size)):
        if not grid.is_on(value, step):
            raise ValueError(
                refuse(
                    f"{option} {value}",
                    f"{option} {grid.round_block(value, step)}",
                    f"is not a multiple of the {step}-token grid",
                )
            )
