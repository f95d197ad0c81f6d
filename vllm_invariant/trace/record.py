# In a vLLM branch: not needed (a tool for users).
"""What one run of the traced request left behind.  Plain values: it travels between processes."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

# Names of what a request keeps in the cache.  States are looked at on both sides of a step.
STATES = ("convolution state", "recurrent state")
KEYS_AND_VALUES = "keys and values"
BEFORE, AFTER = " before the step", " after the step"


@dataclass(frozen=True)
class Spot:
    """One row of one tensor.

    Attributes:
        site: where in the model: a module's dotted name, or an operation inside a GDN layer.
        tensor: which of the tensors there.
        position: token position; of a state, that of the last token it holds.

    """

    site: str
    tensor: str
    position: int


@dataclass
class Seen:
    """Rows of the traced request in one tensor of one step.

    Attributes:
        site, tensor: as in `Spot`.
        positions: (rows,) token positions.
        digests: (rows,) int64 checksums.
        shape, dtype: of the whole step's tensor.
        ran: the implementation that made it.
        kernels: Triton kernels launched for it, with their tile sizes.

    """

    site: str
    tensor: str
    positions: np.ndarray
    digests: np.ndarray
    shape: tuple[int, ...]
    dtype: str
    ran: str
    kernels: tuple[str, ...] = ()


@dataclass
class Step:
    """One forward pass that computed tokens of the traced request.

    Attributes:
        number: engine step, counted from the request's first.
        start, end: its token positions.
        rows, requests: of the whole step.
        cached_rows: rows of the step that belong to requests past their prompt.
        seen: in the order in which they were made.

    """

    number: int
    start: int
    end: int
    rows: int
    requests: int
    cached_rows: int
    seen: list[Seen] = field(default_factory=list)


@dataclass
class Run:
    """One run.

    Attributes:
        steps: in order.
        prompt_len: tokens of the prompt.
        cached: of these, taken from the prefix cache.
        tokens: generated.
        logprobs: for each of them, raw bytes of the returned logprobs.
        kept: the row that was asked for, as (values, dtype), or None.
        unseen: operations that could not be watched, with the reason.

    """

    steps: list[Step]
    prompt_len: int
    cached: int
    tokens: tuple[int, ...]
    logprobs: tuple[bytes, ...]
    kept: Any = None
    unseen: tuple[str, ...] = ()

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """Token positions of each step of the prompt."""
        return tuple((s.start, s.end) for s in self.steps if s.start < self.prompt_len)
