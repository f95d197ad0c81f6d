"""A plugin that makes stock vLLM serve GDN models under the flag, and changes nothing else.

That is what a one-line change of the backend's answer would give: a server that starts, and whose
bits follow the batch.  It is the base line for the cost of the rest.
"""

import functools
from typing import Any


def register() -> None:
    """Answer yes for the GDN backend.  For ``VLLM_BATCH_INVARIANT=1`` without vllm-invariant."""
    from vllm.model_executor.determinism import batch_invariant

    stock = batch_invariant.init_batch_invariance
    if not hasattr(stock, "support_only"):
        batch_invariant.init_batch_invariance = _with_support(stock)


def _with_support(stock: Any) -> Any:
    @functools.wraps(stock)
    def init_batch_invariance() -> None:
        from vllm.platforms import current_platform
        from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend

        backends: list[Any] = [GDNAttentionBackend]
        if current_platform.is_cpu():  # no batch-invariant mode of its own: only to try the scripts out
            from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

            backends.append(CPUAttentionBackend)
        else:
            stock()
        for backend in backends:
            backend.supports_batch_invariance = classmethod(lambda cls: True)

    init_batch_invariance.support_only = True  # type: ignore[attr-defined]
    return init_batch_invariance
