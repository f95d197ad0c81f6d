"""Verdict, exit code, table, and the files a report is written to."""

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from rich.console import Console

from tests.audit.answers import answer
from vllm_invariant.audit.axes import AXES, Outcome
from vllm_invariant.audit.failure import AuditFailed
from vllm_invariant.audit.files import write_json, write_junit
from vllm_invariant.audit.geometry import Facts, Geometry
from vllm_invariant.audit.page import colour, render
from vllm_invariant.audit.prompts import Prompt
from vllm_invariant.audit.reference import Reference
from vllm_invariant.audit.report import Report, compare, table

PROMPTS = [Prompt((1, 2, 3), 2), Prompt((4,) * 63, 2)]
COLD = [answer(), answer()]
OTHER = answer(logprobs=({7: -0.5, 9: -1.25}, {8: -0.2500000298023224}), cached=64)


def row(name="batch", answers=None, void=None):
    answers = [answer(), answer(cached=64)] if answers is None else answers
    return compare(name, "how", PROMPTS, COLD, Outcome(list(enumerate(answers)), "seen", void))


def report(*rows, **more):
    facts = Facts("tiny", "0.0", True, "cpu", {"eager": "True"}, 1.0)
    known = {"facts": facts, "geometry": Geometry(4096), "prompts": PROMPTS, "finished": True}
    return Report(
        "vllm-invariant audit --base-url URL", "http://x", rows=[row("(reference)"), *rows], **known | more
    )


EQUAL = row()
DIFFERENT = row("company", [answer(), OTHER])
VOID = row("cut", void="nobody <came>")


def test_one_bit_makes_a_row_different_and_says_where():
    assert (EQUAL.state, EQUAL.first) == ("equal", None)
    assert (DIFFERENT.state, DIFFERENT.tokens, DIFFERENT.logprobs) == ("different", 0, 1)
    assert DIFFERENT.first == "request 1, position 1: logprob of 8 -0.25 became -0.2500000298023224"
    assert [case.marks for case in DIFFERENT.cases] == ["..", ".l"]


CODES = [
    (report(EQUAL), 0, "EQUAL: 2 answers"),
    (report(EQUAL, DIFFERENT), 1, "DIFFERENT: company"),
    (report(DIFFERENT, VOID), 1, "DIFFERENT: company"),
    (report(DIFFERENT, error="gone", finished=False), 1, "DIFFERENT: company; then: gone"),
    (report(EQUAL, error="gone", finished=False), 2, "COULD NOT RUN: gone"),
    (report(EQUAL, finished=False), 2, "COULD NOT RUN: stopped early"),
    (report(EQUAL, VOID), 3, "NOT EXERCISED: cut (nobody <came>)"),
    (report(), 3, "NOT EXERCISED: no axis was asked"),
    (report(DIFFERENT, interrupted=True), 130, "INTERRUPTED after 2 rows; DIFFERENT: company"),
]


@pytest.mark.parametrize(("found", "code", "verdict"), CODES, ids=[verdict for *_, verdict in CODES])
def test_the_exit_code_and_the_verdict(found, code, verdict):
    assert found.code == code
    assert found.verdict.startswith(verdict)


def test_the_table_shows_every_row_and_what_was_not_asked():
    rows = [row(axis.name) for axis in AXES]
    console = Console(width=150, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table(report(*rows, DIFFERENT, VOID, not_asked={"mode": "needs [another]"})))
    text = console.export_text()
    assert all(axis.name in text for axis in AXES)
    for words in ("no: nobody <came>", "yes: seen", "request 1, position 1", "not asked: needs [another]"):
        assert words in text


def test_json_has_everything(tmp_path):
    path = tmp_path / "report.json"
    write_json(report(DIFFERENT, VOID, retries=3), path)
    found = json.loads(path.read_text())
    assert (found["exit_code"], found["retries"], found["prompts"]) == (1, 3, [3, 63])
    assert found["facts"]["version"] == "0.0" and found["geometry"]["grid"] == 64
    assert [r["state"] for r in found["rows"]] == ["equal", "different", "not exercised"]
    assert found["rows"][1]["cases"][1] == {
        "number": 1,
        "length": 63,
        "cached": 64,
        "marks": ".l",
        "first_difference": "position 1: logprob of 8 -0.25 became -0.2500000298023224",
        "first": 1.0,
        "last": 2.0,
    }


def test_junit_has_a_case_for_each_axis(tmp_path):
    path = tmp_path / "report.xml"
    write_junit(report(EQUAL, DIFFERENT, VOID, not_asked={"mode": "why"}, error="gone", finished=False), path)
    suite = ElementTree.parse(path).getroot()
    assert suite.tag == "testsuite"
    counts = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": 6, "failures": 2, "errors": 1, "skipped": 1}
    cases = {case.get("name"): [child.tag for child in case] for case in suite}
    assert cases["batch"] == ["system-out"] and cases["mode"] == ["skipped"] and cases["run"] == ["error"]
    company, cut = (suite.find(f"testcase[@name='{name}']/failure") for name in ("company", "cut"))
    assert company.get("message") == "0 tokens and 1 logprobs differ"
    assert company.text.startswith("request 1, 63 tokens: position 1")
    assert (cut.get("type"), cut.get("message")) == ("not exercised", "nobody <came>")


def test_the_page_needs_nothing_beside_it():
    page = render(report(EQUAL, DIFFERENT, VOID, not_asked={"mode": "why"}))
    assert page.count("<svg") == page.count("</svg>") == 2  # differences, and latency
    for outside in ("<script", "<link", "src=", "@import", "url("):
        assert outside not in page
    assert "DIFFERENT: company" in page and "nobody &lt;came&gt;" in page
    assert colour(1, 2) in page
    assert "vllm-invariant audit --axis company --base-url URL" in page
    assert "curl http://x/v1/completions" in page


def test_a_page_can_be_written_at_any_time():
    for found in (Report("x"), report(), report(EQUAL), report(row("company", [])), report(row("company"))):
        assert render(found).rstrip().endswith("</html>")
    assert "This report is partial: gone" in render(Report("x", error="gone"))


def test_the_earlier_the_first_difference_the_darker():
    shades = [sum(bytes.fromhex(colour(i, 32)[1:])) for i in range(32)]
    assert shades == sorted(shades) and shades[0] < shades[-1]


def test_a_reference_survives_a_file(tmp_path):
    path = tmp_path / "answers.json"
    answers = [replace(OTHER, tokens=(7, " text")), answer()]
    saved = Reference(Facts("tiny", mode={"eager": "True"}), PROMPTS, answers, "here")
    saved.save(path)
    loaded = Reference.load(path)
    assert (loaded.facts, loaded.prompts, loaded.source) == (saved.facts, PROMPTS, str(path))
    assert [(a.tokens, a.logprobs) for a in loaded.answers] == [(a.tokens, a.logprobs) for a in answers]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "facts": {"x": 1}}'])
def test_another_file_is_no_reference(tmp_path, text):
    path = tmp_path / "answers.json"
    path.write_text(text)
    with pytest.raises(AuditFailed, match="was not written by --save"):
        Reference.load(path)
