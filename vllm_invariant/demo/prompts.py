# In a vLLM branch: tests/v1/determinism/utils.py.
"""The demo's prompts: a shared system prompt, private parts of chosen lengths, and strangers.

Everything is cut from `corpus` by token, so that lengths are exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from vllm_invariant.demo.corpus import corpus

SYSTEM = 2000  # tokens every needle shares

# Private lengths.  With the system prompt they put a prompt's end one token past the 64-token grid
# (2,049), on it (2,112), on a 320-token block and one past it (2,240 and 2,241), and anywhere.
PRIVATE = (49, 112, 240, 241, 403, 730)

NEEDLE_TOKENS = 24
STRANGER_LENGTHS = (20, 65, 130, 257, 410, 600)


@dataclass(frozen=True)
class Prompt:
    """One request.

    Attributes:
        tokens: token ids of the prompt.
        max_tokens: tokens to generate, greedily; the end-of-text token does not stop them.

    """

    tokens: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class PromptSet:
    """What one demo asks.

    Attributes:
        needles: the requests that are compared, all with the same first `SYSTEM` tokens.
        primer: another request with those first tokens.
        strangers: unrelated requests, which share no first token block with anything else.

    """

    needles: tuple[Prompt, ...]
    primer: Prompt
    strangers: tuple[Prompt, ...]


def cut(texts: Sequence[Sequence[int]]) -> PromptSet:
    """Cut a prompt set from tokenized texts, the first of which gives the system prompt.

    Args:
        texts: token ids of each text; `SYSTEM` in the first, a few thousand in the others together.

    """
    first, *others = texts
    if len(first) < SYSTEM:
        raise ValueError(f"the system prompt needs {SYSTEM} tokens, the longest text has {len(first)}")
    system = tuple(first[:SYSTEM])
    supply = cycle(token for text in others for token in text)

    def take(count: int) -> tuple[int, ...]:
        return tuple(islice(supply, count))

    return PromptSet(
        needles=tuple(Prompt(system + take(count), NEEDLE_TOKENS) for count in PRIVATE),
        primer=Prompt(system + take(33), 1),
        strangers=tuple(Prompt(take(count), 8) for count in STRANGER_LENGTHS),
    )


def prompt_set(model: Path) -> PromptSet:
    """Cut the demo's prompts with the tokenizer of the checkpoint at ``model``."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return cut([encoding.ids for encoding in tokenizer.encode_batch(corpus())])
