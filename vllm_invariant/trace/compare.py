# In a vLLM branch: not needed (a tool for users).
"""The first tensor in which two runs of one request differ.

*First* is by the first run's order of execution: step by step, and within a step layer by layer.  A
token's value at some place depends only on earlier places and earlier tokens, so the first place at
which any token of a step differs is where the difference came from.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_invariant.trace.record import AFTER, BEFORE, KEYS_AND_VALUES, STATES, Run, Seen, Spot, Step

# Names that `operations` gives to what writes each state.
WRITERS = dict(zip(STATES, ("conv1d", "recurrence"), strict=True))


@dataclass(frozen=True)
class Side:
    """What one run has at a spot."""

    digest: int
    step: Step
    seen: Seen

    @property
    def writer(self) -> Seen | None:
        """The operation of this step that wrote the state, if it is one that the step left behind."""
        if not self.seen.tensor.endswith(AFTER):
            return None
        site = f"{self.seen.site}.{WRITERS[self.seen.tensor.removesuffix(AFTER)]}"
        return next((seen for seen in reversed(self.step.seen) if seen.site == site), None)


@dataclass(frozen=True)
class Difference:
    """The first difference.

    Attributes:
        first, second: the spot, in each run's own words; they differ only in when a state was looked at.
        a, b: what each run has there.
        positions: token positions that differ at this place, over all steps.
        sites: places that differ anywhere, in order of first appearance.

    """

    first: Spot
    second: Spot
    a: Side
    b: Side
    positions: tuple[int, ...]
    sites: tuple[str, ...]

    @property
    def layer(self) -> str:
        """The decoder layer, or the part of the model outside of them."""
        found = re.match(r"(.*\blayers\.\d+)\.", self.first.site)
        return found[1] if found else self.first.site.rsplit(".", 1)[0]

    @property
    def operation(self) -> str:
        """What is below the layer.  A state that both runs wrote is named by what wrote it."""
        a, b = self.a.writer, self.b.writer
        site = a.site if a is not None and b is not None else self.first.site
        return site.removeprefix(self.layer).removeprefix(".") or site


@dataclass(frozen=True)
class Verdict:
    """The comparison of two runs.

    Attributes:
        difference: the first one, or None.
        compared: rows and states compared.
        skipped: rows of the first run that the second did not compute.
        token: first generated token that differs, counted from 0, or None.
        logprobs: first position whose logprobs differ, or None.

    """

    difference: Difference | None
    compared: int
    skipped: int
    token: int | None
    logprobs: int | None

    @property
    def same(self) -> bool:
        """Whether nothing differs at all."""
        return self.difference is None and self.token is None and self.logprobs is None


def _sides(run: Run) -> Iterator[tuple[Spot, Side]]:
    for step in run.steps:
        for seen in _in_order(step):
            for position, digest in zip(seen.positions.tolist(), seen.digests.tolist(), strict=True):
                yield Spot(seen.site, seen.tensor, position), Side(digest, step, seen)


def _in_order(step: Step) -> list[Seen]:
    """States where their layer starts and ends, and not where the step does."""
    starts: dict[str, int] = {}
    ends: dict[str, int] = {}
    for i, seen in enumerate(step.seen):
        if not _cached(seen):
            for site in _owners(seen.site):
                starts.setdefault(site, i)
                ends[site] = i

    def place(pair: tuple[int, Seen]) -> tuple[float, int]:
        i, seen = pair
        if not _cached(seen):
            return float(i), i
        if seen.tensor == KEYS_AND_VALUES:  # what attention reads
            return ends.get(seen.site, -1) - 0.5, i
        if seen.tensor.endswith(BEFORE):
            return starts.get(seen.site, -1) - 0.5, i
        return ends.get(seen.site, len(step.seen)) + 0.5, i

    return [seen for _, seen in sorted(enumerate(step.seen), key=place)]


def _cached(seen: Seen) -> bool:
    return seen.tensor.startswith((*STATES, KEYS_AND_VALUES))


def _owners(site: str) -> Iterator[str]:
    parts = site.split(".")
    for n in range(1, len(parts) + 1):
        yield ".".join(parts[:n])


def _otherwise(spot: Spot) -> Spot:
    """The same state, looked at on the other side of a step's edge."""
    for ours, theirs in ((BEFORE, AFTER), (AFTER, BEFORE)):
        if spot.tensor.endswith(ours):
            return Spot(spot.site, spot.tensor.removesuffix(ours) + theirs, spot.position)
    return spot


def compare(first: Run, second: Run) -> Verdict:
    """Compare two runs of one request."""
    theirs = dict(_sides(second))
    compared = skipped = 0
    found: tuple[Spot, Spot, Side, Side] | None = None
    apart: dict[str, list[Spot]] = {}
    best: tuple[int, int] | None = None
    order = 0
    previous: Seen | None = None
    for spot, a in _sides(first):
        order += a.seen is not previous
        previous = a.seen
        other = spot if spot in theirs else _otherwise(spot)
        if other not in theirs:
            skipped += 1
            continue
        compared += 1
        b = theirs[other]
        if a.digest == b.digest:
            continue
        apart.setdefault(spot.site, []).append(spot)
        if best is None or (order, spot.position) < best:
            best, found = (order, spot.position), (spot, other, a, b)
    difference = None
    if found is not None:
        spot = found[0]
        positions = {s.position for s in apart[spot.site] if s.tensor == spot.tensor}
        difference = Difference(*found, tuple(sorted(positions)), tuple(apart))
    return Verdict(
        difference,
        compared,
        skipped,
        _first_apart(first.tokens, second.tokens),
        _first_apart(first.logprobs, second.logprobs),
    )


def _first_apart(a: tuple, b: tuple) -> int | None:
    if a == b:
        return None
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
