"""On an invariant engine the trace finds nothing, and says which path it took; what fails is said plainly."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import on_either
from tests.harness import device
from tests.harness.prompts import prompt
from vllm_invariant.trace.plan import FIRST, Ask, path_not_taken, second_way
from vllm_invariant.trace.record import AFTER, KEYS_AND_VALUES, STATES, Run
from vllm_invariant.trace.run import look
from vllm_invariant.trace.worker import Worker, WorkerError

pytestmark = pytest.mark.engine

OPTIONS = ["--max-model-len", "2048", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(256 << 20)]
if device.NAME == "cuda":
    OPTIONS += ["--gpu-memory-utilization", str(device.OPTIONS["gpu_memory_utilization"])]
ASK = Ask(tuple(prompt(400, seed=95)), 6)
COMPANY = (Ask(tuple(prompt(63, seed=96)), 8), Ask(tuple(prompt(150, seed=97)), 2, at=3))


@pytest.fixture(scope="module")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """One invariant engine for all of them."""
    for name, value in device.ENVIRONMENT.items():
        os.environ[name] = value
    with Worker(tmp_path_factory.mktemp("trace") / "log", str(checkpoint), OPTIONS, {}) as worker:
        yield worker


@on_either
@pytest.mark.parametrize(
    "way",
    [
        {"company": COMPANY},
        {"hit": True},
        {"hit": True, "company": COMPANY},
        {"after": [Ask(ASK.prompt[:350], 40)]},
    ],
    ids=["company", "hit", "hit in company", "after a prefix of it"],
)
def test_nothing_differs(engine: Worker, way: dict[str, Any], machine: str) -> None:
    found = look(engine, engine, ASK, second_way(ASK, **way))
    assert found.verdict.same, found.verdict
    assert path_not_taken(found.way, found.first, found.second) is None
    assert found.verdict.compared > 1000
    if "company" in way:
        steps = found.second.steps
        assert any(s.cached_rows and s.cached_rows < s.rows and s.start >= 400 for s in steps), "never mixed"
    if "hit" in way or "after" in way:
        assert found.second.cached > 0


@on_either
def test_everything_is_watched(engine: Worker, machine: str) -> None:
    """Every operation of every layer, for every token, and every state after every step."""
    run = engine.run(ASK, FIRST)
    assert not run.unseen
    seen: dict[tuple[str, str], list[int]] = {}
    for step in run.steps:
        for each in step.seen:
            seen.setdefault((each.site, each.tensor), []).extend(each.positions.tolist())
    every = list(range(400 + 5))
    for layer in range(8):
        full = layer % 4 == 3
        below = "self_attn" if full else "linear_attn"
        names = ["qkv_proj", "attn"] if full else ["in_proj_qkvz", "conv1d", "recurrence", "norm"]
        for name in names:
            found = [p for (site, _), p in seen.items() if site == f"model.layers.{layer}.{below}.{name}"]
            assert every in found, (layer, name)
        if full:
            assert (f"model.layers.{layer}.self_attn.attn", KEYS_AND_VALUES) in seen
        else:
            states = {(f"model.layers.{layer}.linear_attn", name + AFTER) for name in STATES}
            ends = [step.end - 1 for step in run.steps]
            assert all(seen[state] == ends for state in states)
    assert seen["logits_processor", "output"] == [step.end - 1 for step in run.steps]


def test_two_runs_of_one_engine_are_the_same_bytes(engine: Worker) -> None:
    def digests(run: Run) -> list[Any]:
        return [(s.site, s.tensor, s.digests.tolist()) for step in run.steps for s in step.seen]

    assert digests(engine.run(ASK, FIRST)) == digests(engine.run(ASK, FIRST))


def command(checkpoint: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from vllm_invariant.cli import app; app()"
    return subprocess.run(
        [sys.executable, "-c", code, "trace", str(checkpoint), *OPTIONS, "--prompt-ids", *arguments],
        env=os.environ | device.ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_the_command_compares_two_budgets(checkpoint: Path, tmp_path: Path) -> None:
    """In two processes, with the result as JSON too."""
    ids, file = ",".join(map(str, ASK.prompt)), tmp_path / "trace.json"
    ended = command(checkpoint, ids, "--cut", "128", "--max-tokens", "2", "--json", str(file))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = json.loads(file.read_text())
    assert said["difference"] is None and said["exit_code"] == 0 and said["compared"] > 1000
    assert said["runs"]["a"]["chunks"] != said["runs"]["b"]["chunks"]
    assert all(end % 64 == 0 for _, end in said["runs"]["b"]["chunks"][:-1])
    assert "same" in ended.stdout


def test_an_engine_that_cannot_start(checkpoint: Path, tmp_path: Path) -> None:
    """One sentence, and not a traceback."""
    ended = command(checkpoint, "1,2,3", "--alone", "--mamba-ssm-cache-dtype", "bfloat16")
    assert ended.returncode == 2
    assert "could not run" in ended.stdout and "--mamba-ssm-cache-dtype float32" in ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr
    with (
        pytest.raises(WorkerError, match="unrecognized arguments"),
        Worker(tmp_path / "log", str(checkpoint), ["--no-such-option", "1"], {}) as worker,
    ):
        worker.wait()
