# In a vLLM branch: tests/v1/determinism/utils.py.
"""What a server answered, and how two answers to one request differ, bit by bit."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

FLOAT_BITS = 32


@dataclass(frozen=True)
class Answer:
    """One streamed answer.

    Attributes:
        tokens: generated token ids.
        logprobs: for each token, the logprobs the server listed, by token id.
        cached: prompt tokens taken from the prefix cache.
        sent, first, last: when the request left, and when its first and last token came, in seconds
            of one monotonic clock.

    """

    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]
    cached: int
    sent: float
    first: float
    last: float


@dataclass(frozen=True)
class Difference:
    """How far answers are from being equal; both are 0 for the promise to hold.

    Attributes:
        tokens: positions at which the token ids differ.
        bits: differing bits of the float32 logprobs.

    """

    tokens: int = 0
    bits: int = 0

    def __add__(self, other: "Difference") -> "Difference":
        return Difference(self.tokens + other.tokens, self.bits + other.bits)


def float32_bits(value: float) -> int:
    """The bit pattern of a float32 that arrived as a JSON number.

    Raises:
        ValueError: if ``value`` is not exactly a float32, so that bits were lost on the way.

    """
    raw = struct.pack("<f", value)
    if struct.unpack("<f", raw)[0] != value:
        raise ValueError(f"the server sent {value!r}, which is no float32")
    return int.from_bytes(raw, "little")


def _logprob_bits(a: dict[int, float], b: dict[int, float]) -> int:
    """Differing bits of one position.  A logprob that only one side lists counts as all its bits."""
    bits = FLOAT_BITS * len(a.keys() ^ b.keys())
    return bits + sum((float32_bits(a[t]) ^ float32_bits(b[t])).bit_count() for t in a.keys() & b.keys())


def difference(a: Answer, b: Answer) -> Difference:
    """Compare two answers to the same request."""
    nothing: dict[int, float] = {}
    rows = zip_longest(a.logprobs, b.logprobs, fillvalue=nothing)
    return Difference(
        tokens=sum(x != y for x, y in zip_longest(a.tokens, b.tokens)),
        bits=sum(_logprob_bits(x, y) for x, y in rows),
    )


def total(reference: Sequence[Answer], answers: Sequence[Answer]) -> Difference:
    """The sum of `difference` over answers in the same order.

    Raises:
        ValueError: if there are not as many of one as of the other.

    """
    return sum((difference(a, b) for a, b in zip(reference, answers, strict=True)), Difference())
