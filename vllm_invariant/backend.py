# In a vLLM branch: vllm/v1/attention/backends/gdn_attn.py.
"""The attention backend of Qwen's GDN layers, with its claim of batch invariance.

Kimi, OLMo, Bailing and Qwen4Exp share stock's ``GDN_ATTN``; nobody has shown the promise for them,
so that backend keeps refusing.  Ours is a member of its own, ``QWEN_GDN_ATTN``.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

from vllm_invariant import checkpoint
from vllm_invariant.arithmetic import Arithmetic
from vllm_invariant.config import InvariantConfig

NAME = "QWEN_GDN_ATTN"


def prefill_remainders(is_prefilling: torch.Tensor, query_lens: torch.Tensor) -> torch.Tensor:
    """Rows that hold the single last token of a prompt.

    Args:
        is_prefilling: (requests,) bool, prompt tokens are still being computed.
        query_lens: (requests,) integer, tokens of each request in this step.

    Returns:
        (requests,) bool.

    """
    return is_prefilling & (query_lens == 1)


@dataclass
class QwenGDNAttentionMetadata(GDNAttentionMetadata):
    """Stock's, and what our layer reads besides.

    Attributes:
        parts: of a mixed step of the chunk arithmetic on a GPU: metadata of its cached rows, of its prefills.
        places: where prefill rows save states on their way.
        longest: tokens of the step's longest row, which the recurrent arithmetic picks a launch by.

    """

    parts: tuple[Any, Any] | None = None
    places: checkpoint.Places | None = None
    longest: int = 0


class QwenGDNAttentionBackend(GDNAttentionBackend):
    """GDN backend of the Qwen layers.  The gate has already judged device and release."""

    @staticmethod
    def get_name() -> str:
        return NAME

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @staticmethod
    def get_builder_cls() -> type["QwenGDNAttentionMetadataBuilder"]:
        return QwenGDNAttentionMetadataBuilder


class QwenGDNAttentionMetadataBuilder(GDNAttentionMetadataBuilder):
    """Classifies a row by whether its request is still prefilling, not by its length.

    Stock runs a one-token remainder of a prompt by the decode kernel.  Whether there is such a
    remainder depends on where the cut before it fell, so it would move bits (length = 1 mod 64).
    Where decode and prefill are one recurrence there is nothing to tell apart.
    """

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # One build serves every state group.  Stock's class does this for itself, not for subclasses.
        self.supports_update_block_table = device.type == "cuda" and vllm_config.use_v2_model_runner
        if self.supports_update_block_table:
            self.mamba_aligned_state_indices: torch.Tensor | None = None

    @cached_property
    def arithmetic(self) -> Arithmetic:
        """The engine's GDN arithmetic."""
        return InvariantConfig.from_additional_config(self.vllm_config.additional_config).arithmetic

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        num_accepted_tokens: torch.Tensor | None = None,
        num_decode_draft_tokens_cpu: torch.Tensor | None = None,
        fast_build: bool = False,
    ) -> Any:
        m = common_attn_metadata
        one_recurrence = self.arithmetic.decode_equals_prefill
        if not one_recurrence and m.is_prefilling is not None and m.seq_lens_cpu_upper_bound is not None:
            remainder = prefill_remainders(m.is_prefilling, m.query_start_loc_cpu.diff())
            if bool(remainder.any()):
                # Stock's builder takes a one-token row for a prefill only where nothing was
                # computed before it, which it reads from this bound and from nothing else; the
                # state a row starts from is decided by the real lengths.
                bound = torch.where(remainder, 1, m.seq_lens_cpu_upper_bound)
                m = m.replace(seq_lens_cpu_upper_bound=bound.to(m.seq_lens_cpu_upper_bound.dtype))
        stock = super().build(
            common_prefix_len, m, num_accepted_tokens, num_decode_draft_tokens_cpu, fast_build
        )
        metadata: Any = QwenGDNAttentionMetadata(**vars(stock), longest=m.max_query_len)
        if one_recurrence:
            return metadata
        metadata.checkpoint = checkpoint.of_prefills(
            metadata.checkpoint, metadata.num_decodes, metadata.num_prefills
        )
        if metadata.checkpoint is not None:
            saved = metadata.checkpoint
            metadata.places = checkpoint.find_places(saved.offsets, saved.query_lens, self.device)
        mixed = metadata.num_decodes > 0 and metadata.num_prefills > 0
        if mixed and metadata.spec_sequence_masks is None and self.device.type == "cuda":
            metadata.parts = split_step(metadata, m.query_start_loc_cpu)
        return metadata

    def update_block_table(self, metadata: Any, blk_table: torch.Tensor, slot_mapping: torch.Tensor) -> Any:
        """Another group's metadata of the same step: only the slots differ."""
        updated = super().update_block_table(metadata, blk_table, slot_mapping)
        if updated.parts is not None:
            decodes, prefills = updated.parts
            slots = updated.non_spec_state_indices_tensor
            updated.parts = (
                replace(decodes, non_spec_state_indices_tensor=slots[: decodes.num_decodes]),
                replace(
                    prefills,
                    non_spec_state_indices_tensor=updated.prefill_state_indices,
                    prefill_state_indices=updated.prefill_state_indices,
                    checkpoint=updated.checkpoint,
                ),
            )
        return updated


def split_step(metadata: Any, query_start_loc_cpu: torch.Tensor) -> tuple[Any, Any]:
    """Metadata of a mixed step as that of its cached rows and that of its prefills.

    Args:
        metadata: of the whole step, cached rows first.
        query_start_loc_cpu: (requests + 1,) first row of each request, on the CPU.

    """
    cached, rows = metadata.num_decodes, metadata.num_decode_tokens
    last = cached + metadata.num_prefills
    decodes = replace(
        metadata,
        num_prefills=0,
        num_prefill_tokens=0,
        num_actual_tokens=rows,
        has_initial_state=None,
        non_spec_query_start_loc=metadata.non_spec_query_start_loc[: cached + 1],
        non_spec_state_indices_tensor=metadata.non_spec_state_indices_tensor[:cached],
        checkpoint=None,
    )
    nums_dict, batch_ptr, token_chunk_offset_ptr = compute_causal_conv1d_metadata(
        query_start_loc_cpu[cached : last + 1] - rows, device=metadata.non_spec_query_start_loc.device
    )
    prefills = replace(
        metadata,
        num_decodes=0,
        num_decode_tokens=0,
        num_actual_tokens=metadata.num_prefill_tokens,
        has_initial_state=metadata.prefill_has_initial_state,
        non_spec_query_start_loc=metadata.prefill_query_start_loc,
        non_spec_state_indices_tensor=metadata.prefill_state_indices,
        nums_dict=nums_dict,
        batch_ptr=batch_ptr,
        token_chunk_offset_ptr=token_chunk_offset_ptr,
    )
    return decodes, prefills
