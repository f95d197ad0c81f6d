# In a vLLM branch: not needed (a test would assert instead).
"""What an audit found: rows, verdict, exit code, and the table."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.markup import escape
from rich.table import Table

from vllm_invariant.audit.answers import Answer, difference
from vllm_invariant.audit.axes import Outcome
from vllm_invariant.audit.geometry import Facts, Geometry
from vllm_invariant.audit.prompts import Prompt

EQUAL, DIFFERENT, NOT_RUN, NOT_EXERCISED = range(4)  # exit codes
INTERRUPTED = 130


@dataclass(frozen=True)
class Case:
    """One request on one axis, compared with the reference.

    Attributes:
        number: of its prompt.
        length: of its prompt, in tokens.
        cached: prompt tokens taken from the prefix cache, or None if unknown.
        marks: one character a position, see `answers`.
        first_difference: where it parts from the reference, in words, or None.
        first, last: seconds until its first and last token.

    """

    number: int
    length: int
    cached: int | None
    marks: str
    first_difference: str | None
    first: float
    last: float


@dataclass(frozen=True)
class Row:
    """One axis, compared with the reference.

    Attributes:
        axis: its name.
        how: what was different, in a few words.
        proof: what was seen of its path.
        void: why the axis proves nothing, or None.
        tokens, logprobs: how many differ.
        cases: the requests.

    """

    axis: str
    how: str
    proof: str
    void: str | None
    tokens: int
    logprobs: int
    cases: list[Case]

    @property
    def different(self) -> bool:
        """Whether a single bit differs."""
        return self.tokens > 0 or self.logprobs > 0

    @property
    def first(self) -> str | None:
        """Where the first request that differs parts from the reference."""
        apart = [case for case in self.cases if case.first_difference]
        return f"request {apart[0].number}, {apart[0].first_difference}" if apart else None

    @property
    def state(self) -> str:
        """``different``, ``not exercised`` or ``equal``."""
        return "different" if self.different else "not exercised" if self.void else "equal"


def compare(name: str, how: str, prompts: Sequence[Prompt], reference: Sequence[Answer], got: Outcome) -> Row:
    """Compare an axis' answers with the reference."""
    cases, tokens, logprobs = [], 0, 0
    for i, answer in got.answers:
        apart = difference(reference[i], answer)
        tokens += apart.tokens
        logprobs += apart.logprobs
        cases.append(
            Case(
                number=i,
                length=len(prompts[i].tokens),
                cached=answer.cached,
                marks=apart.marks,
                first_difference=apart.first,
                first=answer.first - answer.sent,
                last=answer.last - answer.sent,
            )
        )
    return Row(name, how, got.proof, got.void, tokens, logprobs, cases)


@dataclass
class Report:
    """What an audit found so far.

    Attributes:
        command: that gives it again.
        url: of the server, if it goes on running.
        facts, geometry: of the server, once it was asked.
        prompts: that were compared.
        rows: the reference, then one an axis.
        not_asked: axes that were not, with why.
        retries: requests sent again because the server was busy.
        error: why the audit could not go on, or None.
        finished: whether every axis was asked.
        seconds: it took.

    """

    command: str
    url: str | None = None
    facts: Facts | None = None
    geometry: Geometry | None = None
    prompts: list[Prompt] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    not_asked: dict[str, str] = field(default_factory=dict)
    retries: int = 0
    error: str | None = None
    finished: bool = False
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def code(self) -> int:
        """The exit code.  A difference that was found stays one, whatever else happened."""
        if self.interrupted:
            return INTERRUPTED
        if any(row.different for row in self.rows):
            return DIFFERENT
        if self.error or not self.finished:
            return NOT_RUN
        return NOT_EXERCISED if len(self.rows) < 2 or any(row.void for row in self.rows) else EQUAL

    @property
    def verdict(self) -> str:
        """One line for people."""
        apart = [row.axis for row in self.rows if row.different]
        void = [f"{row.axis} ({row.void})" for row in self.rows if row.void]
        compared = sum(len(row.cases) for row in self.rows[1:])
        if self.interrupted:
            return f"INTERRUPTED after {len(self.rows)} rows" + (
                f"; DIFFERENT: {', '.join(apart)}" if apart else ""
            )
        if apart:
            return f"DIFFERENT: {', '.join(apart)}" + (f"; then: {self.error}" if self.error else "")
        if self.error or not self.finished:
            return f"COULD NOT RUN: {self.error or 'stopped early'}"
        if self.code == NOT_EXERCISED:
            return f"NOT EXERCISED: {', '.join(void) or 'no axis was asked'}"
        return f"EQUAL: {compared} answers, every token and every logprob bit for bit as alone"


def table(report: Report) -> Table:
    """The rows as one table."""
    out = Table(title="The same requests, against each alone and cold")
    out.add_column("axis", no_wrap=True)
    out.add_column("cases", justify="right")
    out.add_column("path proven")
    out.add_column("differing\ntokens", justify="right")
    out.add_column("differing\nlogprobs", justify="right")
    apart = any(row.different for row in report.rows)
    if apart:  # elsewhere its place is needed for the proofs
        out.add_column("first difference")
    styles = {"different": "red", "not exercised": "yellow", "equal": None}
    for i, row in enumerate(report.rows):
        proof = f"no: {row.void}" if row.void else f"yes: {row.proof}"
        numbers = ("", "") if i == 0 else (f"{row.tokens:,}", f"{row.logprobs:,}")
        first = (escape(row.first or ""),) if apart else ()
        cells = (row.axis, f"{len(row.cases)}", escape(proof), *numbers, *first)
        out.add_row(*cells, style=styles[row.state], end_section=i == 0)
    for axis, why in report.not_asked.items():
        out.add_row(axis, "", escape(f"not asked: {why}"), style="dim")
    return out
