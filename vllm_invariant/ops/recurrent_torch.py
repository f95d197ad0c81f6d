# In a vLLM branch: vllm/model_executor/layers/mamba/ops/cpu/gdn_recurrent.py.
"""The recurrent arithmetic in PyTorch, for the CPU engine: one order of rounding for every token.

One head holds a state ``S`` of (key_dim, value_dim).  With ``alpha = exp(g)``, token ``t`` does, in this
order and in float32, each operation rounded by itself,

    S = alpha_t * S,    r = S^T k_t,    w = beta_t * (v_t - r),    S = S + k_t w^T,    o_t = S^T q_t

Prefill, decode and verification differ in how many tokens a sequence brings, and in nothing else.  So
that a token's bits depend on nothing but its inputs and the state before it:

* products and sums are single IEEE operations, which round the same in any shape;
* a sum over key_dim is taken by halving: element ``i`` is added to element ``i + half``, again and again;
* functions that a vector unit and a scalar unit may round differently (exp, sigmoid, softplus) see
  `ROWS` rows at a time, padded, so that no element ever falls into a scalar remainder.

Shape letters: N sequences, T tokens of all of them laid end to end, H key heads, G value heads (a
multiple of H), K key_dim (a power of two), V value_dim, D channels, W taps.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F

from vllm_invariant.ops import reference

ROWS = 64  # times any width a multiple of every vector width, unrolled twice


def in_row_tiles(
    function: Callable[..., tuple[torch.Tensor, ...]], *inputs: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Apply an element-wise function to `ROWS` rows at a time.

    Args:
        function: of tensors of `ROWS` rows, to a tuple of such.
        inputs: (T, ...), padded with zeros in the last tile.

    Returns:
        (T, ...) tensors.

    """
    rows = inputs[0].shape[0]
    padded = [F.pad(x, (0, 0) * (x.dim() - 1) + (0, -rows % ROWS)).contiguous() for x in inputs]
    tiles = [function(*tile) for tile in zip(*(x.split(ROWS) for x in padded), strict=True)]
    return tuple(torch.cat(parts)[:rows] for parts in zip(*tiles, strict=True))


def sum_by_halving(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum over a dimension whose size is a power of two; overwrites ``x``."""
    half = x.shape[dim]
    while half > 1:
        half //= 2
        x = x.narrow(dim, 0, half).add_(x.narrow(dim, half, half))
    return x.squeeze(dim)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pool: torch.Tensor,
    starts: list[int],
    slots: list[int],
    continues: list[bool],
) -> torch.Tensor:
    """Depthwise causal convolution, then SiLU, of sequences laid end to end.

    Args:
        x: (T, D).
        weight: (D, W), the tap of the newest token last.
        bias: (D,).
        pool: (slots, W - 1, D), each sequence's last inputs, newest last; updated in place.
        starts: N + 1 row boundaries.
        slots: N places in ``pool``.
        continues: N answers whether a sequence goes on from its slot or from zeros.

    Returns:
        (T, D) in ``x``'s dtype; taps are added oldest first, in float32.

    """
    kept = weight.shape[1] - 1
    seen, first = [], []
    for i, slot in enumerate(slots):
        before = pool[slot] if continues[i] else torch.zeros_like(pool[slot])
        rows = torch.cat([before.to(x.dtype), x[starts[i] : starts[i + 1]]])
        if len(rows) > kept:
            pool[slot] = rows[-kept:].to(pool.dtype)
        first.append(torch.arange(starts[i], starts[i + 1]) + kept * i)
        seen.append(rows)
    rows, oldest = torch.cat(seen).float(), torch.cat(first)
    taps = weight.float().unbind(1)
    y = torch.zeros(len(oldest), x.shape[1]) if bias is None else bias.float().expand(len(oldest), -1)
    for tap, factor in enumerate(taps):
        y = y + rows[oldest + tap] * factor
    (y,) = in_row_tiles(lambda tile: (F.silu(tile),), y)
    return y.to(x.dtype)


def recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    pool: torch.Tensor,
    starts: list[int],
    slots: list[int] | list[list[int]],
    continues: list[bool],
    sources: list[int] | None = None,
) -> torch.Tensor:
    """The recurrence over sequences laid end to end.

    Args:
        q, k: (T, H, K), not normalised.
        v: (T, G, V).
        a, b: (T, G), projections that decay and writing strength are made of.
        a_log, dt_bias: (G,).
        pool: (slots, G, K, V) float32, updated in place.
        starts: N + 1 row boundaries; a sequence may be empty.
        slots: for each sequence where its state is put: one slot, for the state after its last token,
            or a list of as many slots as it has tokens, for the state after each.
        continues: N answers whether a sequence goes on from its slot or from zeros.
        sources: N slots to go on from; ``slots``, or the first one in each list, by default.

    Returns:
        (T, G, V) in ``v``'s dtype.

    Raises:
        ValueError: if K is no power of two.

    """
    key_dim = k.shape[-1]
    if key_dim & (key_dim - 1):
        raise ValueError(f"a head's key_dim must be a power of two, got {key_dim}")
    repeats = v.shape[1] // k.shape[1]
    q, k = (_unit(x.float()).repeat_interleave(repeats, dim=1) for x in (q, k))
    q = q * key_dim**-0.5
    alpha, beta = _decay_and_strength(a, b, a_log, dt_bias)

    stops = [list(s) if isinstance(s, list) else [s] for s in slots]
    sources = [s[0] for s in stops] if sources is None else sources
    lengths = [end - start for start, end in pairwise(starts)]
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i])
    if not order:
        return torch.empty_like(v)
    state = pool[torch.tensor([sources[i] for i in order])]
    state[[not continues[i] for i in order]] = 0
    product, out = torch.empty_like(state), torch.empty_like(v, dtype=torch.float32)
    for t in range(lengths[order[0]]):
        live = [i for i in order if lengths[i] > t]  # the longest first, so the live ones are in front
        rows = torch.tensor([starts[i] + t for i in live])
        s, p = state[: len(live)], product[: len(live)]
        out[rows] = _step(s, p, q[rows], k[rows], v[rows].float(), alpha[rows], beta[rows])
        for at, i in enumerate(live):
            if isinstance(slots[i], list):
                pool[stops[i][t]] = s[at]
            elif t + 1 == lengths[i]:
                pool[stops[i][0]] = s[at]
    return out.to(v.dtype)


def _step(
    state: torch.Tensor,
    product: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
) -> torch.Tensor:
    """One token of each sequence.  state, product (scratch): (N, G, K, V); returns (N, G, V)."""
    state.mul_(alpha[:, :, None, None])
    recalled = sum_by_halving(torch.mul(state, k.unsqueeze(-1), out=product), 2)
    written = beta.unsqueeze(-1) * (v - recalled)
    state.add_(torch.mul(k.unsqueeze(-1), written.unsqueeze(-2), out=product))
    return sum_by_halving(torch.mul(state, q.unsqueeze(-1), out=product), 2)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """``x / sqrt(sum(x^2) + 1e-6)`` over the last axis; root and quotient are IEEE operations."""
    return x / (sum_by_halving(x * x, x.dim() - 1) + 1e-6).sqrt().unsqueeze(-1)


def _decay_and_strength(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """(T, G) alpha and beta."""
    a_log, dt_bias = a_log.float(), dt_bias.float()

    def tile(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        g, beta = reference.gating(a, b, a_log, dt_bias)
        return g.exp(), beta

    return in_row_tiles(tile, a.float(), b.float())
