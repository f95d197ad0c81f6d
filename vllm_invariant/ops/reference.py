# In a vLLM branch: tests/kernels/mamba/gdn_reference.py.
"""A Gated-DeltaNet layer's mathematics in plain PyTorch, to judge kernels by.

One head holds a state ``S`` of (key_dim, value_dim).  With a decay ``alpha = exp(g)`` and a writing
strength ``beta``, token ``t`` does

    S = alpha_t * (I - beta_t k_t k_t^T) S + beta_t k_t v_t^T,    o_t = scale * S^T q_t

(Yang, Kautz and Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024, eq. 10,
with ``S`` transposed).  `recurrent_gated_delta_rule` is that line.  `chunk_gated_delta_rule` takes 64
tokens at a time by the WY representation and the UT transform of Yang, Wang, Zhang, Shen and Kim,
"Parallelizing Linear Transformers with the Delta Rule over Sequence Length", 2024, section 3, with
the decay put in as in section 3.3 of the first paper.

Both forms walk the sequence in steps of one fixed shape, so that a token's bits can depend on
nothing but the tokens before it in its step and the state the step starts from.

Shape letters: B sequences, T tokens, H key heads, G value heads (a multiple of H), K key_dim,
V value_dim, D channels, W taps.  ``float32`` and ``float64`` only.
"""

import torch
import torch.nn.functional as F

CHUNK = 64


def l2_normalise(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """``x / sqrt(sum(x^2) + eps)`` over the last axis, any shape."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def gating(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-decay and writing strength from their projections.

    Args:
        a, b: (..., G).
        a_log, dt_bias: (G,).

    Returns:
        ``g = -exp(a_log) * softplus(a + dt_bias)``, never positive, and ``beta = sigmoid(b)``; (..., G).

    """
    return -a_log.exp() * F.softplus(a + dt_bias), torch.sigmoid(b)


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, state: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Depthwise causal convolution, then SiLU.

    Args:
        x: (B, T, D).
        weight: (D, W), the tap of the newest token last.
        bias: (D,).
        state: (B, W - 1, D), the inputs before ``x``, newest last; zeros by default.

    Returns:
        (B, T, D) outputs and the (B, W - 1, D) state after them.

    """
    taps, tokens = weight.shape[1], x.shape[1]
    if state is None:
        state = x.new_zeros(x.shape[0], taps - 1, x.shape[2])
    seen = torch.cat([state, x], dim=1)
    y = torch.zeros_like(x) if bias is None else bias.expand_as(x)
    for tap in range(taps):
        y = y + seen[:, tap : tap + tokens] * weight[:, tap]
    return F.silu(y), seen[:, tokens:]


def gated_rms_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """``weight * x / rms(x) * silu(z)`` over the last axis.  ``x``, ``z``: (..., V); ``weight``: (V,)."""
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)) * F.silu(z)


def recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    normalise_qk: bool = False,
    scale: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token.

    Args:
        q, k: (B, T, H, K).
        v: (B, T, G, V).
        g: (B, T, G), log-decay.
        beta: (B, T, G).
        initial_state: (B, G, K, V), zeros by default; not written to.
        normalise_qk: apply `l2_normalise` to ``q`` and ``k`` first.
        scale: of ``q``; ``K ** -0.5`` by default.
        dtype: computed and returned in.

    Returns:
        (B, T, G, V) outputs and the (B, G, K, V) state after them.

    Raises:
        ValueError: on shapes that do not fit or another dtype.

    """
    q, k, v, g, beta, state = _prepare(q, k, v, g, beta, initial_state, normalise_qk, scale, dtype)
    alpha = g.exp()
    outputs = []
    for t in range(v.shape[2]):
        k_t, q_t = k[:, :, t, :, None], q[:, :, t, :, None]
        state = state * alpha[:, :, t, None, None]
        recalled = (state * k_t).sum(2)
        written = beta[:, :, t, None] * (v[:, :, t] - recalled)
        state = state + k_t * written.unsqueeze(2)
        outputs.append((state * q_t).sum(2))
    out = torch.stack(outputs, dim=1) if outputs else v.transpose(1, 2)
    return out, state


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    normalise_qk: bool = False,
    scale: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """64 tokens at a time.  Arguments and results as `recurrent_gated_delta_rule`."""
    q, k, v, g, beta, state = _prepare(q, k, v, g, beta, initial_state, normalise_qk, scale, dtype)
    tokens = v.shape[2]
    pad = -tokens % CHUNK  # tokens with k = v = beta = g = 0 leave the state as it is
    q, k, v = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v))
    g, beta = (F.pad(x, (0, pad)) for x in (g, beta))
    outputs = []
    for start in range(0, tokens, CHUNK):
        rows = slice(start, start + CHUNK)
        q_c, k_c, v_c, g_c, beta_c = (x[:, :, rows].contiguous() for x in (q, k, v, g, beta))
        out, state = _chunk(q_c, k_c, v_c, g_c, beta_c, state)
        outputs.append(out)
    out = torch.cat(outputs, dim=2)[:, :, :tokens] if outputs else v
    return out.transpose(1, 2).contiguous(), state


def _chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk.  q, k: (B, G, C, K); v: (B, G, C, V); g, beta: (B, G, C); state: (B, G, K, V)."""
    total = g.cumsum(-1)  # log-decay from the chunk's start to each token
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~causal, -torch.inf).exp()
    k_beta = k * beta.unsqueeze(-1)

    # UT transform: (I + A) X = [beta v | beta exp(total) k], where A is strictly lower triangular.
    a = (k_beta @ k.transpose(-1, -2)) * between
    right = torch.cat([v * beta.unsqueeze(-1), k_beta * total.exp().unsqueeze(-1)], dim=-1)
    solved = torch.linalg.solve_triangular(a, right, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)

    written = u - w @ state
    out = (q * total.exp().unsqueeze(-1)) @ state + ((q @ k.transpose(-1, -2)) * between) @ written
    to_end = (total[..., -1:] - total).exp().unsqueeze(-1)
    state = state * total[..., -1, None, None].exp() + (k * to_end).transpose(-1, -2) @ written
    return out, state


def _prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    normalise_qk: bool,
    scale: float | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """Check shapes; return (B, G, T, ...) copies in ``dtype``, key heads repeated, and the state."""
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"the reference computes in float32 or float64, not {dtype}")
    batch, tokens, key_heads, key_dim = k.shape
    value_heads, value_dim = v.shape[2:]
    if q.shape != k.shape or v.shape[:2] != k.shape[:2] or value_heads % key_heads:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit")
    if g.shape != (batch, tokens, value_heads) or beta.shape != g.shape:
        raise ValueError(f"g {tuple(g.shape)} and beta {tuple(beta.shape)} must be (B, T, value heads)")
    shape = (batch, value_heads, key_dim, value_dim)
    state = torch.zeros(shape, dtype=dtype) if initial_state is None else initial_state.to(dtype)
    if state.shape != shape:
        raise ValueError(f"initial_state {tuple(state.shape)} must be {shape}")
    q, k, v, g, beta = (x.to(dtype).transpose(1, 2).contiguous() for x in (q, k, v, g, beta))
    if normalise_qk:
        q, k = l2_normalise(q), l2_normalise(k)
    q = q * (key_dim**-0.5 if scale is None else scale)
    repeats = value_heads // key_heads
    q, k = (x.repeat_interleave(repeats, dim=1) for x in (q, k))
    return q, k, v, g, beta, state
