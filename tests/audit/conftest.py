"""An audit of the fake server, as a user would run it."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.audit.fake import Behaviour, Fake, serving
from vllm_invariant import cli


@dataclass
class Audited:
    """What came out: exit code, what was printed, the JSON report if one was written, and the server."""

    code: int
    output: str
    report: dict[str, Any] | None
    fake: Fake

    def row(self, axis: str) -> dict[str, Any]:
        """The row of an axis."""
        assert self.report is not None, self.output
        (row,) = [row for row in self.report["rows"] if row["axis"] == axis]
        return row


Audit = Callable[..., Audited]


@pytest.fixture
def audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Audit:
    """Runs ``audit --base-url`` on a fake server.  Errors other than `SystemExit` are raised."""
    monkeypatch.setenv("COLUMNS", "250")

    def go(behaviour: Behaviour, *arguments: str) -> Audited:
        path = tmp_path / "report.json"
        with serving(behaviour) as (url, fake):
            words = ["audit", "--base-url", f"{url}/v1", "--tokens", "8", "--json", str(path), *arguments]
            result = CliRunner().invoke(cli.app, words)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        report = json.loads(path.read_text()) if path.is_file() else None
        return Audited(result.exit_code, result.output, report, fake)

    return go
