"""Prompts as token ids.  The same arguments always give the same prompt."""

import random

VOCABULARY = 2000  # below every tiny checkpoint's


def prompt(length: int, seed: int = 0) -> list[int]:
    """A random prompt; two lengths of one seed share no prefix beyond chance."""
    source = random.Random(seed * 1_000_003 + length)
    return [source.randrange(1, VOCABULARY) for _ in range(length)]


def prompts(lengths: list[int] | tuple[int, ...], seed: int = 0) -> list[list[int]]:
    """One prompt a length."""
    return [prompt(length, seed * 1000 + i) for i, length in enumerate(lengths)]
