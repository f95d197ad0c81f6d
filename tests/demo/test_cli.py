"""The command is light, and its exit code is the verdict."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from vllm_invariant import cli

HEAVY = ("torch", "transformers", "vllm", "openai", "httpx")


def test_importing_the_command_loads_nothing_heavy():
    script = f"import sys, vllm_invariant.cli; print([m for m in {HEAVY!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_help_names_the_commands():
    result = CliRunner().invoke(cli.app, ["--help"])
    assert result.exit_code == 0 and "demo" in result.output


@pytest.mark.parametrize("code", [0, 1, 130])
def test_the_exit_code_is_the_demos(monkeypatch, code):
    monkeypatch.setattr("vllm_invariant.demo.run.run", lambda console: code)
    assert CliRunner().invoke(cli.app, ["demo"]).exit_code == code
