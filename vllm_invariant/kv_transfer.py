# In a vLLM branch: vllm/distributed/kv_transfer/kv_connector/v1/ssm_conv_transfer_utils.py.
"""KV transfer treats our enum member as stock's ``GDN_ATTN``.

The helper that splits a convolution state among tensor-parallel ranks knows state layouts by enum
member.  A Qwen GDN state has one layout, whichever member its backend goes by.  (KV connectors are
refused under the flag until they are shown; this keeps the helper's behaviour, it does not claim more.)
"""

import functools
from dataclasses import replace
from typing import Any

from vllm_invariant import backend


def split_as_gdn(stock: Any) -> Any:
    """Wrap stock's ``derive_mamba_conv_split``."""

    @functools.wraps(stock)
    def derive_mamba_conv_split(mamba_spec: Any, local_tp: int) -> Any:
        """``mamba_spec``: stock's ``MambaSpec``, not written to.  Raises what stock raises."""
        member = mamba_spec.mamba_type
        if getattr(member, "name", None) == backend.NAME:
            mamba_spec = replace(mamba_spec, mamba_type=type(member)["GDN_ATTN"])
        return stock(mamba_spec, local_tp)

    return derive_mamba_conv_split
