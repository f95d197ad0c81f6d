# In a vLLM branch: vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py.
"""Qwen's GDN layer under batch invariance.

Only imported in a worker, and only under the flag: importing stock's layer pulls in its kernels.
"""

import functools
from dataclasses import replace
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.checkpoint import MambaPrefillCheckpointExporter
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from vllm_invariant import agreement, backend, checkpoint, cuda, grid, preflight
from vllm_invariant.arithmetic import CHUNK, Arithmetic


@functools.cache
def _check_ranks(group: Any, arithmetic: Arithmetic, hidden_size: int) -> None:
    """Judge a tensor-parallel group, once and not for each layer."""
    agreement.check(agreement.facts(arithmetic), group.cpu_group)
    if current_platform.is_cuda():
        cuda.check_all_reduce(group, hidden_size)


class InvariantQwenGatedDeltaNetAttention(QwenGatedDeltaNetAttention):
    """Stock's layer behind a backend that may claim batch invariance."""

    arithmetic: Arithmetic = CHUNK

    def __init__(self, config: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        options = preflight.check_engine(vllm_config)
        super().__init__(config, vllm_config, *args, **kwargs)
        self.arithmetic = options.arithmetic
        *_, recurrent_dtype = self.get_state_dtype()
        if recurrent_dtype != torch.float32:
            raise ValueError(
                preflight.refuse(
                    f"a {recurrent_dtype} recurrent state",
                    "--mamba-ssm-cache-dtype float32",
                    "rounds the state at every chunk end, so the bits follow the cuts",
                )
            )

        if (group := get_tp_group()).world_size > 1:
            _check_ranks(group, self.arithmetic, vllm_config.model_config.get_hidden_size())
        if current_platform.is_cuda() and self.arithmetic.decode_equals_prefill:
            from vllm_invariant import cuda_recurrent  # needs Triton, which a CPU has not

            cuda_recurrent.check(self.head_k_dim, self.head_v_dim)
            self._recurrent_core = cuda_recurrent.run
        elif current_platform.is_cuda():
            dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
            cuda.pin_launches(self.head_k_dim, self.head_v_dim, dtype, untested=options.allow_untested_gpu)
            if vllm_config.cache_config.mamba_cache_mode == "align":
                self._checkpoint_exporter = MambaPrefillCheckpointExporter(
                    state_len=self.conv_kernel_size - 1
                )

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """Stock's, which on a GPU also tells scheduler and cache that a prefill saves states on its way."""
        spec = super().get_kv_cache_spec(vllm_config)
        if (
            self.arithmetic.decode_equals_prefill
            or not current_platform.is_cuda()
            or spec.mamba_cache_mode != "align"
        ):
            return spec
        unit = vllm_config.cache_config.prefix_match_unit or spec.block_size
        alignment = grid.shared(self.arithmetic.grid, unit)
        return replace(spec, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=alignment)

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum[backend.NAME]

    def _forward_core(
        self, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor
    ) -> None:
        """Convolution and recurrence of one step.

        With the recurrent arithmetic all rows take one path.  With the chunk arithmetic:

        Stock runs the cached rows of a mixed step by other kernels than those of a step of cached
        rows only, so a request's bits would follow whether a prefill joined.  Here cached rows, which
        stand in front, always take the packed decode helper, and prefills the chunk path.

        Args:
            mixed_qkv: (tokens, q + k + v channels), cached rows first.
            b, a: (tokens, value heads), inputs of beta and of the gate.
            core_attn_out: (tokens, value heads, head_v_dim), written.

        """
        per_layer = get_forward_context().attn_metadata
        metadata = per_layer.get(self.prefix) if isinstance(per_layer, dict) else None
        if self.arithmetic.decode_equals_prefill:
            if metadata is not None:  # None while memory is profiled: there are no caches yet
                self._recurrent_core(self, metadata, mixed_qkv, b, a, core_attn_out)
            return
        if metadata is None or metadata.parts is None or not self.enable_packed_recurrent_decode:
            self._stock_core(metadata, mixed_qkv, b, a, core_attn_out)
            return
        decodes, prefills = metadata.parts
        rows = decodes.num_actual_tokens
        self._forward_core_decode_non_spec(
            mixed_qkv[:rows], b[:rows], a[:rows], core_attn_out[:rows], attn_metadata=decodes
        )
        per_layer[self.prefix] = prefills  # the only way to hand stock's core its metadata
        try:
            self._stock_core(prefills, mixed_qkv[rows:], b[rows:], a[rows:], core_attn_out[rows:])
        finally:
            per_layer[self.prefix] = metadata

    def _stock_core(
        self,
        metadata: Any,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        """Stock's, and the states that its prefill rows save on the way."""
        places = None if metadata is None else metadata.places
        if places is None:
            super()._forward_core(mixed_qkv, b, a, core_attn_out)
            return
        with checkpoint.saving(places):
            super()._forward_core(mixed_qkv, b, a, core_attn_out)
        conv_state, recurrent_state = self.kv_cache
        self._checkpoint_exporter.export(
            metadata.checkpoint,
            raw_qkv=mixed_qkv[metadata.num_decode_tokens :],
            conv_state=conv_state if is_conv_state_dim_first() else conv_state.transpose(-1, -2),
            cu_seqlens=metadata.prefill_query_start_loc,
            recurrent_checkpoint=places.states,
            recurrent_state=recurrent_state,
        )
