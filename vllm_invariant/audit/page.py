# In a vLLM branch: not needed.
"""A report as one web page that needs nothing beside it: style, drawings and numbers are within."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from vllm_invariant.audit.answers import EQUAL
from vllm_invariant.audit.report import Case, Report, Row

LABEL, WIDTH = 190, 920  # of a drawing, in its units
LANE = 9  # height of one request in the heat map
EARLY, LATE = (150, 0, 24), (253, 190, 133)  # colours of a first difference at the first and last position
TICKS = 5


@dataclass(frozen=True)
class Run:
    """Neighbouring positions of one colour."""

    x: float
    width: float
    colour: str
    hint: str


@dataclass(frozen=True)
class Lane:
    """One request in the heat map."""

    y: int
    label: str
    runs: list[Run]


def colour(first: int, positions: int) -> str:
    """The colour of what follows a first difference at position ``first``: the earlier, the darker."""
    share = first / max(1, positions - 1)
    return "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in zip(EARLY, LATE, strict=True))


def _runs(case: Case, positions: int) -> list[Run]:
    cell = (WIDTH - LABEL) / positions
    first = next((i for i, mark in enumerate(case.marks) if mark != EQUAL), None)
    runs, start = [], 0
    for end in range(1, len(case.marks) + 1):
        if end < len(case.marks) and (case.marks[end] == EQUAL) == (case.marks[start] == EQUAL):
            continue
        equal = case.marks[start] == EQUAL
        paint = "#cde6d3" if equal or first is None else colour(first, positions)
        hint = "equal" if equal else case.first_difference or ""
        places = f"request {case.number} of {case.length} tokens, positions {start} to {end - 1}: {hint}"
        runs.append(Run(LABEL + start * cell, (end - start) * cell, paint, places))
        start = end
    return runs


def heat_map(rows: list[Row]) -> dict[str, Any]:
    """Lanes of every axis, top to bottom, and where each axis' name goes."""
    positions = max((len(case.marks) for row in rows for case in row.cases), default=1)
    lanes, names, y = [], [], 18
    for row in rows:
        names.append({"y": y + LANE - 2, "text": row.axis, "state": row.state})
        for case in row.cases:
            lanes.append(Lane(y, f"{case.length:,}", _runs(case, positions)))
            y += LANE
        y += 6
    cell = (WIDTH - LABEL) / positions
    step = max(1, positions // 8)
    ticks = [{"x": LABEL + i * cell, "text": i} for i in range(0, positions, step)]
    return {"lanes": lanes, "names": names, "ticks": ticks, "height": y, "width": WIDTH, "lane": LANE}


def latency(reference: Row, loaded: Row) -> dict[str, Any]:
    """Times to the first and the last token of each request, alone and under load."""
    slowest = max(case.last for row in (reference, loaded) for case in row.cases)

    def x(seconds: float) -> float:
        return LABEL + (WIDTH - LABEL - 20) * seconds / slowest

    under = {case.number: case for case in loaded.cases}
    both = [(case, under[case.number]) for case in reference.cases if case.number in under]
    lines = [
        {
            "y": 26 + 20 * i,
            "label": f"{a.length:,} tokens",
            "alone": (x(a.first), x(a.last)),
            "loaded": (x(b.first), x(b.last)),
            "hint": f"alone {a.first:.3f} s, {a.last:.3f} s; under load {b.first:.3f} s, {b.last:.3f} s",
        }
        for i, (a, b) in enumerate(both)
    ]
    ticks = [{"x": x(slowest * i / TICKS), "text": f"{slowest * i / TICKS:.2f} s"} for i in range(TICKS + 1)]
    return {"lines": lines, "ticks": ticks, "height": 30 + 20 * len(both), "width": WIDTH}


def commands(report: Report) -> list[dict[str, str]]:
    """What to type to see each difference again."""
    found = [{"what": "the whole audit", "command": report.command}]
    for row in report.rows:
        if not row.different:
            continue
        alone = report.command.replace(" audit ", f" audit --axis {row.axis.split(',')[0]} ", 1)
        if alone not in (each["command"] for each in found):
            found.append({"what": f"{row.axis} by itself", "command": alone})
        case = next(case for case in row.cases if case.first_difference)
        if report.url and report.facts and case.number < len(report.prompts):
            what = f"request {case.number}, of {case.length} tokens, by itself"
            found.append(
                {"what": what, "command": _curl(report.url, report.facts.model, report.prompts[case.number])}
            )
    return found


def _curl(url: str, model: str, prompt: Any) -> str:
    body = {
        "model": model,
        "prompt": prompt.tokens,
        "max_tokens": prompt.max_tokens,
        "temperature": 0,
        "logprobs": 20,
        "ignore_eos": True,
        "return_tokens_as_token_ids": True,
    }
    words = ("curl", f"{url}/v1/completions", "-H", "Content-Type: application/json", "-d", json.dumps(body))
    return shlex.join(words)


def render(report: Report) -> str:
    """The page."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("vllm_invariant.audit", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    others = report.rows[1:]
    loaded = next((row for row in others if row.axis == "company" and row.cases), None)
    return environment.get_template("page.html.j2").render(
        report=report,
        heat=heat_map(others) if others else None,
        latency=latency(report.rows[0], loaded) if loaded else None,
        commands=commands(report),
        early=colour(0, 2),
        late=colour(1, 2),
    )


def write_page(report: Report, path: Path) -> None:
    """Write the page."""
    path.write_text(render(report), encoding="utf-8")
