"""All that differs between the CPU engine and a GPU.  Nothing else in the engine tests asks."""

import importlib
import os
from typing import Any

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
}

# Cache memory of one engine: about 170,000 tokens of the tiny model.
OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 512 << 20}

# Whether a request with a seed of its own may be prefilled in several chunks.  Stock's CPU engine
# dies of it: it asks torch's CPU generator for an offset, which only the CUDA one has.
CUT_SEEDED = NAME == "cuda"

# Classes expected in an engine under the flag.
ATTENTION_IMPL = {"cpu": "TiledCPUAttentionImpl", "cuda": "FlashAttentionImpl"}[NAME]


def activate() -> None:
    """Set the environment and install the plugin in this process (idempotent)."""
    os.environ.update(ENVIRONMENT)
    from vllm_invariant.plugin import register

    register()


def stock_attention(patch: Any) -> None:
    """Rule off: stock's attention kernel on the whole step at once."""
    if NAME == "cpu":
        patch.delattr(
            importlib.import_module("vllm_invariant.cpu_attention").TiledCPUAttentionImpl, "forward"
        )
    else:
        raise NotImplementedError("no attention rule of ours on this device")


def stock_linear(patch: Any) -> None:
    """Rule off: linear layers see all rows of the step at once."""
    if NAME == "cpu":
        module = importlib.import_module("vllm_invariant.cpu_linear")
        patch.setattr(module, "run_tiled", lambda kernel, x, bias: kernel(x, None, bias))
    else:
        raise NotImplementedError("no linear rule of ours on this device")
