"""A mixed step's metadata as that of its cached rows and that of its prefills."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.tolerance import assert_bitwise

# Query lengths of a step: three cached rows, then prompts of 5, 1 and 70 tokens.
LENGTHS = [1, 1, 1, 5, 1, 70]
CACHED = 3
FRESH = [True, False, True]  # which of the prompts starts from nothing


@pytest.fixture(scope="module")
def parts():
    """The whole step's metadata, and its two parts."""
    from vllm_invariant.backend import QwenGDNAttentionMetadata, split_step

    starts = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    slots = torch.arange(11, 11 + len(LENGTHS), dtype=torch.int32)
    has_state = torch.tensor([True] * CACHED + [not fresh for fresh in FRESH])
    whole = QwenGDNAttentionMetadata(
        num_prefills=len(FRESH),
        num_prefill_tokens=sum(LENGTHS[CACHED:]),
        num_decodes=CACHED,
        num_decode_tokens=CACHED,
        num_spec_decodes=0,
        num_spec_decode_tokens=0,
        num_actual_tokens=sum(LENGTHS),
        has_initial_state=has_state,
        non_spec_query_start_loc=starts,
        non_spec_state_indices_tensor=slots,
        chunk_indices=torch.tensor([[0, 0], [1, 0], [2, 0], [2, 1]]),
        chunk_offsets=torch.tensor([0, 1, 2, 4]),
        prefill_query_start_loc=starts[CACHED:] - CACHED,
        prefill_state_indices=slots[CACHED:],
        prefill_has_initial_state=has_state[CACHED:],
    )
    return whole, *split_step(whole, starts)


def test_cached_rows(parts) -> None:
    """They look like a step of decodes only, which is what the packed helper takes."""
    whole, decodes, _ = parts
    assert (decodes.num_prefills, decodes.num_prefill_tokens) == (0, 0)
    assert decodes.num_decodes == decodes.num_decode_tokens == decodes.num_actual_tokens == CACHED
    assert decodes.has_initial_state is None
    assert decodes.non_spec_query_start_loc.tolist() == [0, 1, 2, 3]
    assert_bitwise(decodes.non_spec_state_indices_tensor, whole.non_spec_state_indices_tensor[:CACHED])


def test_prefills(parts) -> None:
    """They look like a step of prefills only: starts from 0, their own slots, the same chunks."""
    whole, _, prefills = parts
    assert (prefills.num_decodes, prefills.num_decode_tokens) == (0, 0)
    assert prefills.num_prefills == len(FRESH)
    assert prefills.num_actual_tokens == prefills.num_prefill_tokens == sum(LENGTHS[CACHED:])
    assert prefills.non_spec_query_start_loc.tolist() == [0, 5, 6, 76]
    assert prefills.non_spec_state_indices_tensor.tolist() == [14, 15, 16]
    assert prefills.has_initial_state.tolist() == [not fresh for fresh in FRESH]
    assert prefills.chunk_indices is whole.chunk_indices and prefills.chunk_offsets is whole.chunk_offsets


def test_convolution_blocks_of_prefills(parts) -> None:
    """Stock's convolution takes 8 tokens a program: ceil(5 / 8), ceil(1 / 8) and ceil(70 / 8) of them."""
    _, _, prefills = parts
    assert prefills.nums_dict[8]["tot"] == 1 + 1 + 9
    assert prefills.batch_ptr[:12].tolist() == [0, 1] + [2] * 9 + [prefills.batch_ptr[-1]]
    assert prefills.token_chunk_offset_ptr[:11].tolist() == [0, 0, *range(9)]


def test_the_whole_step_is_left_alone(parts) -> None:
    """The split copies: stock's other layers read the same object."""
    whole, _, _ = parts
    assert whole.num_decodes == CACHED and whole.num_prefills == len(FRESH)
    assert whole.non_spec_query_start_loc.tolist() == [0, 1, 2, 3, 8, 9, 79]


def test_remainders_are_single_tokens_of_a_prompt() -> None:
    """Neither a decode nor a longer chunk is one."""
    from vllm_invariant.backend import prefill_remainders

    prefilling = torch.tensor([False, True, True, False])
    lengths = torch.tensor([1, 1, 64, 2])
    assert prefill_remainders(prefilling, lengths).tolist() == [False, True, False, False]


def test_another_groups_slots(parts) -> None:
    """One build serves every state group: the next group's metadata differs in its slots alone."""
    from vllm_invariant.backend import QwenGDNAttentionMetadataBuilder

    whole, decodes, prefills = parts
    first = replace(whole, parts=(decodes, prefills), longest=70)
    builder = object.__new__(QwenGDNAttentionMetadataBuilder)
    builder.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(mamba_cache_mode="align"))
    builder.num_spec, builder.use_full_cuda_graph = 0, False
    slots = torch.arange(31, 31 + len(LENGTHS), dtype=torch.int32)
    builder.mamba_aligned_state_indices = slots[:, None]
    second = builder.update_block_table(first, slots[:, None], torch.empty(0))
    assert second.longest == 70 and second.prefill_state_indices.tolist() == slots[CACHED:].tolist()
    cached, rest = second.parts
    assert cached.non_spec_state_indices_tensor.tolist() == slots[:CACHED].tolist()
    assert rest.non_spec_state_indices_tensor.tolist() == slots[CACHED:].tolist()
    assert rest.prefill_state_indices.tolist() == slots[CACHED:].tolist()
    assert first.parts[0].non_spec_state_indices_tensor.tolist() == [11, 12, 13]
    assert rest.chunk_indices is prefills.chunk_indices and rest.nums_dict is prefills.nums_dict
