"""Random inputs of a Gated-DeltaNet layer whose state matters: slow decay, unit-scale keys."""

from dataclasses import dataclass

import torch

from vllm_invariant.ops import reference


@dataclass(frozen=True)
class Shape:
    """Sequences, tokens, key heads, value heads, key_dim, value_dim."""

    batch: int = 1
    tokens: int = 64
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 128
    value_dim: int = 128

    def __str__(self) -> str:
        heads = f"{self.key_heads}of{self.key_dim}-{self.value_heads}of{self.value_dim}"
        return f"{self.batch}x{self.tokens}-{heads}"


def a_log(shape: Shape) -> torch.Tensor:
    """(value heads,): memories from about 3 tokens to about 3,000."""
    return -torch.linspace(1.0, 8.0, shape.value_heads)


def delta_rule(shape: Shape, seed: int = 0) -> tuple[list[torch.Tensor], torch.Tensor]:
    """``[q, k, v, g, beta]`` and an initial state, float32, shapes as in the reference."""
    generator = torch.Generator().manual_seed(seed)
    b, t, h, g = shape.batch, shape.tokens, shape.key_heads, shape.value_heads

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    q, k, v = normal(b, t, h, shape.key_dim), normal(b, t, h, shape.key_dim), normal(b, t, g, shape.value_dim)
    decay, beta = reference.gating(normal(b, t, g), normal(b, t, g), a_log(shape), 0.5 * normal(g))
    return [q, k, v, decay, beta], normal(b, g, shape.key_dim, shape.value_dim)


def tokens_of(inputs: list[torch.Tensor], start: int, end: int | None = None) -> list[torch.Tensor]:
    """Tokens ``start:end`` of (B, T, ...) tensors."""
    return [x[:, start:end].contiguous() for x in inputs]
