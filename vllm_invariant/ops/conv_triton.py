# In a vLLM branch: vllm/model_executor/layers/mamba/ops/causal_conv1d.py.
"""The GDN layer's short convolution, with one order of rounding for prefill, decode and verification.

    y_t = silu(bias + w_0 x_{t-W+1} + ... + w_{W-1} x_t),    taps added oldest first, in float32

An output is computed by one thread from W inputs and nothing else, by the same code whatever the length
of its sequence.  Inputs from before a chunk come out of the state, which holds the last W - 1 of them as
they were, so a chunk may end anywhere.

Two kernels, because one program's outputs need a state that another would overwrite: the first computes
outputs, the second moves each sequence's state on.

Shape letters: N sequences, T tokens of all of them laid end to end, D channels, W taps.
"""

import torch
import triton
import triton.language as tl

from vllm_invariant.ops.recurrent_triton import all_begun

# Element-wise: no choice here reaches the bits.
BT, BD, BN, WARPS = 4, 256, 64, 4


@triton.jit
def _input(p_x, p_pool, x_stride, tap_stride, channel_stride, row, position, o_d, m, begun, W: tl.constexpr):
    """Inputs at ``position`` of a sequence, which is row ``row`` of x; before position 0, the state."""
    b_x = tl.load(p_x + row * x_stride + o_d, mask=m & (position >= 0), other=0.0)
    p_old = p_pool + (position + W - 1) * tap_stride + o_d * channel_stride
    b_old = tl.load(p_old, mask=m & (position < 0) & begun, other=0.0)
    return tl.where(position >= 0, b_x.to(tl.float32), b_old.to(tl.float32))


@triton.jit(do_not_specialize=["sequences"])
def conv_kernel(
    p_x,
    p_weight,
    p_bias,
    p_pool,
    p_out,
    p_slots,
    p_begun,
    p_starts,
    sequences,
    x_stride: tl.constexpr,
    slot_stride: tl.constexpr,
    tap_stride: tl.constexpr,
    channel_stride: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    BIAS: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
):
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    # A row belongs to the sequence behind all those that have ended by it.
    i_n = tl.zeros((BT,), dtype=tl.int32)
    for j in range(0, sequences, BN):
        o_n = j + tl.arange(0, BN)
        ends = tl.load(p_starts + 1 + o_n, mask=o_n < sequences, other=2147483647)
        i_n += tl.sum((ends[None, :] <= o_t[:, None]).to(tl.int32), 1)
    m_t = i_n < sequences
    first = tl.load(p_starts + i_n, mask=m_t, other=0)
    slot = tl.load(p_slots + i_n, mask=m_t, other=0)
    begun = m_t & (slot > 0) & (tl.load(p_begun + i_n, mask=m_t, other=0) != 0)

    m = m_t[:, None] & (o_d < D)[None, :]
    p_old = p_pool + slot.to(tl.int64)[:, None] * slot_stride
    row, position = o_t.to(tl.int64)[:, None], (o_t - first)[:, None]
    b_y = tl.zeros((BT, BD), dtype=tl.float32)
    if BIAS:
        b_y += tl.load(p_bias + o_d, mask=o_d < D, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(W):
        back = W - 1 - tap
        b_x = _input(
            p_x, p_old, x_stride, tap_stride, channel_stride,
            row - back, position - back, o_d[None, :], m, begun[:, None], W,
        )  # fmt: skip
        b_y += b_x * tl.load(p_weight + o_d * W + tap, mask=o_d < D, other=0.0).to(tl.float32)[None, :]
    b_y = b_y / (1.0 + tl.exp(-b_y))
    tl.store(p_out + row * D + o_d[None, :], b_y.to(p_out.dtype.element_ty), mask=m)


@triton.jit
def state_kernel(
    p_x,
    p_pool,
    p_slots,
    p_begun,
    p_starts,
    x_stride: tl.constexpr,
    slot_stride: tl.constexpr,
    tap_stride: tl.constexpr,
    channel_stride: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    BD: tl.constexpr,
):
    i_n = tl.program_id(0)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    first, last = tl.load(p_starts + i_n), tl.load(p_starts + i_n + 1)
    slot = tl.load(p_slots + i_n)
    o_begun = tl.where(tl.load(p_begun + i_n) != 0, D, 0)
    p_old = p_pool + slot.to(tl.int64) * slot_stride
    m = o_d < tl.where((last > first) & (slot > 0), D, 0)
    # Upwards, a place is read before it is written: token by token the state only moves down.
    for place in tl.static_range(W - 1):
        row = (last - (W - 1) + place).to(tl.int64) + tl.zeros((BD,), dtype=tl.int64)
        b_x = _input(
            p_x, p_old, x_stride, tap_stride, channel_stride, row, row - first, o_d, m, o_d < o_begun, W
        )
        p_new = p_old + place * tap_stride + o_d * channel_stride
        tl.store(p_new, b_x.to(p_pool.dtype.element_ty), mask=m)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pool: torch.Tensor,
    *,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    has_initial_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """Depthwise causal convolution, then SiLU, of sequences laid end to end.

    Args:
        x: (T, D), channels contiguous.
        weight: (D, W), contiguous; the tap of the newest token last.
        bias: (D,).
        pool: (slots, W - 1, D), any strides: each sequence's last inputs, newest last; updated in place.
        slots: (N,) int32; a sequence whose slot is not positive is padding and leaves no state.
        cu_seqlens: (N + 1,) int32, first row of each sequence.
        has_initial_state: (N,) bool; a sequence without one starts from zeros.  All have one by default.

    Returns:
        (T, D), contiguous; rows behind the last sequence are left as they are.

    Raises:
        ValueError: if channels or taps do not fit.

    """
    tokens, channels = x.shape
    taps = weight.shape[1]
    if weight.shape[0] != channels or pool.shape[1:] != (taps - 1, channels):
        raise ValueError(f"weight {tuple(weight.shape)} and pool {tuple(pool.shape)} do not fit {channels}")
    if x.stride(1) != 1 or not (weight.is_contiguous() and slots.is_contiguous()):
        raise ValueError("x must have contiguous channels; weight and slots must be contiguous")
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    begun = all_begun(x.device) if has_initial_state is None else has_initial_state.view(torch.uint8)
    blocks = triton.cdiv(channels, BD)
    shape = {
        "x_stride": x.stride(0),
        "slot_stride": pool.stride(0),
        "tap_stride": pool.stride(1),
        "channel_stride": pool.stride(2),
        "D": channels,
        "W": taps,
        "BD": BD,
        "num_warps": WARPS,
    }
    conv_kernel[(triton.cdiv(tokens, BT), blocks)](
        x, weight, bias, pool, out, slots, begun, cu_seqlens, len(slots),
        BIAS=bias is not None, BT=BT, BN=BN, **shape,
    )  # fmt: skip
    state_kernel[(len(slots), blocks)](x, pool, slots, begun, cu_seqlens, **shape)
    return out
