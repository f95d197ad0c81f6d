"""``audit MODEL``: servers it starts itself.  Stand-ins take vLLM's place."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_invariant import cli
from vllm_invariant.audit import server

ROOT = Path(__file__).parents[2]


@pytest.fixture
def audit(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")

    def go(program: list[str], *arguments: str):
        monkeypatch.setattr(server, "serve_command", lambda: [sys.executable, *program])
        path = tmp_path / "report.json"
        words = ["audit", "MODEL", "--tokens", "8", "--json", str(path), *arguments]
        return CliRunner().invoke(cli.app, words), json.loads(path.read_text())

    return go


def test_boot_and_mode_are_servers_of_their_own(audit):
    result, report = audit(["-m", "tests.audit.fake"], "--axis", "batch", "--axis", "boot", "--axis", "mode")
    assert result.exit_code == 0, result.output
    rows = {row["axis"]: row for row in report["rows"]}
    assert list(rows) == ["(reference)", "batch", "boot", "mode"] and report["not_asked"] == {}
    assert rows["boot"]["proof"] == "another process"
    assert rows["mode"]["proof"] == "another process, async scheduling False → True"


def test_a_mode_the_server_refuses_is_not_passed(audit):
    """It is started with the option last, but vLLM may know better."""
    result, report = audit(["-m", "tests.audit.fake"], "--axis", "mode", "--async-scheduling")
    assert result.exit_code == 3, result.output
    (row,) = [row for row in report["rows"] if row["axis"] == "mode"]
    assert row["void"] == "the server kept its mode"


REFUSING = """
print("ValueError: vllm-invariant: quantization is not covered; use none.")
print("RuntimeError: Engine core initialization failed. See root cause above.")
raise SystemExit(3)
"""


def test_a_refused_model_is_told_in_one_line(audit):
    result, report = audit(["-c", REFUSING])
    assert result.exit_code == 2 and not report["finished"]
    expected = (
        "the server ended with code 3: ValueError: vllm-invariant: quantization is not covered; use none."
    )
    assert report["error"] == expected and f"COULD NOT RUN: {expected}" in result.output
    assert "the servers' log: " in result.output


def test_vllms_options_are_passed_on(audit):
    script = "import sys; print('AError:', *sys.argv[1:]); raise SystemExit(1)"
    _, report = audit(["-c", script], "--max-model-len", "4096", "--enforce-eager")
    words = report["error"].split()
    assert words[words.index("AError:") + 1] == "MODEL"
    assert words[-7:-4] == ["--max-model-len", "4096", "--enforce-eager"]
    assert words[-4:-1] == ["--host", "127.0.0.1", "--port"]
