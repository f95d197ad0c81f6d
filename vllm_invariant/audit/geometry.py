# In a vLLM branch: not needed (a test sets the options itself).
"""What a server tells about itself: the sizes at which bits could part, and what it runs as."""

from dataclasses import dataclass

from vllm_invariant.arithmetic import CHUNK


@dataclass(frozen=True)
class Sizes:
    """Sizes given by hand; None leaves them to the server."""

    block: int | None = None
    budget: int | None = None
    grid: int | None = None


@dataclass(frozen=True)
class Geometry:
    """Sizes of a server, in tokens.

    Attributes:
        max_len: longest prompt and answer together.
        grid: where a prefill may be cut.
        block: of the KV cache, or None if unknown.
        unit: prefix-cache hits are multiples of it, or None if unknown.
        budget: of one engine step, or None if unknown.

    """

    max_len: int
    grid: int = CHUNK.grid
    block: int | None = None
    unit: int | None = None
    budget: int | None = None


@dataclass(frozen=True)
class Facts:
    """What a server runs as, as far as it tells.

    Attributes:
        model: the name it serves.
        version: of vLLM.
        flag: whether ``VLLM_BATCH_INVARIANT`` is set.
        device: kind of device, and its name if known.
        mode: what the promise's axis of that name is about.
        started: when its process started, in seconds since the epoch.

    """

    model: str
    version: str | None = None
    flag: bool | None = None
    device: str | None = None
    mode: dict[str, str] | None = None
    started: float | None = None
