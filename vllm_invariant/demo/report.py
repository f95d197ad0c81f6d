# In a vLLM branch: not needed (a test would assert instead).
"""The demo's table, and its verdict."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from vllm_invariant.demo.answers import Answer, Difference, total
from vllm_invariant.demo.axes import Axis, Outcome

EQUAL = Difference()


@dataclass(frozen=True)
class Row:
    """One axis, compared with the reference.

    Attributes:
        axis: its name.
        requests: answers compared.
        cached: prompt tokens these took from the prefix cache.
        difference: from the reference.
        void: why the axis proves nothing, or None.

    """

    axis: str
    requests: int
    cached: int
    difference: Difference
    void: str | None = None


def compare(axis: Axis, reference: Sequence[Answer], outcome: Outcome) -> Row:
    """Compare an axis' answers with the reference."""
    reference = [*reference, *(reference[i] for i, _ in outcome.others)]
    answers = [*outcome.answers, *(answer for _, answer in outcome.others)]
    return Row(
        axis=axis.name,
        requests=len(answers),
        cached=sum(answer.cached for answer in answers),
        difference=total(reference, answers),
        void=outcome.void,
    )


def failures(reference: Outcome, rows: Sequence[Row]) -> list[str]:
    """Why the demo fails, one sentence each.  Empty if every axis came about and no bit differs."""
    problems = [f"the reference proves nothing: {reference.void}"] if reference.void else []
    problems += [f"{row.axis}: proves nothing, {row.void}" for row in rows if row.void]
    for row in rows:
        if row.difference != EQUAL:
            tokens, bits = row.difference.tokens, row.difference.bits
            problems.append(f"{row.axis}: {tokens} tokens and {bits} logprob bits differ")
    if not any(row.cached for row in rows):
        problems.append("no request hit the prefix cache")
    return problems


def success(reference: Outcome, rows: Sequence[Row]) -> str:
    """What was compared and found equal, in one line."""
    tokens = sum(len(answer.tokens) for answer in reference.answers)
    logprobs = sum(len(row) for answer in reference.answers for row in answer.logprobs)
    return (
        f"{len(rows)} times {tokens:,} tokens and {logprobs:,} float32 logprobs, "
        "every one equal bit for bit to the reference"
    )


def table(reference: Outcome, rows: Sequence[Row]) -> Table:
    """The reference and the rows as one table."""
    out = Table(title="The same requests, against each alone and cold")
    out.add_column("axis")
    for name in ("requests", "cache-hit\ntokens", "differing\ntokens", "differing\nlogprob bits"):
        out.add_column(name, justify="right")
    cached = sum(answer.cached for answer in reference.answers)
    out.add_row("(reference)", f"{len(reference.answers)}", f"{cached:,}", "", "", end_section=True)
    for row in rows:
        style = "red" if row.difference != EQUAL else "yellow" if row.void else None
        numbers = (row.requests, row.cached, row.difference.tokens, row.difference.bits)
        out.add_row(row.axis, *(f"{n:,}" for n in numbers), style=style)
    return out
