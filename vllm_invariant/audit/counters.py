# In a vLLM branch: tests/utils.py, beside RemoteOpenAIServer.
"""What a server counts itself: its ``/metrics`` page, read as far as an audit needs it."""

from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families

WIDE = 64  # tokens; a step with more holds a prefill as long as fewer requests than this are running


@dataclass(frozen=True)
class Counters:
    """Counters of one moment, summed over engines.

    Attributes:
        hits: prompt tokens taken from the prefix cache.
        wide: engine steps of more than `WIDE` tokens.
        started: when the server's process started, in seconds since the epoch.
        cache: vLLM's cache configuration, as text.

    """

    hits: float = 0.0
    wide: float = 0.0
    started: float | None = None
    cache: dict[str, str] = field(default_factory=dict)


def totals(text: str) -> dict[str, float]:
    """A metrics page's samples by name, summed over their labels.

    Raises:
        ValueError: if it is none.

    """
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def parse(text: str) -> Counters:
    """Read a metrics page.  What it does not have counts as 0.

    Raises:
        ValueError: if it is none.

    """
    totals: dict[str, float] = {}
    started, cache = None, {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name
            if name == "process_start_time_seconds":
                started = sample.value
            elif name == "vllm:cache_config_info":
                cache = dict(sample.labels)
            elif name == "vllm:iteration_tokens_total_bucket" and sample.labels["le"] not in ("64.0", "+Inf"):
                continue
            else:
                key = f"{name} {sample.labels.get('le', '')}".strip()
                totals[key] = totals.get(key, 0.0) + sample.value
    steps = "vllm:iteration_tokens_total_bucket"
    return Counters(
        hits=totals.get("vllm:prefix_cache_hits_total", 0.0),
        wide=totals.get(f"{steps} +Inf", 0.0) - totals.get(f"{steps} {WIDE:.1f}", 0.0),
        started=started,
        cache=cache,
    )


async def read_counters(http: httpx.AsyncClient) -> Counters | None:
    """Fetch and read a server's counters, or None if it shows none of vLLM's."""
    try:
        response = await http.get("/metrics")
        return parse(response.text) if response.status_code == 200 and "vllm:" in response.text else None
    except (httpx.HTTPError, ValueError):
        return None
