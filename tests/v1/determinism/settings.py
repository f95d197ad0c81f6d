"""What the suite runs on, from the environment.  Every variable has a default that needs no checkpoint.

=============================== ====================================================================
``VLLM_TEST_MODEL``             checkpoint of every test; a random one by default
``VLLM_GDN_PC_TEST_MODEL``      checkpoint of the prefix-cache tests; ``VLLM_TEST_MODEL`` by default
``VLLM_TP_SIZE``                tensor-parallel size
``VLLM_NEEDLE_BATCH_SIZE``      most requests in a batch, the needle included
``VLLM_NEEDLE_TRIALS``          batches a needle is put into
``VLLM_MIN_PROMPT``             tokens of the shortest prompt
``VLLM_MAX_PROMPT``             tokens of the longest prompt
``VLLM_NEEDLE_MAX_TOKENS``      tokens a needle generates
``VLLM_MAX_MODEL_LEN``          tokens of the longest request
``VLLM_USE_V2_MODEL_RUNNER``    vLLM's own: 0 or 1
``INVARIANT_MODE``              ``eager``, or ``graph``: torch.compile and CUDA graphs
``INVARIANT_ASYNC``             0 or 1: async scheduling; vLLM's own choice by default
``INVARIANT_ARITHMETIC``        ``chunk`` (default) or ``recurrent``
``INVARIANT_UNTESTED_GPU``      1: run on a GPU newer than SM90, which the package refuses otherwise
=============================== ====================================================================
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.harness import device
from vllm_invariant.arithmetic import ARITHMETICS, CHUNK, Arithmetic

# Small enough for two CPU cores; a GPU's are of the size at which batches were seen to differ.
DEFAULTS = {
    "cpu": {"batch": 8, "trials": 2, "max_prompt": 256, "max_tokens": 12},
    "cuda": {"batch": 64, "trials": 4, "max_prompt": 1024, "max_tokens": 32},
}[device.NAME]

KV_CACHE_BYTES = {"cpu": 512 << 20, "cuda": 4 << 30}[device.NAME]


@dataclass(frozen=True)
class Settings:
    """Sizes of the suite and options of its engines."""

    model: str | None
    prefix_cache_model: str | None
    tensor_parallel: int
    batch: int
    trials: int
    min_prompt: int
    max_prompt: int
    max_tokens: int
    max_model_len: int
    graphs: bool
    async_scheduling: bool | None
    untested_gpu: bool
    arithmetic: Arithmetic

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> "Settings":
        """Parse the environment.

        Raises:
            ValueError: on a variable that is no number, or an unknown mode.

        """

        def number(name: str, default: int) -> int:
            return int(environ.get(name, default))

        mode, model = environ.get("INVARIANT_MODE", "eager"), environ.get("VLLM_TEST_MODEL")
        if mode not in ("eager", "graph"):
            raise ValueError(f"INVARIANT_MODE={mode!r}: use eager or graph")
        chosen = environ.get("INVARIANT_ASYNC")
        return cls(
            model=model,
            prefix_cache_model=environ.get("VLLM_GDN_PC_TEST_MODEL", model),
            tensor_parallel=number("VLLM_TP_SIZE", 1),
            batch=number("VLLM_NEEDLE_BATCH_SIZE", DEFAULTS["batch"]),
            trials=number("VLLM_NEEDLE_TRIALS", DEFAULTS["trials"]),
            min_prompt=number("VLLM_MIN_PROMPT", 64),
            max_prompt=number("VLLM_MAX_PROMPT", DEFAULTS["max_prompt"]),
            max_tokens=number("VLLM_NEEDLE_MAX_TOKENS", DEFAULTS["max_tokens"]),
            max_model_len=number("VLLM_MAX_MODEL_LEN", 4096),
            graphs=mode == "graph",
            async_scheduling=None if chosen is None else bool(int(chosen)),
            untested_gpu=bool(number("INVARIANT_UNTESTED_GPU", 0)),
            arithmetic=ARITHMETICS[environ.get("INVARIANT_ARITHMETIC", CHUNK.name)],
        )

    def engine_options(self, backend: str) -> dict[str, Any]:
        """Options of every engine of the suite, for one attention backend."""
        options: dict[str, Any] = {
            "attention_backend": backend,
            "enforce_eager": not self.graphs,
            "max_model_len": self.max_model_len,
            "max_num_seqs": max(self.batch, 8),
            "max_num_batched_tokens": 2048,
            "kv_cache_memory_bytes": KV_CACHE_BYTES,
            "tensor_parallel_size": self.tensor_parallel,
        }
        if self.async_scheduling is not None:
            options["async_scheduling"] = self.async_scheduling
        ours: dict[str, Any] = {"gdn_arithmetic": self.arithmetic.name}
        if self.untested_gpu:
            ours["allow_untested_gpu"] = True
        options["additional_config"] = {"vllm_invariant": ours}
        return options
