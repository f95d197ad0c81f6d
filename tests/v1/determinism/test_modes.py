"""Axis mode: async scheduling or not, eager or replayed from CUDA graphs, in each of the model runners.

The two runners sample and take logprobs by different kernels, so each is compared with itself.
"""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from tests.gpu import GPU
from tests.harness.compare import Result, assert_same
from tests.harness.engine import Engine, Engines
from tests.v1.determinism.settings import Settings
from tests.v1.determinism.test_batch_invariance import companions, needles

pytestmark = [pytest.mark.engine, pytest.mark.slow, *GPU]

RUNNER, BREAKABLE = "VLLM_USE_V2_MODEL_RUNNER", "VLLM_USE_BREAKABLE_CUDAGRAPH"

Models = Callable[[str | None], Engines]

EAGER: dict[str, Any] = {"enforce_eager": True}
REPLAYED: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}
COMPILED: dict[str, Any] = {"enforce_eager": False, "compilation_config": {"mode": 3}}


@dataclass(frozen=True)
class Mode:
    """How an engine runs its steps."""

    v2: bool
    asynchronous: bool
    options: dict[str, Any]
    breakable: bool = False


@contextmanager
def running(builder: Engines, settings: Settings, mode: Mode) -> Iterator[Engine]:
    """An engine in this mode, and proof that it is."""
    from vllm import envs

    options = settings.engine_options("FLASH_ATTN") | mode.options
    options |= {"enable_prefix_caching": False, "async_scheduling": mode.asynchronous}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, RUNNER, str(int(mode.v2)))
        patch.setitem(os.environ, BREAKABLE, str(int(mode.breakable)))
        envs.disable_envs_cache()  # an earlier engine of this process may have frozen its values
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


on_each_runner = pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])


@on_each_runner
def test_async_and_replayed_steps_are_eager_steps(models: Models, settings: Settings, v2: bool) -> None:
    """Neither async scheduling nor graphs captured without torch.compile change a bit: full graphs of
    decode steps, and breakable ones of any step."""
    modes = [Mode(v2, False, EAGER), Mode(v2, True, EAGER), Mode(v2, True, REPLAYED)]
    modes.append(Mode(v2, True, {"enforce_eager": False}, breakable=True))
    agree(models(settings.model), settings, modes)


@on_each_runner
def test_compiled_steps(models: Models, settings: Settings, v2: bool) -> None:
    """torch.compile rounds in an order of its own; with piecewise and full decode graphs, a compiled
    engine agrees with itself, alone and in company."""
    agree(models(settings.model), settings, [Mode(v2, True, COMPILED)])
