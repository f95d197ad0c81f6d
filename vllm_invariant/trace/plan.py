# In a vLLM branch: not needed (a tool for users).
"""What a trace runs: one request, and the two ways it goes through the engine.

The first way is always the same: alone, from an empty prefix cache.  The second one adds what the
user suspects.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Ask:
    """One greedy request.

    Attributes:
        prompt: token ids.
        max_tokens: tokens to generate.
        at: engine step before which it is added, counted from the traced request's first.

    """

    prompt: tuple[int, ...]
    max_tokens: int
    at: int = 0


@dataclass(frozen=True)
class Way:
    """One way through the engine.

    Attributes:
        name: in words, for the report.
        before: requests that run first, one after another, and leave their blocks cached.
        company: requests that run together with the traced one.
        options: engine options that differ from the user's.
        hit: it is meant to hit the prefix cache.
        own_process: it needs an engine of its own, in a process of its own.

    """

    name: str
    before: tuple[Ask, ...] = ()
    company: tuple[Ask, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    hit: bool = False
    own_process: bool = False


def read_ids(text: str) -> tuple[int, ...]:
    """Token ids from ``1,2,3``, or from ``@file`` that holds them with commas or spaces between.

    Raises:
        ValueError: on anything else.

    """
    source = _read(text[1:]) if text.startswith("@") else text
    words = source.replace("[", " ").replace("]", " ").replace(",", " ").split()
    if not words or not all(word.isdecimal() for word in words):
        raise ValueError(f"{text!r} is not a list of token ids such as 1,2,3")
    return tuple(int(word) for word in words)


def read_asks(texts: Iterable[str], max_tokens: int) -> tuple[Ask, ...]:
    """Other requests, from token ids or from ``@file`` with one request a line.

    A line is a JSON list of token ids, or an object with ``prompt`` and perhaps ``max_tokens`` and ``at``.

    Args:
        texts: what the user wrote, one or more.
        max_tokens: where a request does not say how many.

    Raises:
        ValueError: naming the line that cannot be read.

    """
    asks: list[Ask] = []
    for text in texts:
        if not text.startswith("@"):
            asks.append(Ask(read_ids(text), max_tokens))
            continue
        for number, line in enumerate(_read(text[1:]).splitlines(), 1):
            if line.strip():
                asks.append(_ask(line, max_tokens, f"{text[1:]}, line {number}"))
    return tuple(asks)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error


def _ask(line: str, max_tokens: int, where: str) -> Ask:
    try:
        value = json.loads(line)
        fields = value if isinstance(value, dict) else {"prompt": value}
        ask = Ask(
            tuple(int(token) for token in fields["prompt"]),
            int(fields.get("max_tokens", max_tokens)),
            int(fields.get("at", 0)),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f'{where}: not a list of token ids or {{"prompt": [...], "max_tokens": N, "at": STEP}}'
        ) from error
    if not ask.prompt:
        raise ValueError(f"{where}: an empty prompt")
    return ask


FIRST = Way("alone, cold")


def second_way(
    ask: Ask,
    *,
    alone: bool = False,
    hit: bool = False,
    cut: int | None = None,
    company: Sequence[Ask] = (),
    after: Sequence[Ask] = (),
) -> Way:
    """The way to compare with `FIRST`.

    Args:
        ask: the traced request.
        alone: alone again, in another process.
        hit: on a prefix-cache hit of its own prompt.
        cut: token budget of a step.
        company: requests in the same steps.
        after: requests that run before it.

    Raises:
        ValueError: if nothing at all was asked for.

    """
    words = []
    if after:
        words.append(f"after {len(after)} other request{'s' * (len(after) > 1)}")
    if hit:
        words.append("on a hit of its own prompt")
    if company:
        words.append(f"in the company of {len(company)}")
    if cut is not None:
        words.append(f"with a budget of {cut} tokens a step")
    if alone:
        words.append("in another process")
    if not words:
        raise ValueError("say what the second run is: --with, --hit, --cut, --after or --alone")
    options = {} if cut is None else {"max_num_batched_tokens": cut}
    before = (*after, *((ask,) if hit else ()))
    return Way(
        ", ".join(words), before, tuple(company), options, hit=hit, own_process=alone or cut is not None
    )


def path_not_taken(way: Way, first: Any, second: Any) -> str | None:
    """Why the second run proves nothing, or None.

    Args:
        way: what the second run was meant to be.
        first, second: the two runs (`record.Run`).

    """
    if way.hit and not second.cached:
        return "it hit no cached token"
    if way.company and not any(step.requests > 1 for step in second.steps):
        return "it shared no step with its company"
    if "max_num_batched_tokens" in way.options and first.chunks == second.chunks:
        return "its prompt was cut at the same places"
    return None
