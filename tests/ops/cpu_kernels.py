"""Stock's CPU kernels of a GDN layer, called the way stock's layer calls them."""

import pytest
import torch

ops = pytest.importorskip("vllm._custom_ops", reason="vLLM is not installed")
if not hasattr(torch.ops._C, "chunk_gated_delta_rule_cpu"):
    pytest.skip("this vLLM is not a CPU build", allow_module_level=True)

CHANNELS, TAPS = 256, 4


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def starts(lengths: list[int]) -> list[int]:
    """Row boundaries of sequences laid end to end."""
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def as_served(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Reference inputs in the types the engine has them in: bf16, and g in float32."""
    q, k, v, g, beta = inputs
    return [q.bfloat16(), k.bfloat16(), v.bfloat16(), g, beta.bfloat16()]


def chunk(
    inputs: list[torch.Tensor], pool: torch.Tensor, lengths: list[int], slots: list[int]
) -> torch.Tensor:
    """Prefill sequences laid end to end.

    Args:
        inputs: (1, sum of lengths, ...) as from `as_served`.
        pool: (slots, value heads, key_dim, value_dim) float32, updated in place.
        lengths: tokens of each sequence.
        slots: where each sequence's state is.

    Returns:
        (1, sum of lengths, value heads, value_dim) bf16.

    """
    q, k, v, g, beta = (x.contiguous() for x in inputs)
    out, _ = ops.chunk_gated_delta_rule_cpu(
        query=q,
        key=k,
        value=v,
        g=g,
        beta=beta,
        initial_state=pool,
        output_final_state=True,
        cu_seqlens=int32(starts(lengths)),
        head_first=False,
        use_qk_l2norm_in_kernel=True,
        initial_state_indices=int32(slots),
    )
    return out


def update(
    inputs: list[torch.Tensor],
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    pool: torch.Tensor,
    slots: list[int],
) -> torch.Tensor:
    """Decode one token of each sequence.

    Args:
        inputs: ``[q, k, v]`` of (sequences, 1, heads, dim) and ``[a, b]`` of (sequences, value heads), bf16.
        a_log: (value heads,) float32.
        dt_bias: (value heads,) bf16.
        pool: as in `chunk`.
        slots: where each sequence's state is.

    Returns:
        (sequences, value heads, value_dim) bf16.

    """
    q, k, v = (x.transpose(0, 1).contiguous() for x in inputs[:3])
    a, b = (x.contiguous() for x in inputs[3:])
    out = ops.fused_sigmoid_gating_delta_rule_update_cpu(
        A_log=a_log,
        dt_bias=dt_bias,
        q=q,
        k=k,
        v=v,
        a=a,
        b=b,
        initial_state_source=pool,
        initial_state_indices=int32(slots),
        cu_seqlens=torch.arange(len(slots) + 1, dtype=torch.int32),
        use_qk_l2norm_in_kernel=True,
    )
    return out.reshape(len(slots), *v.shape[2:])


def conv_pool(slots: int) -> torch.Tensor:
    """(slots, channels, taps - 1) bf16, channels innermost in memory, as in the engine's cache."""
    return torch.zeros(slots, TAPS - 1, CHANNELS, dtype=torch.bfloat16).transpose(1, 2)


def conv_inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, channels) inputs and a (channels, taps) weight, bf16."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, CHANNELS, generator=generator)
    weight = 0.4 * torch.randn(CHANNELS, TAPS, generator=generator)
    return x.bfloat16(), weight.bfloat16()
