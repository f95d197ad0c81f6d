"""Bitwise comparison of finished requests."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Result:
    """What a request returned.

    Attributes:
        tokens: generated token ids.
        ids: for each position, the ids whose logprobs were returned, in the order returned.
        logprobs: for each position, their logprobs as raw little-endian float32 bytes.
        cached: prompt tokens taken from the prefix cache.  No part of the comparison.

    """

    tokens: tuple[int, ...]
    ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[bytes, ...]
    cached: int = 0

    @classmethod
    def of(cls, tokens: Sequence[int], logprobs: Sequence[Mapping[int, float]], cached: int) -> "Result":
        """Build from one mapping of token id to logprob a position."""
        return cls(
            tokens=tuple(tokens),
            ids=tuple(tuple(position) for position in logprobs),
            logprobs=tuple(pack(position.values()) for position in logprobs),
            cached=cached,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` undoes it."""
        return {
            "tokens": self.tokens,
            "ids": self.ids,
            "logprobs": [b.hex() for b in self.logprobs],
            "cached": self.cached,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Result":
        """The inverse of `to_json`."""
        return cls(
            tokens=tuple(value["tokens"]),
            ids=tuple(tuple(i) for i in value["ids"]),
            logprobs=tuple(bytes.fromhex(b) for b in value["logprobs"]),
            cached=value["cached"],
        )


def pack(values: Any) -> bytes:
    """Raw float32 bytes.  Raises ValueError where a value is no float32: it was rounded on the way."""
    values = list(values)
    packed = struct.pack(f"<{len(values)}f", *values)
    if list(struct.unpack(f"<{len(values)}f", packed)) != values:
        raise ValueError(f"not float32 values: {values}")
    return packed


def first_difference(expected: Result, got: Result) -> str | None:
    """Where two results part, in words, or None if they are bitwise equal."""
    for position, (want, have) in enumerate(zip(expected.logprobs, got.logprobs, strict=False)):
        if expected.ids[position] != got.ids[position]:
            return f"position {position}: ids {expected.ids[position]} against {got.ids[position]}"
        if want != have:
            pairs = zip(_floats(want), _floats(have), expected.ids[position], strict=True)
            apart = [f"{token}: {a!r} against {b!r}" for a, b, token in pairs if a != b]
            return f"position {position}: {len(apart)} logprobs differ, token {apart[0]}"
        if expected.tokens[position] != got.tokens[position]:
            return f"position {position}: token {expected.tokens[position]} against {got.tokens[position]}"
    if len(expected.tokens) != len(got.tokens) or len(expected.logprobs) != len(got.logprobs):
        return f"{len(expected.tokens)} tokens against {len(got.tokens)}"
    return None


def _floats(packed: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(packed) // 4}f", packed)


def differing(expected: Sequence[Result], got: Sequence[Result]) -> dict[int, str]:
    """Requests that are not bitwise equal, with the place where each parts."""
    assert len(expected) == len(got), f"{len(expected)} results against {len(got)}"
    pairs = enumerate(zip(expected, got, strict=True))
    return {i: reason for i, (a, b) in pairs if (reason := first_difference(a, b)) is not None}


def assert_same(expected: Sequence[Result], got: Sequence[Result], what: str = "run") -> None:
    """Every request has the same token ids and the same logprob bits."""
    assert expected, f"{what}: nothing to compare"
    assert all(result.tokens and len(result.logprobs) == len(result.tokens) for result in expected)
    apart = differing(expected, got)
    assert not apart, f"{what}: {len(apart)} of {len(expected)} requests differ: " + "; ".join(
        f"request {i}, {reason}" for i, reason in list(apart.items())[:4]
    )
