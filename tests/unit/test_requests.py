"""Requests are judged one by one; the error names what is wrong with this one."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_invariant import preflight
from vllm_invariant.requests import check_inputs, check_request


def config(architecture: str = preflight.ARCHITECTURES[0], blocks: int | None = 11) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(architecture=architecture),
        cache_config=SimpleNamespace(num_gpu_blocks=blocks, block_size=320),
    )


def test_an_ordinary_request_passes():
    check_request(config(), prompt_len=3199, resumable=False)


def test_a_streaming_input_session_is_refused():
    with pytest.raises(ValueError, match=r"streaming-input session .*use one request per turn"):
        check_request(config(), prompt_len=5, resumable=True)


def test_a_prompt_larger_than_the_cache_is_refused():
    with pytest.raises(ValueError, match="3200 tokens and the KV cache holds 3200"):
        check_request(config(), prompt_len=3200, resumable=False)


def test_before_the_cache_is_sized_no_prompt_is_too_long():
    check_request(config(blocks=None), prompt_len=10**6, resumable=False)


def test_other_models_are_not_judged():
    check_request(config(architecture="LlamaForCausalLM"), prompt_len=10**6, resumable=True)


@pytest.mark.parametrize("tokens", [[1, 2, 3], None])
def test_processed_inputs_are_passed_on(tokens):
    made = SimpleNamespace(prompt_token_ids=tokens, resumable=False)
    seen = []

    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return made

    processor = SimpleNamespace(vllm_config=config())
    assert check_inputs(process_inputs)(processor, "id", params=7) is made
    assert seen == [(("id",), {"params": 7})]


def test_processed_inputs_are_judged():
    made = SimpleNamespace(prompt_token_ids=[1], resumable=True)
    processor = SimpleNamespace(vllm_config=config())
    with pytest.raises(ValueError, match="streaming-input"):
        check_inputs(lambda self: made)(processor)
