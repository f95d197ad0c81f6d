"""Axis mode: both model runners, async scheduling or not, eager or replayed from CUDA graphs."""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.gpu import GPU
from tests.harness.compare import Result, assert_same
from tests.harness.engine import Engine, Engines
from tests.v1.determinism.settings import Settings
from tests.v1.determinism.test_batch_invariance import companions, needles

pytestmark = [pytest.mark.engine, pytest.mark.slow, *GPU]

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


@dataclass(frozen=True)
class Mode:
    """How an engine runs its steps."""

    v2: bool
    asynchronous: bool
    options: dict[str, Any] = field(default_factory=lambda: {"enforce_eager": True})


Models = Callable[[str | None], Engines]

EAGER = [Mode(v2=False, asynchronous=False), Mode(v2=True, asynchronous=True)]
REPLAYED = {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
COMPILED = {"enforce_eager": False}


@contextmanager
def running(builder: Engines, settings: Settings, mode: Mode) -> Iterator[Engine]:
    """An engine in this mode, and proof that it is."""
    options = settings.engine_options("FLASH_ATTN") | mode.options
    options |= {"enable_prefix_caching": False, "async_scheduling": mode.asynchronous}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, RUNNER, str(int(mode.v2)))
        with builder.fresh(**options) as engine:
            assert type(engine.runner).__module__.endswith("worker.gpu.model_runner") == mode.v2
            assert ("Async" in type(engine.scheduler).__name__) == mode.asynchronous
            graphs = engine.runner.vllm_config.compilation_config.cudagraph_mode.name
            assert (graphs == "NONE") == mode.options["enforce_eager"], graphs
            yield engine


def answers(engine: Engine, settings: Settings) -> list[Result]:
    """The needles alone; in company they are the same."""
    requests = needles(settings)
    alone = [result for request in requests for result in engine.run([request]).results]
    for trial in range(2):
        run = engine.run(
            [*requests, *companions(settings, settings.batch - len(requests), random.Random(trial))]
        )
        assert run.record.mixed_steps(run.ids[0]) > 0
        assert_same(alone, run.results[: len(requests)], "in company")
    return alone


def agree(builder: Engines, settings: Settings, modes: list[Mode]) -> None:
    """Every mode gives the answers of the first."""
    expected: list[Result] = []
    for mode in modes:
        with running(builder, settings, mode) as engine:
            found = answers(engine, settings)
        expected = expected or found
        assert_same(expected, found, str(mode))


def test_eager_runners_agree(models: Models, settings: Settings) -> None:
    """Model Runner V1 without and V2 with async scheduling."""
    agree(models(settings.model), settings, EAGER)


def test_replayed_decodes_are_eager_decodes(models: Models, settings: Settings) -> None:
    """Full decode graphs, captured without torch.compile, change no bit."""
    modes = [EAGER[1], Mode(v2=True, asynchronous=True, options=REPLAYED)]
    agree(models(settings.model), settings, modes)


def test_compiled_runners_agree(models: Models, settings: Settings) -> None:
    """torch.compile with piecewise and full decode graphs, in both runners."""
    modes = [Mode(m.v2, m.asynchronous, COMPILED) for m in EAGER]
    agree(models(settings.model), settings, modes)
