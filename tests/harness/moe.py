"""Small mixtures of experts, and which experts an engine's tokens went to."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_invariant.demo.checkpoint import Shape, make_checkpoint

# Wide enough that a CPU's matrix products follow their row count where nothing prevents it.
WIDTHS = {"hidden_size": 512, "num_hidden_layers": 4, "moe_intermediate_size": 512}

# Both model classes; tokens of a router's two equal rows are tied exactly (see demo/checkpoint.py).
FAMILIES = {"moe": "Qwen3_5MoeForCausalLM", "next": "Qwen3NextForCausalLM"}


def make(folder: Path, family: str, **more: Any) -> Path:
    """A checkpoint of one of the families."""
    return make_checkpoint(folder / family, Shape(config=WIDTHS, family=family, **more))


@contextmanager
def routing() -> Iterator[list[torch.Tensor]]:
    """Collect (tokens, top k) experts of every router call of this process, while eager."""
    from vllm.model_executor.layers.fused_moe.router.fused_moe_router import FusedMoERouter

    seen: list[torch.Tensor] = []
    stock = FusedMoERouter.select_experts

    def select_experts(*args: Any, **kwargs: Any) -> Any:
        weights, ids = stock(*args, **kwargs)
        seen.append(ids.cpu().clone())
        return weights, ids

    # On the class: undone on an instance, the patch would leave the stock method behind there.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedMoERouter, "select_experts", select_experts)
        yield seen
