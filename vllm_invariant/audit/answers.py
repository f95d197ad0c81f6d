# In a vLLM branch: tests/v1/determinism/utils.py.
"""What a server answered, and how two answers to one request differ, bit by bit."""

import struct
from dataclasses import dataclass
from itertools import zip_longest

# A token by its id, or by its text where a server does not tell ids.
Token = int | str

EQUAL, LOGPROB, TOKEN = ".lt"  # one mark a position


@dataclass(frozen=True)
class Answer:
    """One streamed answer.

    Attributes:
        tokens: generated tokens.
        logprobs: for each token, the logprobs the server listed, by token.
        cached: prompt tokens taken from the prefix cache, or None if the server does not say.
        sent, first, last: when the request left, and when its first and last token came, in seconds
            of one monotonic clock.

    """

    tokens: tuple[Token, ...]
    logprobs: tuple[dict[Token, float], ...]
    cached: int | None
    sent: float
    first: float
    last: float


@dataclass(frozen=True)
class Difference:
    """How far two answers are from being equal.

    Attributes:
        tokens: positions at which the tokens differ.
        logprobs: logprobs that differ by at least one bit, or that only one side lists.
        marks: one character a position: `EQUAL`, `LOGPROB` or `TOKEN`.
        first: where they part first, in words, or None.

    """

    tokens: int = 0
    logprobs: int = 0
    marks: str = ""
    first: str | None = None


def float32_bits(value: float) -> int:
    """The bit pattern of a float32 that arrived as a JSON number.

    Raises:
        ValueError: if ``value`` is not exactly a float32, so that bits were lost on the way.

    """
    raw = struct.pack("<f", value)
    if struct.unpack("<f", raw)[0] != value:
        raise ValueError(f"the server sent {value!r}, which is no float32")
    return int.from_bytes(raw, "little")


def _apart(a: dict[Token, float], b: dict[Token, float]) -> list[Token]:
    """Tokens whose logprob differs, or that only one side lists."""
    return [
        token
        for token in {**a, **b}
        if token not in a or token not in b or float32_bits(a[token]) != float32_bits(b[token])
    ]


def _in_words(position: int, a: dict[Token, float], b: dict[Token, float], apart: list[Token]) -> str:
    token = apart[0]
    more = f", and {len(apart) - 1} more" if len(apart) > 1 else ""
    return f"position {position}: logprob of {token!r} {a.get(token)} became {b.get(token)}{more}"


def difference(a: Answer, b: Answer) -> Difference:
    """Compare two answers to the same request, ``a`` the reference."""
    tokens = logprobs = 0
    marks, first = "", None
    nothing: dict[Token, float] = {}
    rows = zip_longest(a.logprobs, b.logprobs, fillvalue=nothing)
    pairs = zip_longest(a.tokens, b.tokens)
    for position, ((x, y), (want, have)) in enumerate(zip(pairs, rows, strict=True)):
        apart = _apart(want, have)
        tokens += x != y
        logprobs += len(apart)
        marks += TOKEN if x != y else LOGPROB if apart else EQUAL
        if first is None and apart:
            first = _in_words(position, want, have, apart)
        elif first is None and x != y:
            first = f"position {position}: token {x!r} became {y!r}"
    return Difference(tokens, logprobs, marks, first)
