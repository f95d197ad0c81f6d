"""transformers as an oracle: its own PyTorch functions, on any machine."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

# Functions that transformers hands to a kernel package as soon as that package is installed.  fla-core is,
# for its naive forms; its kernels need a GPU and are no oracle.
DISPATCHED = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
)


@contextmanager
def plain_transformers() -> Iterator[ModuleType]:
    """transformers' Qwen3.5 module with its own PyTorch functions in place."""
    from transformers.models.qwen3_5 import modeling_qwen3_5

    with pytest.MonkeyPatch.context() as patch:
        for name in DISPATCHED:
            patch.setattr(modeling_qwen3_5, name, inspect.unwrap(getattr(modeling_qwen3_5, name)))
        yield modeling_qwen3_5
