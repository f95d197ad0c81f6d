"""What the world does to an audit: one clear line each, never a traceback, and a partial report."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.audit.conftest import Audit
from tests.audit.fake import Behaviour, serving
from vllm_invariant import cli
from vllm_invariant.audit.server import free_port

FAST = {"pace": 0.001}


def one_line(output: str) -> str:
    """The verdict, which is all of the output that is no progress and no table."""
    (line,) = [line for line in output.splitlines() if line.startswith("COULD NOT RUN: ")]
    assert "Traceback" not in output
    return line.removeprefix("COULD NOT RUN: ")


def test_a_server_that_is_down() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    start = time.monotonic()
    result = CliRunner().invoke(cli.app, ["audit", "--base-url", url])
    assert result.exit_code == 2 and one_line(result.output).startswith(f"cannot reach {url}: ")
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("url", ["localhost:8000", "http://", "ftp://127.0.0.1/v1"])
def test_no_address(url: str) -> None:
    result = CliRunner().invoke(cli.app, ["audit", "--base-url", url])
    assert result.exit_code == 2 and "cannot reach" in one_line(result.output)


REFUSED = {
    "unknown model": (Behaviour(**FAST), ["--model", "other"], "the server serves fake; not other"),
    "several models": (Behaviour(models=("a", "b")), [], "the server serves a, b; choose by --model"),
    "no model": (Behaviour(models=()), [], "the server serves nothing; choose by --model"),
    "no logprobs": (Behaviour(top=0, obey_top=True, **FAST), [], "the server sent no logprobs"),
    "refused": (Behaviour(refuse_always=400), [], "the server answered 400: try later"),
    "no key": (Behaviour(refuse_always=401), [], "wants another API key (OPENAI_API_KEY): try later"),
    "cut": (Behaviour(cut_after=3, **FAST), [], "the connection broke off"),
    "ends early": (Behaviour(end_early=0, **FAST), [], "the stream was cut after 0 of 1 tokens"),
    "too slow": (Behaviour(pace=30), ["--timeout", "0.3"], "no whole answer in time (--timeout)"),
    "too short": (Behaviour(max_len=40, **FAST), [], "no prompt fits a context of 40 tokens"),
    "no such file": (Behaviour(**FAST), ["--against", "nowhere"], "--against nowhere: No such file"),
    "no reference": (Behaviour(**FAST), ["--against", os.devnull], "was not written by --save"),
    "cannot write": (Behaviour(), ["--html", "/nowhere/x.html"], "--html /nowhere/x.html cannot be written"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_clear_line(audit: Audit, case: str) -> None:
    behaviour, arguments, words = REFUSED[case]
    found = audit(behaviour, *arguments)
    assert found.code == 2, found.output
    assert words in one_line(found.output)
    assert found.report["error"] and not found.report["finished"]


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again_after_the_time_it_names(audit: Audit, status: int) -> None:
    refusals = [(status, {"Retry-After": "0.3"})] * 3
    start = time.monotonic()
    found = audit(Behaviour(refusals=refusals, **FAST), "--axis", "batch")
    assert found.code == 0, found.output
    assert not found.fake.behaviour.refusals and time.monotonic() - start > 0.9


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_stays_busy_is_given_up(audit: Audit, monkeypatch, status: int) -> None:
    monkeypatch.setattr("vllm_invariant.audit.traffic.RETRIES", 1)
    found = audit(Behaviour(refuse_always=status), "--axis", "batch")
    assert found.code == 2
    assert one_line(found.output) == f"the server answered {status} to 2 tries: try later"
    assert len(found.fake.bodies) == 2


def test_what_was_found_before_an_error_is_kept(audit: Audit) -> None:
    """A difference stays a difference when the server breaks off afterwards."""
    batch = range(9, 21)  # after a look at the server and the reference
    behaviour = Behaviour(cut_after=3, cut_from=batch.stop, fault=lambda seen: seen.before in batch)
    found = audit(behaviour, "--axis", "batch", "--axis", "history")
    assert found.code == 1 and not found.report["finished"]
    assert found.report["verdict"].startswith("DIFFERENT: batch; then: ")


def test_fewer_logprobs_are_asked_for_where_there_are_fewer(audit: Audit) -> None:
    for obey in (False, True):
        found = audit(Behaviour(top=5, obey_top=obey, **FAST), "--axis", "batch")
        assert found.code == 0, found.output
        assert [body["logprobs"] for body in found.fake.bodies[:3]] == [20, 5, 5]


@pytest.mark.parametrize("arguments", [{"tokenizes": False}, {"names": "text"}, {"dev": False}])
def test_a_server_without_vllms_additions(audit: Audit, arguments: dict) -> None:
    found = audit(Behaviour(**arguments, **FAST), "--axis", "batch", "--axis", "hit")
    assert found.code == 0, found.output
    ids = {token for body in found.fake.bodies[1:7] for token in body["prompt"]}
    text = arguments.get("tokenizes", True)
    assert (min(ids) >= 300 and max(ids) < 1000) is not text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["audit"], "either a MODEL or --base-url"),
        (["audit", "x", "--base-url", "http://127.0.0.1"], "either a MODEL or --base-url"),
        (["audit", "--max-model-len", "4096", "x"], "MODEL before vLLM's options"),
        (["audit", "--base-url", "http://127.0.0.1", "--axis", "form"], "'form' is none of batch"),
        (["audit", "--base-url", "http://127.0.0.1", "--tokens", "1"], "--tokens"),
    ],
)
def test_a_wrong_command_line(words: list[str], message: str) -> None:
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 2 and message in " ".join(result.output.split())


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_audit_writes_what_it_has(tmp_path: Path, ending: signal.Signals) -> None:
    report = tmp_path / "report.json"
    page = tmp_path / "page.html"
    with serving(Behaviour(pace=0.02)) as (url, fake):
        words = ["audit", "--base-url", url, "--tokens", "8", "--json", str(report), "--html", str(page)]
        # As from a terminal, also where this process was started in the background, deaf to Ctrl-C.
        script = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        script += "from vllm_invariant.cli import app; app()"
        process = subprocess.Popen(
            [sys.executable, "-c", script, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        deadline = time.monotonic() + 60
        while fake.completions < 40:  # the reference takes 11
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        process.send_signal(ending)
        output, _ = process.communicate(timeout=30)
    found = json.loads(report.read_text())
    assert "Traceback" not in output, output
    assert not found["finished"] and found["rows"][0]["axis"] == "(reference)"
    assert "This report is partial" in page.read_text()
    assert process.returncode == (130 if ending == signal.SIGINT else 143)
