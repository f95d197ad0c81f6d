"""What the command line hands on."""

import pytest
from typer.testing import CliRunner

from vllm_invariant import cli
from vllm_invariant.trace.plan import Ask


@pytest.fixture
def calls(monkeypatch):
    """Arguments of each run; nothing is run."""
    seen = []

    def run(*args):
        seen.append(args)
        return 1

    monkeypatch.setattr("vllm_invariant.trace.run.run", run)
    monkeypatch.setattr("vllm_invariant.doctor.run", run)
    return seen


def invoke(*words):
    return CliRunner().invoke(cli.app, list(words))


def test_trace_hands_on_the_engines_options(calls):
    words = [
        "trace",
        "model",
        "--max-model-len",
        "99",
        "--prompt-ids",
        "1,2",
        "--hit",
        "--seed=3",
        "--with",
        "7",
    ]
    assert invoke(*words, "--with", "8,9", "--max-tokens", "5").exit_code == 1
    model, arguments, ask, way, _, json_file = calls[0]
    assert (model, arguments, json_file) == ("model", ["--max-model-len", "99", "--seed=3"], None)
    assert ask == Ask((1, 2), 5) and way.before == (ask,)
    assert way.company == (Ask((7,), 5), Ask((8, 9), 5))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model", "--prompt-ids", "1,2"], "--with"),
        (["model", "--prompt-ids", "one", "--hit"], "token ids"),
        (["model", "--prompt-ids", "@/no/such/file", "--hit"], "/no/such/file"),
        (["--seed", "3", "model", "--prompt-ids", "1", "--hit"], "first"),
    ],
)
def test_what_trace_cannot_understand(calls, words, said):
    ended = invoke("trace", *words)
    assert ended.exit_code == 2 and said in ended.output and not calls


def test_doctor_with_and_without_a_model(calls):
    assert invoke("doctor").exit_code == 1
    assert invoke("doctor", "model", "--kv-cache-dtype", "fp8").exit_code == 1
    assert [call[:2] for call in calls] == [(None, []), ("model", ["--kv-cache-dtype", "fp8"])]
    assert invoke("doctor", "--kv-cache-dtype", "fp8").exit_code == 2
