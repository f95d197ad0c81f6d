# In a vLLM branch: vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py.
"""Qwen's GDN layer under batch invariance.

Only imported in a worker, and only under the flag: importing stock's layer pulls in its kernels.
"""

from typing import Any

import torch
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from vllm_invariant import backend, preflight


class InvariantQwenGatedDeltaNetAttention(QwenGatedDeltaNetAttention):
    """Stock's layer behind a backend that may claim batch invariance."""

    def __init__(self, config: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        preflight.check_engine(vllm_config)
        super().__init__(config, vllm_config, *args, **kwargs)
        *_, recurrent_dtype = self.get_state_dtype()
        if recurrent_dtype != torch.float32:
            raise ValueError(
                preflight.refuse(
                    f"a {recurrent_dtype} recurrent state",
                    "--mamba-ssm-cache-dtype float32",
                    "rounds the state at every chunk end, so the bits follow the cuts",
                )
            )

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum[backend.NAME]
