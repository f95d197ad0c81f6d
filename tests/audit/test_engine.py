"""An audit of real servers that it starts itself: one that is invariant, and stock without the flag."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_invariant import cli
from vllm_invariant.demo.run import OPTIONS

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def audit(monkeypatch: pytest.MonkeyPatch, model: Path, folder: Path, flag: str, *arguments: str):
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", flag)
    path = folder / "report.json"
    words = ["audit", str(model), "--tokens", "8", "--json", str(path), *arguments, *OPTIONS]
    result = CliRunner().invoke(cli.app, words)
    assert "Traceback" not in result.output and path.is_file(), result.output
    return result, json.loads(path.read_text())


def test_an_invariant_server_is_found_equal(monkeypatch, checkpoint: Path, tmp_path: Path) -> None:
    result, report = audit(monkeypatch, checkpoint, tmp_path, "1")
    assert result.exit_code == 0, result.output
    assert (report["geometry"]["block"], report["geometry"]["unit"], report["geometry"]["budget"]) == (
        320,
        64,
        512,
    )
    assert report["facts"]["flag"] is True and report["facts"]["device"] == "cpu"
    rows = {row["axis"]: row for row in report["rows"]}
    assert {"batch", "company", "cut", "hit, own", "history, aborted", "boot"} <= set(rows)
    assert "mixed steps counted" in rows["company"]["proof"]
    hits = {case["length"]: case["cached"] for case in rows["hit, own"]["cases"]}
    assert hits == {length: (length - 1) // 64 * 64 for length in hits} and hits[641] == 640
    assert set(report["not_asked"]) == {"mode"}


def test_stock_without_the_flag_is_found_different(monkeypatch, checkpoint: Path, tmp_path: Path) -> None:
    result, report = audit(monkeypatch, checkpoint, tmp_path, "0", "--axis", "batch", "--axis", "company")
    assert result.exit_code == 1, result.output
    assert report["facts"]["flag"] is False
    apart = [row for row in report["rows"] if row["state"] == "different"]
    assert apart and all(row["logprobs"] > 0 and row["first"] for row in apart)
