"""What the plugin costs an engine that does not ask for it: not one call."""

import json
from pathlib import Path

import pytest

from tests.harness import device
from tests.harness.process import run_module

pytestmark = [pytest.mark.engine, pytest.mark.slow]

OPTIONS = {"max_model_len": 2048, "max_num_seqs": 8, "seed": 0, **device.OPTIONS, **device.STOCK_OPTIONS}


def calls(checkpoint: Path, folder: Path, plugins: str, flag: str | None) -> dict[str, int]:
    """Calls by function, of an engine in a process of its own."""
    out = folder / f"{plugins}-{flag}.json"
    environment = {"VLLM_PLUGINS": plugins, "VLLM_BATCH_INVARIANT": flag}
    arguments = (str(checkpoint), str(out), json.dumps(OPTIONS))
    run_module("tests.harness.calls", *arguments, environment=environment)
    return json.loads(out.read_text())


def test_without_the_flag_an_engine_makes_the_same_calls(checkpoint: Path, tmp_path: Path) -> None:
    """From the first request to the last answer, function by function; under the flag it does not."""
    stock = calls(checkpoint, tmp_path, "", None)
    assert sum(stock.values()) > 10_000, "void: the engine's steps were not counted"
    ours = calls(checkpoint, tmp_path, "vllm_invariant", None)
    assert {name: (stock.get(name), n) for name, n in ours.items() if stock.get(name) != n} == {}
    assert stock.keys() == ours.keys()
    assert calls(checkpoint, tmp_path, "vllm_invariant", "1") != stock
