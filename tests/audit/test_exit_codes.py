"""Every exit code, on a server that behaves as wanted."""

from pathlib import Path

import pytest

from tests.audit.conftest import Audit
from tests.audit.fake import Behaviour

AXES = ["batch", "company", "cut", "hit", "history"]


def test_an_invariant_server_passes_on_every_axis(audit: Audit, tmp_path: Path) -> None:
    saved = str(tmp_path / "answers.json")
    first = audit(Behaviour(), "--axis", "batch", "--save", saved)
    assert (first.code, first.report["verdict"].split(":")[0]) == (0, "EQUAL"), first.output

    second = audit(Behaviour(started=2000.0), "--against", saved)
    assert second.code == 0, second.output
    rows = second.report["rows"]
    assert [row["axis"].split(",")[0] for row in rows[1:]] == [
        *AXES[:3],
        *["hit"] * 3,
        *["history"] * 3,
        "boot",
    ]
    assert all(row["cases"] and row["proof"] and not row["void"] for row in rows)
    assert second.row("company")["proof"].endswith("mixed steps counted")
    assert sum(case["cached"] for case in second.row("hit, own")["cases"]) > 0
    assert "cache emptied" in second.row("history, again")["proof"] and second.fake.resets == 1
    assert set(second.report["not_asked"]) == {"mode"}


FAULTS = {
    "company": lambda seen: seen.running > 0,
    "hit, own": lambda seen: seen.cached > 0,
    "history, again": lambda seen: seen.before > 18,
}


@pytest.mark.parametrize("axis", FAULTS)
def test_one_bit_is_found(audit: Audit, axis: str) -> None:
    found = audit(Behaviour(fault=FAULTS[axis]), "--axis", axis.split(",")[0])
    assert found.code == 1, found.output
    row = found.row(axis)
    assert row["tokens"] == 0 and row["logprobs"] >= 1
    assert "position 2: logprob of" in row["first"]
    assert all(case["marks"] in ("........", "..l.....") for case in row["cases"])
    assert found.report["verdict"].startswith("DIFFERENT") and axis in found.report["verdict"]


VOID = {
    "batch": (Behaviour(serial=True, pace=0.002), "6 requests decoded beside no other"),
    "company": (Behaviour(burst=True, pace=0.001), "no prefill joined 6"),
    "cut": (Behaviour(burst=True, pace=0.001), "had the whole budget of 128"),
    "hit": (Behaviour(unit=None, pace=0.001), "did not hit the cache"),
    "history": (Behaviour(unit=None, pace=0.001), "did not hit the cache"),
}


@pytest.mark.parametrize("axis", VOID)
def test_a_path_that_was_not_taken_is_not_passed(audit: Audit, axis: str) -> None:
    behaviour, reason = VOID[axis]
    found = audit(behaviour, "--axis", axis)
    assert found.code == 3, found.output
    assert reason in found.report["verdict"] and reason in found.output
    assert all(row["logprobs"] == 0 for row in found.report["rows"])


def test_a_warm_reference_is_no_reference(audit: Audit) -> None:
    found = audit(Behaviour(salted=False, pace=0.001), "--axis", "batch")
    assert found.code == 3 and "cold requests hit the cache" in found.row("(reference)")["void"]


def test_hits_are_found_in_the_servers_counters(audit: Audit) -> None:
    """vLLM tells each request's hits only if asked to; its metrics have their sum."""
    found = audit(Behaviour(tell=False), "--axis", "hit")
    assert found.code == 0, found.output
    assert found.row("hit, own")["proof"].endswith("hit tokens counted")


def test_a_server_that_tells_nothing_proves_nothing(audit: Audit) -> None:
    found = audit(Behaviour(tell=False, metrics=False, pace=0.001), "--axis", "hit", "--block", "64")
    assert found.code == 3
    assert "does not tell" in found.row("(reference)")["void"]
    assert "--enable-prompt-tokens-details" in found.row("hit, own")["void"]


@pytest.mark.parametrize(
    ("then", "now", "axis", "code", "words"),
    [
        ({}, {"started": 2000.0}, "boot", 0, "another process"),
        ({}, {"started": 2000.0, "mode": True}, "mode", 0, "async scheduling False → True"),
        ({}, {}, "boot", 3, "the reference is of this very process"),
        ({}, {"metrics": False}, "boot", 3, "cannot tell whether this is another process"),
        ({}, {"started": 2000.0, "fault": lambda seen: True}, "boot", 1, "position 2"),
    ],
)
def test_answers_of_another_process(audit: Audit, tmp_path: Path, then, now, axis, code, words) -> None:
    saved = str(tmp_path / "answers.json")
    assert audit(Behaviour(pace=0.001, **then), "--axis", "batch", "--save", saved).report["finished"]
    found = audit(Behaviour(pace=0.001, **now), "--axis", axis, "--block", "64", "--against", saved)
    assert found.code == code, found.output
    row = found.row(axis)
    assert words in f"{row['void']} {row['proof']} {row['first']}"
    assert len(row["cases"]) == len(found.report["prompts"]) > 6
