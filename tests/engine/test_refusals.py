"""What is not shown is refused at start, by the name of the option and the value that works."""

from typing import Any

import pytest
import torch

from tests.harness import device
from tests.harness.engine import Engines

pytestmark = pytest.mark.engine

NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"mamba_ssm_cache_dtype": "bfloat16"},
            ["--mamba-ssm-cache-dtype bfloat16", "use --mamba-ssm-cache-dtype float32"],
        ),
        ({"kv_cache_dtype": "fp8"}, ["--kv-cache-dtype fp8", "use --kv-cache-dtype auto"]),
        ({"dtype": "float16"}, ["--dtype float16", "use --dtype bfloat16"]),
        (
            {"max_num_batched_tokens": 64},
            ["--max-num-batched-tokens 64", "use --max-num-batched-tokens 79 or more"],
        ),
        ({"long_prefill_token_threshold": 32}, ["--long-prefill-token-threshold 32", "64 or more"]),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 4096},
            ["--no-enable-chunked-prefill", "use --enable-chunked-prefill"],
        ),
        (
            {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"},
            ["--scheduler-cls", "use the default scheduler"],
        ),
        ({"speculative_config": NGRAM}, ["speculative decoding", "use no --speculative-config"]),
        ({"enable_lora": True}, ["LoRA", "use no --enable-lora"]),
        ({"runner": "pooling"}, ["--runner pooling", "use --runner generate"]),
        ({"tensor_parallel_size": 4}, ["--tensor-parallel-size 4", "use --tensor-parallel-size 1 or 2"]),
        ({"data_parallel_size": 2}, ["--data-parallel-size 2", "use --data-parallel-size 1"]),
        (
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            ["--decode-context-parallel-size 2", "use --decode-context-parallel-size 1"],
        ),
        (
            {"tensor_parallel_size": 2, "compilation_config": {"pass_config": {"fuse_allreduce_rms": True}}},
            ['"fuse_allreduce_rms": true', 'use "pass_config": {"fuse_allreduce_rms": false}'],
        ),
        ({"pipeline_parallel_size": 2}, ["--pipeline-parallel-size 2", "use --pipeline-parallel-size 1"]),
        (
            {"additional_config": {"gdn_prefill_backend": "flashinfer"}},
            ['gdn_prefill_backend="flashinfer"', 'use gdn_prefill_backend="triton"'],
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused(engines: Engines, options: dict[str, Any], words: list[str]) -> None:
    """One option at a time, on an engine that is accepted without it."""
    with pytest.raises(ValueError) as error:
        engines.config(**options)
    if "World size" in str(error.value):  # vLLM itself wants as many GPUs, before it asks the package
        pytest.skip("needs as many GPUs as the refused option names")
    assert "VLLM_BATCH_INVARIANT=1: " in str(error.value)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_the_same_engine_without_them_is_accepted(engines: Engines) -> None:
    """Otherwise the refusals above would prove nothing."""
    config = engines.config()
    assert config.cache_config.mamba_ssm_cache_dtype == "float32"
    assert config.cache_config.prefix_match_unit == 64


@pytest.mark.skipif(device.NAME == "cuda" and torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_two_ranks_are_accepted(engines: Engines, level: int) -> None:
    """All-reduce and norm stay two operations at every optimization level."""
    config = engines.config(tensor_parallel_size=2, optimization_level=level, enforce_eager=False)
    assert config.parallel_config.tensor_parallel_size == 2
    assert config.compilation_config.pass_config.fuse_allreduce_rms is False


def test_a_kv_connector_is_refused(engines: Engines) -> None:
    """State moved between engines is not shown."""
    from vllm.config import KVTransferConfig

    connector = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    with pytest.raises(ValueError, match=r"a KV connector .*use no --kv-transfer-config"):
        engines.config(kv_transfer_config=connector)


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        ({"gdn_arithmetik": "chunk"}, ["'gdn_arithmetik'", "allow_untested_gpu", "gdn_arithmetic"]),
        ({"gdn_arithmetic": "fast"}, ["'fast'", "chunk"]),
        ("chunk", ["must be a mapping", "'chunk'"]),
    ],
)
def test_our_own_options_are_checked(engines: Engines, ours: Any, words: list[str]) -> None:
    """Unknown keys and values list the known ones."""
    with pytest.raises(ValueError) as error:
        engines.config(additional_config={"vllm_invariant": ours})
    assert all(word in str(error.value) for word in words), str(error.value)
