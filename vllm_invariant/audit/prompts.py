# In a vLLM branch: tests/v1/determinism/utils.py.
"""Which prompts are asked: targets, whose lengths lie around the server's edges, and strangers.

Prompts are token ids.  They come from English text if the server tokenizes it, and from ids that are
ordinary tokens of nearly every vocabulary otherwise.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vllm_invariant.audit.geometry import Geometry

SAFE_IDS = range(300, 1000)  # beyond bytes and special tokens, within any vocabulary
PRIVATE = 17  # tokens at a target's end that no other prompt has
TURN = 9  # tokens of a conversation's next question
STRANGER_LENGTHS = (20, 65, 130, 257, 410, 600, 1059)


@dataclass(frozen=True)
class Prompt:
    """One request.

    Attributes:
        tokens: token ids of the prompt.
        max_tokens: tokens to generate, greedily; the end-of-text token does not stop them.

    """

    tokens: tuple[int, ...]
    max_tokens: int


def edges(geometry: Geometry) -> list[int]:
    """Prompt lengths at which something in the server changes."""
    blocks = (geometry.block, 2 * geometry.block) if geometry.block else ()
    return sorted({geometry.grid, *blocks, *((geometry.budget,) if geometry.budget else ())})


def lengths(geometry: Geometry, tokens: int) -> list[int]:
    """One below, at and one above each edge, as far as they fit.

    Args:
        geometry: of the server.
        tokens: generated for each.

    """
    longest = geometry.max_len - 2 * tokens - TURN  # a later turn has the answer in its prompt
    around = {edge + d for edge in edges(geometry) for d in (-1, 0, 1)}
    return sorted(n for n in around if 2 <= n <= longest)


class Supply:
    """Where prompts are cut from.  The same text and seed give the same prompts.

    Args:
        text: token ids of a text, a few thousand; empty if there is none.
        geometry: of the server.
        tokens: generated for each target.
        seed: of everything drawn.

    """

    def __init__(self, text: Sequence[int], geometry: Geometry, tokens: int, seed: int) -> None:
        self.random = random.Random(seed)
        self._text = list(text) or self.random.choices(SAFE_IDS, k=20_000)
        self._longest = geometry.max_len
        sizes = lengths(geometry, tokens)
        head = self.cut(max(sizes, default=0))
        self.targets = [
            Prompt(head[: max(0, n - PRIVATE)] + self.cut(min(n, PRIVATE)), tokens) for n in sizes
        ]

    def cut(self, count: int) -> tuple[int, ...]:
        """Tokens from a place drawn at random, going round at the end."""
        start = self.random.randrange(len(self._text))
        rounds = (start + count) // len(self._text) + 1
        return tuple((self._text * rounds)[start : start + count])

    def primer(self, target: Prompt) -> Prompt:
        """What ``target`` shares with the longer targets, as a request of its own."""
        return Prompt(target.tokens[:-PRIVATE], 1)

    def stranger(self, max_tokens: int, length: int | None = None) -> Prompt:
        """An unrelated request."""
        length = length or self.random.choice(STRANGER_LENGTHS)
        max_tokens = min(max_tokens, self._longest - 2)
        return Prompt(self.cut(min(length, self._longest - max_tokens - 1)), max_tokens)

    def next_turn(self, target: Prompt, answer: Sequence[int]) -> Prompt:
        """A conversation's next turn: a prompt, its answer and another question."""
        return replace(target, tokens=(*target.tokens, *answer, *self.cut(TURN)))
