# In a vLLM branch: not needed (pytest writes its own).
"""A report as files for machines: JSON, and JUnit's XML."""

import json
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

from vllm_invariant.audit.report import Report, Row


def write_json(report: Report, path: Path) -> None:
    """Write everything the report has, but for the prompts' tokens."""
    found = asdict(report) | {"exit_code": report.code, "verdict": report.verdict}
    found["prompts"] = [len(prompt.tokens) for prompt in report.prompts]
    found["rows"] = [asdict(row) | {"state": row.state, "first": row.first} for row in report.rows]
    path.write_text(json.dumps(found, indent=1) + "\n")


def write_junit(report: Report, path: Path) -> None:
    """Write one test case an axis.  An axis that was not exercised is a failure, one not asked is skipped."""
    suite = ElementTree.Element("testsuite", name="vllm-invariant audit", time=f"{report.seconds:.1f}")
    for row in report.rows:
        _case(suite, row)
    for axis, why in report.not_asked.items():
        case = ElementTree.SubElement(suite, "testcase", classname="audit", name=axis)
        ElementTree.SubElement(case, "skipped", message=why)
    if report.error or not report.finished:
        case = ElementTree.SubElement(suite, "testcase", classname="audit", name="run")
        ElementTree.SubElement(case, "error", message=report.error or "stopped early")
    count = {"tests": "testcase", "failures": ".//failure", "errors": ".//error", "skipped": ".//skipped"}
    for name, tag in count.items():
        suite.set(name, str(len(suite.findall(tag))))
    ElementTree.indent(suite)
    ElementTree.ElementTree(suite).write(path, encoding="utf-8", xml_declaration=True)


def _case(suite: ElementTree.Element, row: Row) -> None:
    case = ElementTree.SubElement(suite, "testcase", classname="audit", name=row.axis)
    if row.different:
        words = f"{row.tokens} tokens and {row.logprobs} logprobs differ"
        failure = ElementTree.SubElement(case, "failure", type="different", message=words)
        failure.text = "\n".join(
            f"request {c.number}, {c.length} tokens: {c.first_difference}"
            for c in row.cases
            if c.first_difference
        )
    elif row.void:
        ElementTree.SubElement(case, "failure", type="not exercised", message=row.void)
    ElementTree.SubElement(case, "system-out").text = f"{row.how}; {row.proof}"
