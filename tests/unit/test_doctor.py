"""The doctor says everything that is wrong, and its exit code is the verdict."""

import importlib.metadata
import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace as Fake

import pytest
from rich.console import Console

from benchmarks.models import SHAPES, state_block
from tests.harness import device
from tests.unit.test_preflight import engine as engine_config
from vllm_invariant import doctor, gate, preflight, seams
from vllm_invariant.demo.checkpoint import TINY


@pytest.fixture
def machine(monkeypatch):
    """A machine on which all is well; nothing of vLLM is imported."""
    monkeypatch.setattr(doctor, "versions", lambda: {"python": "3.11.7", "vllm": "0.33.0"})
    monkeypatch.setattr(doctor, "_device", lambda: "NVIDIA H200, SM90")
    monkeypatch.setattr(doctor, "_is_found", lambda: True)
    monkeypatch.setattr(gate, "judge", lambda: gate.Verdict(True, "SM90"))
    monkeypatch.setattr(seams, "probe", lambda seam: None)
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    return monkeypatch


def look(model=None, arguments=()):
    """The exit code, and the screen as one line."""
    flag = os.environ.get("VLLM_BATCH_INVARIANT")
    console = Console(width=4000, record=True, file=io.StringIO())
    try:
        code = doctor.run(model, list(arguments), console)
    finally:
        os.environ.pop("VLLM_BATCH_INVARIANT", None)
        if flag is not None:
            os.environ["VLLM_BATCH_INVARIANT"] = flag
    return code, console.export_text()


def test_a_machine_where_all_is_well(machine):
    code, text = look()
    rows = len({seam.name for seam in seams.SEAMS})
    assert code == doctor.READY
    assert "vllm 0.33.0" in text and "NVIDIA H200" in text and f"{rows} of {rows} in place" in text
    assert "not set" in text and text.rstrip().endswith("ready")


def test_each_seam_that_moved_is_named(machine):
    machine.setattr(seams, "probe", lambda s: f"{s.name}: gone" if s.name in ("S5", "S20") else None)
    code, text = look()
    rows = len({seam.name for seam in seams.SEAMS})
    assert code == doctor.REFUSED
    assert f"{rows - 2} of {rows} in place" in text and "S5: gone" in text and "S20: gone" in text
    assert "not ready" in text


@pytest.mark.parametrize("broken", ["release", "plugin"])
def test_what_keeps_the_plugin_out(machine, broken):
    if broken == "release":
        machine.setattr(gate, "judge", lambda: gate.Verdict(False, "vLLM 0.31.0 is not a release"))
    else:
        machine.setattr(doctor, "_is_found", lambda: False)
    code, text = look()
    assert code == doctor.REFUSED
    assert {"release": "vLLM 0.31.0", "plugin": "vLLM does not find the plugin"}[broken] in text


def test_without_vllm(machine):
    def none():
        raise importlib.metadata.PackageNotFoundError("vllm")

    machine.setattr(doctor, "versions", none)
    code, text = look()
    assert code == doctor.COULD_NOT_RUN and "vLLM is not installed" in text


def test_everything_refused_is_collected():
    config = engine_config()
    config.cache_config.cache_dtype = "fp8"
    config.model_config.quantization = "awq"
    config.scheduler_config.max_num_batched_tokens = 64
    stock, problems = preflight.check_engine, []
    with doctor._collecting(problems):
        for _ in range(2):  # vLLM asks more than once
            assert preflight.check_engine(config).gdn_arithmetic == "chunk"
    assert preflight.check_engine is stock
    assert len(problems) == 3
    assert [word in " ".join(problems) for word in ("awq", "fp8", "--max-num-batched-tokens 64")] == [
        True
    ] * 3


@pytest.mark.parametrize("shape", SHAPES)
def test_the_block_it_would_run_with(shape):
    text = Fake(**TINY | SHAPES[shape])
    assert doctor.hybrid_block(text, 64) == state_block(shape)
    assert doctor.hybrid_block(text, 2048) == 2048


def test_the_block_of_two_ranks():
    """Both pages halve, so the 35B-A3B shape has the block it has on one GPU, 1,056 tokens in stock's steps.

    A rank keeps its one key-value head whole; then the state alone halves.
    """
    text = Fake(**TINY | SHAPES["qwen35-35b-a3b"])
    assert [doctor.hybrid_block(text, step, ranks=2) for step in (16, 64)] == [1056, 1088]
    text.num_key_value_heads = 1
    assert [doctor.hybrid_block(text, 64, ranks) for ranks in (1, 2)] == [2112, 1088]


def test_settings_follow_the_config():
    config = engine_config()
    config.model_config.hf_text_config = Fake(**TINY)
    config.cache_config.block_size = 64
    found = doctor.settings(config)
    assert found["block"] == "320 tokens" and found["cache hits"] == "every 64 tokens"
    assert found["arithmetic"] == "chunk, a grid of 64 tokens"
    assert found["token budget"].startswith("1024 a step (at least 79)")
    config.cache_config.enable_prefix_caching = False
    assert "off" in doctor.settings(config)["cache hits"]


@pytest.mark.engine
def test_the_command_on_this_machine(checkpoint: Path):
    """No engine is started: a model that is refused for two reasons, each named."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    code = "from vllm_invariant.cli import app; app()"
    options = "--max-model-len 2048 --max-num-seqs 8 --max-num-batched-tokens 64"
    options += " --mamba-ssm-cache-dtype bfloat16"
    ended = subprocess.run(
        [sys.executable, "-c", code, "doctor", str(checkpoint), *options.split()],
        env=os.environ | device.ENVIRONMENT | {"COLUMNS": "400"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == doctor.REFUSED, ended.stdout + ended.stderr
    assert (
        "--mamba-ssm-cache-dtype bfloat16" in ended.stdout and "--max-num-batched-tokens 71" in ended.stdout
    )
    assert "320 tokens" in ended.stdout and "every 64 tokens" in ended.stdout
