# In a vLLM branch: vllm/v1/engine/input_processor.py.
"""Requests refused at the door, with an error for that request alone."""

import functools
from typing import Any

from vllm_invariant import preflight


def check_request(vllm_config: Any, *, prompt_len: int, resumable: bool) -> None:
    """Judge one request.

    Args:
        vllm_config: the engine's config, block counts resolved.
        prompt_len: tokens in its prompt.
        resumable: it is a streaming-input session, whose prompt grows after tokens were generated.

    Raises:
        ValueError: naming what is wrong and what works.

    """
    if vllm_config.model_config.architecture not in preflight.ARCHITECTURES:
        return
    if resumable:
        raise ValueError(
            preflight.refuse(
                "a streaming-input session",
                "one request per turn",
                "goes on from a decoded state, off the grid",
            )
        )
    cache = vllm_config.cache_config
    if cache.num_gpu_blocks is None:
        return
    capacity = (cache.num_gpu_blocks - 1) * cache.block_size
    if prompt_len >= capacity:
        raise ValueError(
            f"The prompt has {prompt_len} tokens and the KV cache holds {capacity}; use a shorter prompt, "
            "or give the engine more memory."
        )


def check_inputs(stock: Any) -> Any:
    """Wrap stock's input processing to judge each request it has processed."""

    @functools.wraps(stock)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = stock(self, *args, **kwargs)
        prompt = request.prompt_token_ids or ()
        check_request(self.vllm_config, prompt_len=len(prompt), resumable=request.resumable)
        return request

    return process_inputs
