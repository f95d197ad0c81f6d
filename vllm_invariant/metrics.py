# In a vLLM branch: vllm/v1/metrics/stats.py and vllm/v1/metrics/loggers.py.
"""What the promise costs, at ``/metrics``.

The scheduler counts in its own process.  ``SchedulerStats`` has no room for a plugin's figures, so
they travel in a field that is empty without LoRA, which preflight refuses, and a stat logger in the
API process turns them into Prometheus counters.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any

PREFIX = "vllm_invariant:"

HELP = {
    "floored_hit_tokens": "Cached prefix tokens not reused because no state was kept where they end.",
    "replayed_tokens": "Generated tokens decoded again after a preemption.",
    "unpublished_decode_blocks": "Full blocks kept out of the prefix cache because decode filled them.",
    "grid_waits": "Times a prefill was given no tokens because no grid step fitted the budget.",
}


@dataclass
class Counters:
    """Totals since the engine started; see `HELP`."""

    floored_hit_tokens: int = 0
    replayed_tokens: int = 0
    unpublished_decode_blocks: int = 0
    grid_waits: int = 0


def attach(stats: Any, counters: Counters) -> Any:
    """Put the totals into a ``SchedulerStats``; None stays None."""
    if stats is not None:
        stats.running_lora_adapters.update({PREFIX + k: v for k, v in asdict(counters).items()})
    return stats


def detach(stats: Any) -> Counters | None:
    """Take the totals out of a ``SchedulerStats`` again; None if it carries none."""
    if stats is None:
        return None
    found = {f.name: stats.running_lora_adapters.get(PREFIX + f.name) for f in fields(Counters)}
    return None if None in found.values() else Counters(**found)


def stat_logger_class() -> type:
    """The stat logger, made on first use: its base class is heavy to import."""
    from prometheus_client import Counter
    from vllm.v1.metrics.loggers import StatLoggerBase

    class InvariantStatLogger(StatLoggerBase):
        """Exports `Counters` as ``vllm:invariant_*_total``."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self.labels = {
                "model_name": vllm_config.model_config.served_model_name,
                "engine": str(engine_index),
            }
            self.seen = Counters()
            self.exported: dict[str, Any] = {}
            _counters.clear()

        def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
            now = detach(scheduler_stats)
            if now is None:
                return
            for name, counter in self.exported.items():
                counter.inc(getattr(now, name) - getattr(self.seen, name))
            self.seen = now

        def log_engine_initialized(self) -> None:
            """Make the counters, only now: stock's own logger, made after all plugins', first removes
            every collector named ``vllm:`` from the registry."""
            for name in HELP:
                counter = _counter(Counter, name, tuple(self.labels))
                self.exported[name] = counter.labels(**self.labels)

    return InvariantStatLogger


_counters: dict[str, Any] = {}  # shared by the loggers of several engines


def _counter(counter_class: type, name: str, labels: tuple[str, ...]) -> Any:
    if name not in _counters:
        _counters[name] = counter_class(f"vllm:invariant_{name}", HELP[name], labels)
    return _counters[name]


def add_stat_logger(stock: Any) -> Any:
    """Wrap stock's list of stat-logger plugins to hold ours as well."""

    def load_stat_logger_plugin_factories() -> list[Any]:
        return [*stock(), stat_logger_class()]

    return load_stat_logger_plugin_factories
