"""What is not shown for mixtures of experts is refused at start, before a model is loaded."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness import moe
from tests.harness.engine import Engines

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Engine configs of a mixture of experts."""
    yield Engines(moe.make(tmp_path_factory.mktemp("moe"), "next"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"enable_expert_parallel": True}, ["--enable-expert-parallel", "use --no-enable-expert-parallel"]),
        (
            {"moe_backend": "flashinfer_cutlass"},
            ["--moe-backend flashinfer_cutlass", "use --moe-backend auto"],
        ),
        (
            {"hf_overrides": {"norm_topk_prob": False}},
            ["norm_topk_prob=false", "use a model that normalizes router weights"],
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused(mixtures: Engines, options: dict[str, Any], words: list[str]) -> None:
    """One option at a time."""
    with pytest.raises(ValueError) as error:
        mixtures.config(**options)
    assert "VLLM_BATCH_INVARIANT=1: " in str(error.value)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_without_them_it_is_accepted(mixtures: Engines) -> None:
    """Otherwise the refusals above would prove nothing."""
    assert mixtures.config().model_config.architecture == "Qwen3NextForCausalLM"
