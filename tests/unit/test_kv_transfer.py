"""The KV-transfer helper splits a QWEN_GDN_ATTN state exactly as it splits a GDN_ATTN state."""

import pytest
import torch

utils = pytest.importorskip(
    "vllm.distributed.kv_transfer.kv_connector.v1.ssm_conv_transfer_utils", reason="vLLM is not installed"
)
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum  # noqa: E402
from vllm.v1.kv_cache_interface import MambaSpec  # noqa: E402

from vllm_invariant import backend, kv_transfer  # noqa: E402

STOCK = getattr(utils.derive_mamba_conv_split, "__wrapped__", utils.derive_mamba_conv_split)


@pytest.fixture(autouse=True)
def channels_first(monkeypatch):
    """The only layout the helper takes."""
    monkeypatch.setattr(utils, "is_conv_state_dim_first", lambda: True)


@pytest.fixture
def ours():
    if backend.NAME not in MambaAttentionBackendEnum.__members__:
        MambaAttentionBackendEnum.register(backend.NAME, "vllm_invariant.backend.QwenGDNAttentionBackend")
    return MambaAttentionBackendEnum[backend.NAME]


def spec(member) -> MambaSpec:
    """2 key heads and 4 value heads of 128."""
    return MambaSpec(
        block_size=320,
        shapes=((2 * 256 + 512, 3), (4, 128, 128)),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_type=member,
    )


def test_our_member_is_split_as_gdn(ours):
    given = spec(ours)
    split = kv_transfer.split_as_gdn(STOCK)(given, 1)
    assert split == STOCK(spec(MambaAttentionBackendEnum.GDN_ATTN), 1)
    assert split.local_proj_dims == (256, 256, 512)
    assert given.mamba_type is ours, "the spec itself keeps our member"


def test_stock_alone_refuses_it(ours):
    """The reason for the wrapper: once this fails, the module can go."""
    with pytest.raises(NotImplementedError):
        STOCK(spec(ours), 1)


def test_others_are_passed_through():
    wrapped = kv_transfer.split_as_gdn(STOCK)
    with pytest.raises(NotImplementedError):
        wrapped(spec(MambaAttentionBackendEnum.LINEAR), 1)
    gdn = spec(MambaAttentionBackendEnum.GDN_ATTN)
    assert wrapped(gdn, 1) == STOCK(gdn, 1)
