"""Which rows of a step are a prompt's one-token remainder."""

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm_invariant import backend


def test_a_remainder_is_one_token_of_a_request_that_still_prefills():
    prefilling = torch.tensor([True, True, False, False, True])
    lengths = torch.tensor([1, 2, 1, 3, 64])
    assert backend.prefill_remainders(prefilling, lengths).tolist() == [True, False, False, False, False]


def test_the_claim_is_our_backends_own():
    stock = backend.GDNAttentionBackend
    assert backend.QwenGDNAttentionBackend.supports_batch_invariance()
    assert not stock.supports_batch_invariance()
    assert backend.QwenGDNAttentionBackend.get_name() == "QWEN_GDN_ATTN" != stock.get_name()
    assert issubclass(backend.QwenGDNAttentionBackend.get_builder_cls(), stock.get_builder_cls())
