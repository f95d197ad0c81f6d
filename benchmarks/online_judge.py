"""How the replies of a loaded server compare with those of an idle one, and what they lived through."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path

from benchmarks.online_traffic import Reply
from vllm_invariant.audit.answers import float32_bits

NAME = re.compile(r"(?:alone|target|background)-\d+")


@dataclass
class Mismatches:
    """Targets, and positions in them, that differ from the same request alone."""

    requests_compared: int = 0
    tokens: int = 0
    selected_logprobs: int = 0
    top_logprob_maps: int = 0
    maximum_difference: float = 0.0

    def add(self, alone: Reply, loaded: Reply) -> None:
        """Compare two replies to one request.  A position only one of them has counts as different."""
        self.requests_compared += 1
        self.tokens += sum(a != b for a, b in zip_longest(alone.tokens, loaded.tokens))
        rows = zip_longest(alone.logprobs, loaded.logprobs, alone.tokens, fillvalue=None)
        for a, b, token in rows:
            if a is None or b is None or token not in a or token not in b:
                self.selected_logprobs += 1
                self.top_logprob_maps += 1
                continue
            self.selected_logprobs += float32_bits(a[token]) != float32_bits(b[token])
            self.maximum_difference = max(self.maximum_difference, abs(a[token] - b[token]))
            self.top_logprob_maps += {t: float32_bits(x) for t, x in a.items()} != {
                t: float32_bits(x) for t, x in b.items()
            }

    def any(self) -> bool:
        """Whether a single bit differs."""
        return any(value for name, value in asdict(self).items() if name != "requests_compared")


def mixed_steps(trace: Path) -> dict[str, int]:
    """Steps in which a request decoded while another prefilled, by request name, from the server's trace."""
    counts: dict[str, int] = {}
    for line in trace.read_text().splitlines():
        step = json.loads(line)
        if not step["prefill"]:
            continue
        for request_id in step["decode"]:
            if (name := NAME.search(request_id)) is not None:
                counts[name[0]] = counts.get(name[0], 0) + 1
    return counts


def overlaps(target: Reply, others: Sequence[Reply]) -> bool:
    """Whether, by the client's clock, a prefill may have run while the target decoded."""
    return any(
        other.name != target.name and other.sent < target.last and other.first > target.first
        for other in others
        if other.error is None
    )


def crossings(
    targets: Sequence[Reply], everyone: Sequence[Reply], traced: Mapping[str, int] | None
) -> list[int]:
    """Mixed steps each target crossed.  Without a trace: 1 if the client's clock says it may have, else 0."""
    if traced is None:
        return [int(overlaps(target, everyone)) for target in targets]
    return [traced.get(target.name, 0) for target in targets]
