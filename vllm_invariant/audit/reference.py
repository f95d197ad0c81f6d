# In a vLLM branch: not needed (a test would keep its answers in memory).
"""Saved answers: what another process, version, GPU or day is compared with."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_invariant.audit.answers import Answer, Token
from vllm_invariant.audit.axes import Exam, Outcome, Tick, cold
from vllm_invariant.audit.failure import AuditFailed
from vllm_invariant.audit.geometry import Facts
from vllm_invariant.audit.prompts import Prompt
from vllm_invariant.audit.report import Row, compare
from vllm_invariant.audit.survey import Survey
from vllm_invariant.audit.traffic import Line

FORMAT = 1


@dataclass(frozen=True)
class Reference:
    """Answers of one server, each alone and cold.

    Attributes:
        facts: what it ran as.
        prompts: what was asked.
        answers: in the same order.
        source: where it came from, in a few words.

    """

    facts: Facts
    prompts: list[Prompt]
    answers: list[Answer]
    source: str

    @classmethod
    def of(cls, exam: Exam, facts: Facts, source: str) -> "Reference":
        """What an exam found."""
        return cls(facts, exam.prompts, exam.reference, source)

    def save(self, path: Path) -> None:
        """Write it as JSON.  A float32 survives: it is written with as many digits as tell it apart."""
        answers = [
            {"tokens": a.tokens, "logprobs": [list(row.items()) for row in a.logprobs]} for a in self.answers
        ]
        prompts = [asdict(prompt) for prompt in self.prompts]
        found = {"format": FORMAT, "facts": asdict(self.facts), "prompts": prompts, "answers": answers}
        path.write_text(json.dumps(found))

    @classmethod
    def load(cls, path: Path) -> "Reference":
        """Read what `save` wrote.

        Raises:
            AuditFailed: if it is something else.

        """
        try:
            found = json.loads(path.read_text())
            if found["format"] != FORMAT:
                raise ValueError(f"format {found['format']}")
            return cls(
                facts=Facts(**found["facts"]),
                prompts=[Prompt(tuple(p["tokens"]), p["max_tokens"]) for p in found["prompts"]],
                answers=[_answer(answer) for answer in found["answers"]],
                source=str(path),
            )
        except OSError as error:
            raise AuditFailed(f"--against {path}: {error.strerror}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise AuditFailed(f"--against {path} was not written by --save ({error!r})") from error


def _answer(found: dict[str, Any]) -> Answer:
    rows: list[dict[Token, float]] = [dict(row) for row in found["logprobs"]]
    return Answer(tuple(found["tokens"]), tuple(rows), None, 0.0, 0.0, 0.0)


async def compare_with(
    reference: Reference, line: Line, seen: Survey, tick: Tick, axis: str | None = None
) -> Row:
    """Ask a reference's prompts, alone and cold, and compare.

    Args:
        reference: what another process answered.
        line: to the server.
        seen: what the server is.
        tick: called after each answer.
        axis: ``boot`` or ``mode`` if this is to show that one; by default ``mode`` if the two are known
            to run in different modes, ``boot`` otherwise.

    Raises:
        AuditFailed: if the reference cannot be asked here.

    """
    longest, have = max(len(p.tokens) + p.max_tokens for p in reference.prompts), seen.geometry.max_len
    if longest > have:
        raise AuditFailed(f"{reference.source} needs a context of {longest} tokens, the server has {have}")
    outcome = await cold(line, reference.prompts, tick)
    then, changed = reference.facts, _changed(reference.facts, seen.facts)
    void = outcome.void or _same_process(then, seen.facts)
    if axis == "mode" and not changed:
        void = void or "the server kept its mode"
    outcome = Outcome(outcome.answers, ", ".join(["another process", *changed]), void)
    how = f"against {reference.source}, vLLM {then.version or 'unknown'} on {then.device or 'unknown'}"
    name = axis or ("mode" if changed else "boot")
    return compare(name, how, reference.prompts, reference.answers, outcome)


def _changed(then: Facts, now: Facts) -> list[str]:
    """In what two modes are known to differ."""
    before, after = then.mode or {}, now.mode or {}
    both = [name for name in before if name in after]
    return [f"{name} {before[name]} → {after[name]}" for name in both if before[name] != after[name]]


def _same_process(then: Facts, now: Facts) -> str | None:
    if then.started is None or now.started is None:
        return "cannot tell whether this is another process"
    return "the reference is of this very process" if then.started == now.started else None
