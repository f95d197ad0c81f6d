# In a vLLM branch: not needed (a tool for users).
"""A trace on one screen, and as JSON."""

from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from vllm_invariant.trace.compare import Difference, Side
from vllm_invariant.trace.plan import FIRST
from vllm_invariant.trace.record import Run

if TYPE_CHECKING:
    from vllm_invariant.trace.run import Trace


def screen(found: "Trace") -> RenderableType:
    """Everything on one screen."""
    verdict = found.verdict
    runs = Table(show_header=True, box=None, pad_edge=False)
    for title in ("run", "", "prompt chunks", "cached", "steps", "in company", "generated"):
        runs.add_column(title)
    runs.add_row("A", FIRST.name, *_run(found.first))
    runs.add_row("B", found.way.name, *_run(found.second))
    counted = f"{verdict.compared:,} rows and states compared, {verdict.skipped:,} only in one run"
    parts: list[RenderableType] = [runs, counted]
    parts += [f"not watched: {escape(text)}" for text in found.first.unseen]
    if verdict.same:
        return Group(*parts, "[bold green]same[/]: every bit, and every logprob")
    if verdict.difference is None:
        return Group(*parts, "[bold red]differs[/] after the last place that is watched: " + _outcome(found))
    return Group(*parts, "", *_difference(found, verdict.difference), _outcome(found))


def _run(run: Run) -> tuple[str, ...]:
    chunks = ", ".join(f"{start}-{end}" for start, end in run.chunks[:6])
    more = f" and {len(run.chunks) - 6} more" if len(run.chunks) > 6 else ""
    shared = sum(step.requests > 1 for step in run.steps)
    return chunks + more, str(run.cached), str(len(run.steps)), str(shared), str(len(run.tokens))


def _difference(found: "Trace", difference: Difference) -> list[RenderableType]:
    spot = difference.first
    head = Table(show_header=False, box=None, pad_edge=False)
    head.add_row("[bold red]first difference[/]", f"{len(difference.positions)} token positions differ here")
    head.add_row("layer", f"[bold]{difference.layer}[/]")
    head.add_row("operation", f"[bold]{difference.operation}[/]")
    head.add_row("token", f"[bold]{spot.position}[/] ({_kind(spot.position, len(found.ask.prompt))})")
    head.add_row("tensor", f"[bold]{escape(spot.tensor)}[/]{_values(found)}")
    sides = Table(pad_edge=False)
    sides.add_column("")
    sides.add_column("A", overflow="fold")
    sides.add_column("B", overflow="fold")
    for name, a, b in zip(_ROWS, _side(difference.a), _side(difference.b), strict=True):
        if a or b:
            sides.add_row(name, escape(a), escape(b))
    return [head, sides]


_ROWS = ("tensor", "ran", "Triton kernels", "shape", "step", "tokens of the request", "whole step")


def _side(side: Side) -> tuple[str, ...]:
    step, seen = side.step, side.seen
    made = side.writer or seen
    ran = seen.ran if made is seen else f"{made.ran}, into {seen.ran}"
    rows = f"{step.rows} row{'s' * (step.rows > 1)}"
    company = f"{rows} of {step.requests} request{'s' * (step.requests > 1)}"
    if step.cached_rows:
        company += f", {step.cached_rows} of them decode"
    return (
        seen.tensor,
        ran,
        "\n".join(made.kernels[-8:]),
        f"{seen.dtype} {list(seen.shape)}",
        str(step.number),
        f"{step.start} to {step.end}",
        company,
    )


def _kind(position: int, prompt_len: int) -> str:
    if position < prompt_len:
        return f"of a prompt of {prompt_len}"
    return f"generated token {position - prompt_len}, fed back"


def numbers(found: "Trace") -> dict[str, Any] | None:
    """How far the row of the first difference is apart, or None if its values were not kept."""
    if found.values is None:
        return None
    (a, _), (b, _) = found.values
    if a.shape != b.shape:
        return None
    apart = np.nonzero((a != b) & ~(np.isnan(a) & np.isnan(b)))[0]
    if not len(apart):
        return {"values": len(a), "differing": 0}
    i = int(apart[0])
    return {
        "values": len(a),
        "differing": len(apart),
        "largest": float(np.max(np.abs(a[apart] - b[apart]))),
        "first": {"index": i, "a": float(a[i]), "b": float(b[i])},
    }


def _values(found: "Trace") -> str:
    apart = numbers(found)
    if apart is None:
        return ""
    if not apart["differing"]:
        return ": on a second look both runs had the same values, so it comes and goes"
    first = apart["first"]
    return (
        f": {apart['differing']} of {apart['values']} values differ, by up to {apart['largest']:.3g}; "
        f"value {first['index']} is {first['a']!r} and {first['b']!r}"
    )


def _outcome(found: "Trace") -> str:
    verdict = found.verdict
    sites = len(verdict.difference.sites) if verdict.difference else 0
    said = f"{sites} places differ in all; " if sites else ""
    if verdict.logprobs is None:
        return said + "tokens and logprobs came out the same"
    token = "no generated token" if verdict.token is None else f"generated token {verdict.token}"
    return said + f"first to differ: logprobs of generated token {verdict.logprobs}, {token}"


def to_json(found: "Trace", code: int, void: str | None) -> dict[str, Any]:
    """The trace as plain values.

    Args:
        found: it.
        code: the command's exit code.
        void: why the second run proves nothing, or None.

    """
    verdict, difference = found.verdict, found.verdict.difference
    said: dict[str, Any] = {
        "exit_code": code,
        "void": void,
        "prompt_tokens": len(found.ask.prompt),
        "runs": {
            name: {
                "way": way,
                "chunks": run.chunks,
                "cached": run.cached,
                "steps": len(run.steps),
                "tokens": run.tokens,
            }
            for name, way, run in (("a", FIRST.name, found.first), ("b", found.way.name, found.second))
        },
        "compared": verdict.compared,
        "only_in_one_run": verdict.skipped,
        "not_watched": found.first.unseen,
        "first_token": verdict.token,
        "first_logprobs": verdict.logprobs,
        "difference": None,
    }
    if difference is not None:
        said["difference"] = {
            "layer": difference.layer,
            "operation": difference.operation,
            "position": difference.first.position,
            "tensor": difference.first.tensor,
            "positions": difference.positions,
            "places": difference.sites,
            "numbers": numbers(found),
            **{
                name: dict(zip((row.replace(" ", "_") for row in _ROWS), _side(side), strict=True))
                | {"kernels": (side.writer or side.seen).kernels}
                for name, side in (("a", difference.a), ("b", difference.b))
            },
        }
    return said
