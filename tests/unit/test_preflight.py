"""Every refusal names the option and the value that works, and that value is then accepted."""

import copy
import re
from types import SimpleNamespace as Fake

import pytest

from vllm_invariant import preflight


def engine() -> Fake:
    """An engine config that preflight accepts, with the fields it reads and no others."""
    return Fake(
        model_config=Fake(
            architecture="Qwen3_5ForCausalLM",
            runner_type="generate",
            dtype="torch.bfloat16",
            quantization=None,
        ),
        cache_config=Fake(
            mamba_ssm_cache_dtype="float32",
            cache_dtype="auto",
            enable_prefix_caching=True,
            mamba_cache_mode="align",
            block_size=320,
            user_specified_block_size=False,
            mamba_block_size=None,
            prefix_match_unit=64,
        ),
        scheduler_config=Fake(
            enable_chunked_prefill=True,
            max_num_seqs=16,
            max_num_batched_tokens=1024,
            long_prefill_token_threshold=0,
            scheduler_cls=None,
        ),
        parallel_config=Fake(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            enable_expert_parallel=False,
            all2all_backend="allgather_reducescatter",
            enable_eplb=False,
            enable_dbo=False,
            ubatch_size=0,
            disable_custom_all_reduce=False,
            distributed_executor_backend=None,
            enable_batch_sharded_sampling=None,
            expert_placement_strategy="linear",
        ),
        speculative_config=None,
        kv_transfer_config=None,
        lora_config=None,
        attention_config=Fake(backend=None, backend_per_kind={}),
        compilation_config=Fake(inductor_compile_config={}, pass_config=Fake(fuse_allreduce_rms=None)),
        device_config=Fake(device_type="cuda"),
        additional_config={},
    )


def changed(**fields) -> Fake:
    """`engine` with fields set by path, ``cache_config__block_size=544`` and so on."""
    config = engine()
    for path, value in fields.items():
        owner, name = config, path
        if "__" in path:
            section, name = path.split("__")
            owner = getattr(config, section)
        assert hasattr(owner, name), path
        setattr(owner, name, value)
    return config


def refusal(config: Fake) -> str:
    with pytest.raises(ValueError) as error:
        preflight.check_engine(config)
    message = str(error.value)
    assert message.startswith("VLLM_BATCH_INVARIANT=1: ") and "; use " in message
    return message


def test_accepts_the_shown_engine():
    assert preflight.check_engine(engine()).gdn_arithmetic == "chunk"


# What is set, what the message must name, what it must say to use.
REFUSALS = [
    ({"model_config__architecture": "OlmoHybridForCausalLM"}, "OlmoHybridForCausalLM", "Qwen3_5ForCausalLM"),
    ({"model_config__runner_type": "pooling"}, "--runner pooling", "--runner generate"),
    ({"model_config__dtype": "torch.float16"}, "--dtype float16", "--dtype bfloat16"),
    ({"model_config__quantization": "fp8"}, "--quantization fp8", "unquantized"),
    (
        {"cache_config__mamba_ssm_cache_dtype": "bfloat16"},
        "--mamba-ssm-cache-dtype bfloat16",
        "--mamba-ssm-cache-dtype float32",
    ),
    ({"cache_config__cache_dtype": "fp8"}, "--kv-cache-dtype fp8", "--kv-cache-dtype auto"),
    ({"cache_config__mamba_cache_mode": "all"}, "--mamba-cache-mode all", "--mamba-cache-mode align"),
    (
        {"cache_config__user_specified_block_size": True, "cache_config__block_size": 544},
        "--block-size 544",
        "--block-size 576",
    ),
    ({"cache_config__mamba_block_size": 264}, "--mamba-block-size 264", "--mamba-block-size 320"),
    ({"cache_config__prefix_match_unit": 16}, "--prefix-match-unit 16", "--prefix-match-unit 64"),
    (
        {"scheduler_config__enable_chunked_prefill": False},
        "--no-enable-chunked-prefill",
        "--enable-chunked-prefill",
    ),
    (
        {"scheduler_config__max_num_batched_tokens": 78},
        "--max-num-batched-tokens 78",
        "--max-num-batched-tokens 79 or more",
    ),
    (
        {"scheduler_config__long_prefill_token_threshold": 63},
        "--long-prefill-token-threshold 63",
        "--long-prefill-token-threshold 64",
    ),
    ({"scheduler_config__scheduler_cls": "mine.Scheduler"}, "--scheduler-cls", "the default scheduler"),
    ({"speculative_config": Fake()}, "speculative decoding", "no --speculative-config"),
    ({"kv_transfer_config": Fake()}, "KV connector", "no --kv-transfer-config"),
    ({"lora_config": Fake()}, "LoRA", "no --enable-lora"),
    (
        {"parallel_config__tensor_parallel_size": 4},
        "--tensor-parallel-size 4",
        "--tensor-parallel-size 1 or 2",
    ),
    (
        {"parallel_config__pipeline_parallel_size": 2},
        "--pipeline-parallel-size 2",
        "--pipeline-parallel-size 1",
    ),
    ({"parallel_config__data_parallel_size": 2}, "--data-parallel-size 2", "--data-parallel-size 1"),
    (
        {"parallel_config__decode_context_parallel_size": 2},
        "--decode-context-parallel-size 2",
        "--decode-context-parallel-size 1",
    ),
    (
        {"parallel_config__prefill_context_parallel_size": 2},
        "--prefill-context-parallel-size 2",
        "--prefill-context-parallel-size 1",
    ),
    ({"parallel_config__enable_eplb": True}, "--enable-eplb", "--no-enable-eplb"),
    ({"parallel_config__enable_dbo": True}, "--enable-dbo", "--no-enable-dbo"),
    ({"parallel_config__ubatch_size": 2}, "--ubatch-size 2", "--ubatch-size 0"),
    (
        {
            "parallel_config__tensor_parallel_size": 2,
            "additional_config": {"vllm_invariant": {"gdn_arithmetic": "recurrent"}},
        },
        'gdn_arithmetic="recurrent" with --tensor-parallel-size 2',
        'gdn_arithmetic="chunk"',
    ),
    (
        {"parallel_config__tensor_parallel_size": 2, "parallel_config__distributed_executor_backend": "ray"},
        "--distributed-executor-backend ray",
        "--distributed-executor-backend mp",
    ),
    (
        {"parallel_config__tensor_parallel_size": 2, "parallel_config__enable_batch_sharded_sampling": True},
        "--enable-batch-sharded-sampling",
        "--no-enable-batch-sharded-sampling",
    ),
    (
        {
            "parallel_config__tensor_parallel_size": 2,
            "compilation_config__pass_config": Fake(fuse_allreduce_rms=True),
        },
        '"fuse_allreduce_rms": true',
        '"fuse_allreduce_rms": false',
    ),
    (
        {"parallel_config__tensor_parallel_size": 2, "parallel_config__disable_custom_all_reduce": True},
        "--disable-custom-all-reduce",
        "--no-disable-custom-all-reduce",
    ),
    (
        {"additional_config": {"gdn_prefill_backend": "flashinfer"}},
        'gdn_prefill_backend="flashinfer"',
        'gdn_prefill_backend="triton"',
    ),
]


@pytest.mark.parametrize(("fields", "names", "works"), REFUSALS, ids=[r[1] for r in REFUSALS])
def test_refusals(fields, names, works):
    option, use = refusal(changed(**fields)).split("; use ")
    assert names in option and works in use


# The same, with the value that the message told the user to use.
@pytest.mark.parametrize(
    "fields",
    [
        {"cache_config__user_specified_block_size": True, "cache_config__block_size": 576},
        {"cache_config__mamba_block_size": 320},
        {"scheduler_config__max_num_batched_tokens": 79},
        {"scheduler_config__max_num_batched_tokens": 78, "scheduler_config__max_num_seqs": 15},
        {"scheduler_config__long_prefill_token_threshold": 64},
        {"cache_config__mamba_cache_mode": "none", "cache_config__enable_prefix_caching": False},
        {"cache_config__cache_dtype": "bfloat16"},
        {"additional_config": {"gdn_prefill_backend": "triton"}},
        {"additional_config": None},
        {"parallel_config__tensor_parallel_size": 2, "parallel_config__distributed_executor_backend": "mp"},
        {
            "parallel_config__tensor_parallel_size": 2,
            "compilation_config__pass_config": Fake(fuse_allreduce_rms=False),
        },
        # On one rank nothing is added up.
        {"parallel_config__disable_custom_all_reduce": True},
        {"compilation_config__pass_config": Fake(fuse_allreduce_rms=True)},
        # On a CPU vLLM turns it off itself.
        {
            "parallel_config__tensor_parallel_size": 2,
            "parallel_config__disable_custom_all_reduce": True,
            "device_config__device_type": "cpu",
        },
    ],
)
def test_what_works_is_accepted(fields):
    preflight.check_engine(changed(**fields))


@pytest.mark.parametrize("field", ["block_size", "mamba_block_size", "prefix_match_unit"])
def test_blocks_off_the_grid_are_harmless_without_prefix_caching(field):
    """No state is cut at a block then."""
    config = changed(cache_config__enable_prefix_caching=False, cache_config__user_specified_block_size=True)
    setattr(config.cache_config, field, 544 + 8)
    preflight.check_engine(config)


def test_a_block_that_nobody_set_is_judged_later():
    """Until then it is a minimum, not a size."""
    preflight.check_engine(changed(cache_config__block_size=16))


def test_unknown_option_of_ours():
    with pytest.raises(ValueError, match="known keys: allow_untested_gpu, gdn_arithmetic"):
        preflight.check_engine(changed(additional_config={"vllm_invariant": {"grid": 32}}))


def unset() -> Fake:
    """As a user leaves it."""
    return changed(
        cache_config__mamba_ssm_cache_dtype="auto",
        cache_config__prefix_match_unit=None,
        cache_config__block_size=16,
    )


def test_defaults_fill_in_what_was_left_open():
    config = unset()
    preflight.set_defaults(config)
    cache = config.cache_config
    assert cache.mamba_ssm_cache_dtype == "float32"
    assert cache.prefix_match_unit == 64
    assert (cache.block_size, cache.user_specified_block_size) == (64, True)
    assert config.additional_config["gdn_prefill_backend"] == "triton"
    preflight.check_engine(config)


def test_defaults_of_the_recurrent_arithmetic():
    """Blocks stay as stock makes them; hits land as often as stock's own attention blocks would let them."""
    config = unset()
    config.additional_config = {"vllm_invariant": {"gdn_arithmetic": "recurrent"}}
    preflight.set_defaults(config)
    cache = config.cache_config
    assert (cache.block_size, cache.user_specified_block_size, cache.prefix_match_unit) == (16, False, 16)
    config.scheduler_config.max_num_batched_tokens = config.scheduler_config.max_num_seqs
    assert preflight.check_engine(config).arithmetic.grid == 1


@pytest.mark.parametrize("name", ["FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN", None])
def test_attention_that_computes_decode_as_prefill(name):
    config = changed(additional_config={"vllm_invariant": {"gdn_arithmetic": "recurrent"}})
    config.attention_config.backend = name and Fake(name=name)
    preflight.check_engine(config)


def test_other_attention_is_refused_with_the_recurrent_arithmetic_only():
    config = changed(attention_config__backend=Fake(name="FLEX_ATTENTION"))
    preflight.check_engine(config)
    config.additional_config = {"vllm_invariant": {"gdn_arithmetic": "recurrent"}}
    message = refusal(config)
    assert "--attention-backend FLEX_ATTENTION" in message and "use --attention-backend FLASH_ATTN" in message


def test_defaults_are_the_same_the_second_time():
    once, twice = unset(), unset()
    preflight.set_defaults(once)
    preflight.set_defaults(twice)
    preflight.set_defaults(twice)
    assert once == twice


def test_defaults_keep_what_the_user_set():
    config = changed(
        cache_config__mamba_ssm_cache_dtype="bfloat16",
        cache_config__prefix_match_unit=128,
        cache_config__block_size=640,
        cache_config__user_specified_block_size=True,
        additional_config={"gdn_prefill_backend": "flashinfer"},
    )
    before = copy.deepcopy(config)
    preflight.set_defaults(config)
    assert config.cache_config == before.cache_config
    assert config.additional_config == before.additional_config
    assert "bfloat16" in refusal(config), "kept, then refused by name"


@pytest.mark.parametrize(("size", "asked", "left"), [(1, None, None), (2, None, False), (2, True, True)])
def test_all_reduce_and_norm_are_not_fused(size, asked, left):
    """Between two ranks, where the user left it open."""
    config = changed(parallel_config__tensor_parallel_size=size)
    config.compilation_config.pass_config.fuse_allreduce_rms = asked
    preflight.set_defaults(config)
    assert config.compilation_config.pass_config.fuse_allreduce_rms is left


def test_no_match_unit_without_prefix_caching():
    config = changed(cache_config__enable_prefix_caching=False, cache_config__prefix_match_unit=None)
    preflight.set_defaults(config)
    assert config.cache_config.prefix_match_unit is None


def test_inductor_chooses_nothing_by_timing():
    config = unset()
    preflight.set_defaults(config)
    inductor = config.compilation_config.inductor_compile_config
    assert inductor["deterministic"] is True and inductor["benchmark_combo_kernel"] is False


@pytest.mark.parametrize(
    ("block", "unit", "option", "works"),
    [(544, 64, "--block-size 544", "--block-size 576"), (576, 32, "--prefix-match-unit 32", "64")],
)
def test_resolved_blocks_off_the_grid(block, unit, option, works):
    with pytest.raises(ValueError, match=re.escape(option)) as error:
        preflight.check_blocks(64, caching=True, block_size=block, hash_block_size=unit)
    assert works in str(error.value).split("; use ")[1]
    preflight.check_blocks(64, caching=False, block_size=block, hash_block_size=unit)


def test_resolved_blocks_on_the_grid():
    preflight.check_blocks(64, caching=True, block_size=576, hash_block_size=192)
