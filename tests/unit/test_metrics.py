"""Counters travel in the scheduler's statistics and come out as Prometheus counters."""

from dataclasses import asdict, fields
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_invariant import metrics
from vllm_invariant.metrics import Counters, attach, detach


def stats(**adapters: int) -> Any:
    return SimpleNamespace(running_lora_adapters=dict(adapters))


COUNTERS = Counters(floored_hit_tokens=1, replayed_tokens=20, unpublished_decode_blocks=3, grid_waits=40)


def test_every_counter_has_a_help_text():
    assert set(metrics.HELP) == {field.name for field in fields(Counters)}


def test_what_is_attached_is_detached():
    carried = attach(stats(other=5), COUNTERS)
    assert carried.running_lora_adapters["other"] == 5
    assert detach(carried) == COUNTERS


def test_no_statistics_stay_none():
    assert attach(None, COUNTERS) is None
    assert detach(None) is None


def test_statistics_of_another_scheduler_carry_none():
    assert detach(stats()) is None
    assert detach(stats(**{metrics.PREFIX + "grid_waits": 3})) is None


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stat logger with fresh Prometheus counters, and how to read them."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()
    monkeypatch.setattr(metrics, "_counters", {})
    make = metrics._counter
    counter = prometheus_client.Counter
    monkeypatch.setattr(
        metrics,
        "_counter",
        lambda cls, name, labels: make(lambda *a: counter(*a, registry=registry), name, labels),
    )

    def read(engine: int = 0) -> dict[str, float | None]:
        labels = {"model_name": "tiny", "engine": str(engine)}
        return {
            name: registry.get_sample_value(f"vllm:invariant_{name}_total", labels) for name in metrics.HELP
        }

    return SimpleNamespace(read=read)


def loggers(*engines: int) -> list[Any]:
    """As vLLM makes them: all of them, then its own, then the word that the engine is ready."""
    config = SimpleNamespace(model_config=SimpleNamespace(served_model_name="tiny"))
    made = [metrics.stat_logger_class()(config, engine) for engine in engines]
    for each in made:
        each.log_engine_initialized()
    return made


def test_totals_become_counters(exported):
    """Each step brings totals; a counter moves by what is new, and is there before anything happened."""
    [made] = loggers(0)
    assert exported.read() == dict.fromkeys(metrics.HELP, 0.0)
    made.record(attach(stats(), COUNTERS), None)
    made.record(attach(stats(), COUNTERS), None)
    made.record(None, None)
    assert exported.read() == asdict(COUNTERS)
    made.record(attach(stats(), Counters(2, 21, 3, 45)), None)
    assert exported.read() == asdict(Counters(2, 21, 3, 45))


def test_engines_are_counted_apart(exported):
    first, second = loggers(0, 1)
    first.record(attach(stats(), COUNTERS), None)
    second.record(attach(stats(), Counters(grid_waits=2)), None)
    assert exported.read(0) == asdict(COUNTERS)
    assert exported.read(1) == asdict(Counters(grid_waits=2))


def test_stock_removes_what_is_registered_before_its_own_logger():
    """The reason to make the counters late: once this fails, they can be made at once."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    import prometheus_client
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    early = prometheus_client.Counter("vllm:invariant_early", "Made before stock's.")
    early.inc()
    unregister_vllm_metrics()
    assert prometheus_client.REGISTRY.get_sample_value("vllm:invariant_early_total") is None


def test_our_logger_joins_those_of_other_plugins(exported):
    other = object()
    factories = metrics.add_stat_logger(lambda: [other])()
    assert factories[0] is other
    assert [f.__name__ for f in factories[1:]] == ["InvariantStatLogger"]
