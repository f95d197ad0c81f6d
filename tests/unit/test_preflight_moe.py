"""Refusals that concern mixtures of experts alone."""

from types import SimpleNamespace as Fake

import pytest

from tests.unit.test_preflight import engine, refusal
from vllm_invariant import preflight


def with_experts(architecture: str = "Qwen3_5MoeForCausalLM", **fields: object) -> Fake:
    """An engine config of a mixture of experts, with fields set by name in any of its sections."""
    config = engine()
    config.model_config.architecture = architecture
    config.model_config.multimodal_config = Fake(language_model_only=True)
    config.model_config.hf_text_config = Fake(norm_topk_prob=True)
    config.kernel_config = Fake(moe_backend="auto")
    sections = (config.model_config.hf_text_config, config.kernel_config, config.parallel_config)
    for name, value in fields.items():
        owner = next(section for section in sections if hasattr(section, name))
        setattr(owner, name, value)
    return config


@pytest.mark.parametrize("architecture", preflight.EXPERTS)
def test_is_accepted(architecture: str) -> None:
    preflight.check_engine(with_experts(architecture))
    preflight.check_engine(with_experts(architecture, moe_backend="triton"))
    for apart in (False, True):
        preflight.check_engine(
            with_experts(architecture, tensor_parallel_size=2, enable_expert_parallel=apart)
        )


@pytest.mark.parametrize("architecture", preflight.EXPERTS)
@pytest.mark.parametrize(
    ("fields", "names", "works"),
    [
        ({"enable_expert_parallel": True}, "--enable-expert-parallel", "--no-enable-expert-parallel"),
        (
            {"tensor_parallel_size": 2, "enable_expert_parallel": True, "all2all_backend": "passthrough"},
            "--all2all-backend passthrough",
            "--all2all-backend allgather_reducescatter",
        ),
        (
            {
                "tensor_parallel_size": 2,
                "enable_expert_parallel": True,
                "expert_placement_strategy": "round_robin",
            },
            "--expert-placement-strategy round_robin",
            "--expert-placement-strategy linear",
        ),
        ({"moe_backend": "flashinfer_cutlass"}, "--moe-backend flashinfer_cutlass", "--moe-backend auto"),
        ({"moe_backend": "batched_triton"}, "--moe-backend batched_triton", "--moe-backend auto"),
        ({"norm_topk_prob": False}, "norm_topk_prob=false", "normalizes router weights"),
    ],
    ids=str,
)
def test_refusals(architecture: str, fields: dict[str, object], names: str, works: str) -> None:
    option, use = refusal(with_experts(architecture, **fields)).split("; use ")
    assert names in option and works in use


@pytest.mark.parametrize("architecture", preflight.EXPERTS)
def test_the_recurrent_arithmetic_is_for_the_cpu(architecture: str) -> None:
    config = with_experts(architecture)
    config.additional_config = {"vllm_invariant": {"gdn_arithmetic": "recurrent"}}
    option, use = refusal(config).split("; use ")
    assert "a mixture of experts on a GPU" in option and 'gdn_arithmetic="chunk"' in use
    config.device_config.device_type = "cpu"
    preflight.check_engine(config)


@pytest.mark.parametrize("architecture", preflight.WRAPPERS)
def test_images_are_refused(architecture: str) -> None:
    config = with_experts(architecture)
    config.model_config.multimodal_config.language_model_only = False
    assert "image and video input" in refusal(config)


def test_a_dense_model_is_not_asked() -> None:
    """Its config need not have the fields."""
    preflight.check_engine(engine())
