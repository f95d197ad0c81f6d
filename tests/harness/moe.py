"""Small mixtures of experts, and which experts an engine's tokens went to."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.engine import Engine
from vllm_invariant.demo.checkpoint import Shape, make_checkpoint

# Wide enough that a CPU's matrix products follow their row count where nothing prevents it.
WIDTHS = {"hidden_size": 512, "num_hidden_layers": 4, "moe_intermediate_size": 512}

# Both model classes; tokens of a router's two equal rows are tied exactly (see demo/checkpoint.py).
FAMILIES = {"moe": "Qwen3_5MoeForCausalLM", "next": "Qwen3NextForCausalLM"}


def make(folder: Path, family: str, **more: Any) -> Path:
    """A checkpoint of one of the families, without a tokenizer."""
    return make_checkpoint(folder / family, Shape(config=WIDTHS, family=family, **more), tokenizer=False)


@contextmanager
def routing(engine: Engine) -> Iterator[list[torch.Tensor]]:
    """Collect (tokens, top k) experts of every call of every layer's router, while eager."""
    seen: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        for layer in engine.runner.get_model().model.layers:
            router = layer.mlp.experts.router
            patch.setattr(router, "select_experts", _recorded(router.select_experts, seen))
        yield seen


def _recorded(stock: Any, seen: list[torch.Tensor]) -> Any:
    def select_experts(*args: Any, **kwargs: Any) -> Any:
        weights, ids = stock(*args, **kwargs)
        seen.append(ids.cpu().clone())
        return weights, ids

    return select_experts
