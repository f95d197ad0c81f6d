"""Axis mode: async scheduling or not, eager or replayed from CUDA graphs, in each of the model runners.

The two runners sample and take logprobs by different kernels, so each is compared with itself.  Every mode
has a process of its own: engines with graphs, one after another in one process, trip an assertion of torch's.
"""

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import GPU
from tests.harness.compare import assert_same
from tests.harness.process import Child, Round, run_child
from tests.v1.determinism.settings import Settings
from tests.v1.determinism.test_batch_invariance import companions, needles

pytestmark = [pytest.mark.engine, pytest.mark.slow, *GPU]

RUNNER, BREAKABLE = "VLLM_USE_V2_MODEL_RUNNER", "VLLM_USE_BREAKABLE_CUDAGRAPH"

TRIALS = 2
AT_ONCE = 5  # modes whose processes run side by side

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


def rounds(settings: Settings) -> list[Round]:
    """The needles, each alone; then each in company, where prefills join its decode steps."""
    alone = [Round([needle]) for needle in needles(settings)]
    company = []
    for trial in range(TRIALS):
        for needle in needles(settings):
            others = companions(settings, settings.batch - 1, random.Random(trial))
            company.append(Round([needle, *others]))
    return alone + company


def run(mode: Mode, model: Path, settings: Settings, folder: Path) -> Child:
    """An engine in this mode, and proof that it is."""
    folder.mkdir()
    options = settings.engine_options("FLASH_ATTN") | mode.options
    options |= {
        "enable_prefix_caching": False,
        "async_scheduling": mode.asynchronous,
        "kv_cache_memory_bytes": 2 << 30,
    }
    environment = {RUNNER: str(int(mode.v2)), BREAKABLE: str(int(mode.breakable))}
    child = run_child(model, folder, rounds(settings), environment, **options)
    assert child.facts["runner"].endswith("worker.gpu.model_runner") == mode.v2
    assert ("Async" in child.facts["scheduler"]) == mode.asynchronous
    assert (child.facts["graphs"] == "NONE") == mode.options["enforce_eager"], child.facts["graphs"]
    assert (child.facts["mode"] == "VLLM_COMPILE") == (mode.options is COMPILED), child.facts["mode"]
    count = len(needles(settings))
    assert all(steps > 0 for steps in child.mixed[count:]), "no prefill joined a decode step of a needle"
    return child


def agree(modes: Sequence[Mode], model: Path, settings: Settings, folder: Path) -> None:
    """Every needle has the bits of the first mode, alone and in company."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        children = pool.map(lambda job: run(job[1], model, settings, folder / str(job[0])), enumerate(modes))
        found = dict(zip(modes_named(modes), children, strict=True))
    count = len(needles(settings))
    first = next(iter(found.values()))
    expected = [result for alone in first.rounds[:count] for result in alone]
    for name, child in found.items():
        for number, results in enumerate(child.rounds):
            assert_same([expected[number % count]], results[:1], f"{name}, round {number}")


def modes_named(modes: Sequence[Mode]) -> list[str]:
    """For messages."""
    return [f"{i}: {mode}" for i, mode in enumerate(modes)]


@pytest.fixture
def model(checkpoint: Path, settings: Settings) -> Path:
    """The suite's checkpoint."""
    return Path(settings.model) if settings.model else checkpoint


on_each_runner = pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])


@on_each_runner
def test_async_and_replayed_steps_are_eager_steps(
    model: Path, settings: Settings, tmp_path: Path, v2: bool
) -> None:
    """Neither async scheduling nor graphs captured without torch.compile change a bit.

    The graphs: full ones of decode steps, and breakable ones of any step.
    """
    modes = [Mode(v2, False, EAGER), Mode(v2, True, EAGER), Mode(v2, True, REPLAYED)]
    modes.append(Mode(v2, True, {"enforce_eager": False}, breakable=True))
    agree(modes, model, settings, tmp_path)


@on_each_runner
def test_compiled_steps(model: Path, settings: Settings, tmp_path: Path, v2: bool) -> None:
    """torch.compile rounds in an order of its own; with piecewise and full decode graphs, a compiled engine
    agrees with itself, alone and in company, with async scheduling and without."""
    agree([Mode(v2, True, COMPILED), Mode(v2, False, COMPILED)], model, settings, tmp_path)
