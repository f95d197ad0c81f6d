# In a vLLM branch: vllm/third_party/flash_linear_attention/ops/recurrent_invariant.py.
"""The recurrent arithmetic in Triton: one kernel for prefill, decode and verification.

One token of one value head, with a state ``S`` of (V, K), in this order and in float32:

    S = exp(g) S,    r = S k,    w = beta (v - r),    S = S + w k^T,    o = S q

``k`` and ``q`` are L2-normalised, ``q`` is scaled by ``K ** -0.5``, ``beta = sigmoid(b)`` and
``g = -exp(A_log) softplus(a + dt_bias)``.

A program holds `BV` rows of one head's state in registers and walks one sequence.  What the walk does
for a token is the same text, compiled once, whether the sequence brings one token or thousands and
whether each state is kept or only the last.  The order of the sums over K follows from the layout of the
tile among threads, so what the layout is made from is fixed: tile, warps, and every stride that enters an
address are compile-time constants, and no count is specialised on its value.

Shape letters: N sequences, T tokens, W states kept a sequence, H key heads, G value heads (a multiple
of H), K key_dim, V value_dim.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class Launch:
    """Rows of a state that one program holds, and its warps."""

    BV: int
    warps: int


# By (K, V).  Another row gives other bits.
LAUNCH = {(128, 128): Launch(BV=32, warps=4)}

SEQUENCES = 1 << 14  # most sequences of a step that need no answer of their own to "goes on from a state"


@triton.jit(do_not_specialize=["slots_stride", "kept"])
def recurrent_kernel(
    p_qkv,
    p_a,
    p_b,
    p_A_log,
    p_dt_bias,
    p_state,
    p_out,
    p_slots,
    p_sources,
    p_begun,
    p_starts,
    slots_stride,
    kept,
    scale: tl.constexpr,
    qkv_stride: tl.constexpr,
    a_stride: tl.constexpr,
    b_stride: tl.constexpr,
    state_stride: tl.constexpr,
    out_stride: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
):
    i_v, i_g, i_n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_h = i_g // (G // H)
    o_k = tl.arange(0, K)
    o_v = i_v * BV + tl.arange(0, BV)
    o_s = i_g * V * K + o_v[:, None] * K + o_k[None, :]

    first, last = tl.load(p_starts + i_n), tl.load(p_starts + i_n + 1)
    source = tl.load(p_sources + i_n)
    live = tl.load(p_slots + i_n * slots_stride) > 0
    begun = (tl.load(p_begun + i_n) != 0) & (source > 0)
    b_s = tl.load(
        p_state + source.to(tl.int64) * state_stride + o_s,
        mask=o_s < tl.where(begun, G * V * K, 0),
        other=0.0,
    )

    decay = -tl.exp(tl.load(p_A_log + i_g).to(tl.float32))
    shift = tl.load(p_dt_bias + i_g).to(tl.float32)
    row = first.to(tl.int64)
    for t in range(first, last):
        p_row = p_qkv + row * qkv_stride
        b_q = tl.load(p_row + i_h * K + o_k).to(tl.float32)
        b_k = tl.load(p_row + H * K + i_h * K + o_k).to(tl.float32)
        b_v = tl.load(p_row + 2 * H * K + i_g * V + o_v).to(tl.float32)
        x = tl.load(p_a + row * a_stride + i_g).to(tl.float32) + shift
        beta = tl.sigmoid(tl.load(p_b + row * b_stride + i_g).to(tl.float32))

        b_q = b_q / tl.sqrt(tl.sum(b_q * b_q, 0) + 1e-6) * scale
        b_k = b_k / tl.sqrt(tl.sum(b_k * b_k, 0) + 1e-6)
        alpha = tl.exp(decay * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x))))

        b_s *= alpha
        b_w = beta * (b_v - tl.sum(b_s * b_k[None, :], 1))
        b_s += b_w[:, None] * b_k[None, :]
        b_o = tl.where(live, tl.sum(b_s * b_q[None, :], 1), 0.0)
        tl.store(p_out + row * out_stride + i_g * V + o_v, b_o.to(p_out.dtype.element_ty))

        if (kept > 0) | (t + 1 == last):
            column = tl.where(kept > 0, t - first, 0)
            slot = tl.load(p_slots + i_n * slots_stride + column)
            tl.store(
                p_state + slot.to(tl.int64) * state_stride + o_s,
                b_s,
                mask=o_s < tl.where(live & (slot > 0), G * V * K, 0),
            )
        row += 1


@lru_cache(maxsize=8)
def all_begun(device: torch.device) -> torch.Tensor:
    """`SEQUENCES` ones.  Kept for good, so that a CUDA graph may hold its address."""
    return torch.ones(SEQUENCES, dtype=torch.uint8, device=device)


@lru_cache(maxsize=8)
def _one_row_each(device: torch.device) -> torch.Tensor:
    return torch.arange(SEQUENCES + 1, dtype=torch.int32, device=device)


def recurrent_step(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    out: torch.Tensor,
    *,
    slots: torch.Tensor,
    max_query_len: int = 0,
    cu_seqlens: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    initial_slots: torch.Tensor | None = None,
    num_accepted: torch.Tensor | None = None,
) -> None:
    """The recurrence over N sequences, in place on ``state`` and ``out``.  One launch.

    Args:
        mixed_qkv: (T, 2 H K + G V) bfloat16, after the convolution: q heads, k heads, v heads; row stride a
            multiple of 8.
        a, b: (T, G), rows may be strided.
        A_log, dt_bias: (G,).
        state: (slots, G, V, K) float32; slot stride a multiple of 4.
        out: (T, G, V), written; a row's heads contiguous.
        slots: int32.  (N,): where a sequence's state is read from and its last state written to.
            (N, W): token ``j`` of a sequence writes its state to ``slots[n, j]`` (verification).
            A sequence whose first slot is not positive (vLLM's null block) is padding: its rows of ``out``
            become zeros and no state is touched.
        max_query_len: not used: the launch is the same for any length.
        cu_seqlens: (N + 1,) int32, first row of each sequence; by default one row a sequence.
        has_initial_state: (N,) bool; a sequence without one starts from zeros.  All have one by default.
        initial_slots: (N,) int32, where to read states from if not from where they are written.
        num_accepted: (N,) int32, only with (N, W) slots: sequence ``n`` reads its state from
            ``slots[n, num_accepted[n] - 1]``.

    Raises:
        ValueError: for head sizes without a launch, or tensors of the wrong shape, type or alignment.

    """
    sequences, value_heads, value_dim, key_dim = len(slots), *state.shape[1:]
    key_heads = (mixed_qkv.shape[1] - value_heads * value_dim) // (2 * key_dim)
    if (key_dim, value_dim) not in LAUNCH:
        known = ", ".join(f"{k}x{v}" for k, v in LAUNCH)
        raise ValueError(f"no pinned launch for heads of {key_dim}x{value_dim} (known: {known})")
    _check(mixed_qkv, state, out, key_heads)
    if num_accepted is not None:
        initial_slots = slots.gather(1, (num_accepted.long() - 1).unsqueeze(1)).squeeze(1)
    elif initial_slots is None:
        initial_slots = slots if slots.dim() == 1 else slots[:, 0].contiguous()
    starts = _one_row_each(state.device) if cu_seqlens is None else cu_seqlens
    begun = all_begun(state.device) if has_initial_state is None else has_initial_state.view(torch.uint8)
    if sequences > SEQUENCES:
        raise ValueError(f"at most {SEQUENCES} sequences in a step, got {sequences}")

    for name, tensor in (("slots", slots), ("initial_slots", initial_slots), ("cu_seqlens", starts)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous")

    launch = LAUNCH[key_dim, value_dim]
    recurrent_kernel[(value_dim // launch.BV, value_heads, sequences)](
        mixed_qkv,
        a,
        b,
        A_log,
        dt_bias,
        state,
        out,
        slots,
        initial_slots,
        begun,
        starts,
        slots.stride(0),
        0 if slots.dim() == 1 else slots.shape[1],
        scale=key_dim**-0.5,
        qkv_stride=mixed_qkv.stride(0),
        a_stride=a.stride(0),
        b_stride=b.stride(0),
        state_stride=state.stride(0),
        out_stride=out.stride(0),
        H=key_heads,
        G=value_heads,
        K=key_dim,
        V=value_dim,
        BV=launch.BV,
        num_warps=launch.warps,
        num_stages=1,
    )


def _check(mixed_qkv: torch.Tensor, state: torch.Tensor, out: torch.Tensor, key_heads: int) -> None:
    heads, value_dim, key_dim = state.shape[1:]
    if state.dtype != torch.float32 or state[0].stride() != (value_dim * key_dim, key_dim, 1):
        raise ValueError(f"states must be float32 with contiguous heads, not {state.dtype} {state.stride()}")
    if (
        key_heads < 1
        or heads % key_heads
        or mixed_qkv.shape[1] != 2 * key_heads * key_dim + heads * value_dim
    ):
        raise ValueError(f"{mixed_qkv.shape[1]} channels do not fit {heads} value heads of {value_dim}")
    if out.shape != (len(mixed_qkv), heads, value_dim) or out[:1].stride()[1:] != (value_dim, 1):
        raise ValueError(f"out {tuple(out.shape)} {out.stride()} does not fit the inputs")
    for name, tensor in (("mixed_qkv", mixed_qkv), ("state", state), ("out", out)):
        if tensor.data_ptr() % 16 or tensor.stride(0) * tensor.element_size() % 16:
            raise ValueError(f"{name}'s rows must start at multiples of 16 bytes")
