# In a vLLM branch: not needed (a tool for users).
"""``vllm-invariant trace``."""

import json
import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from vllm_invariant.trace import report
from vllm_invariant.trace.compare import Verdict, compare
from vllm_invariant.trace.plan import FIRST, Ask, Way, path_not_taken
from vllm_invariant.trace.record import Run
from vllm_invariant.trace.worker import Worker, WorkerError

SAME, DIFFERS, COULD_NOT_RUN, INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True)
class Trace:
    """Both runs, and what comparing them says.

    Attributes:
        ask: the traced request.
        way: the second run.
        first, second: the runs.
        verdict: their comparison.
        values: the differing row in each run as (values, dtype), or None.

    """

    ask: Ask
    way: Way
    first: Run
    second: Run
    verdict: Verdict
    values: tuple | None = None


def trace(model: str, arguments: list[str], ask: Ask, way: Way, folder: Path) -> Trace:
    """Run the request both ways and compare.

    Args:
        model: checkpoint.
        arguments: engine options as on vLLM's command line.
        ask, way: the request, and the second way; the first is `plan.FIRST`.
        folder: for the logs of the engines.

    Raises:
        WorkerError: if an engine cannot be started or dies.

    """
    with ExitStack() as stack:
        one = stack.enter_context(Worker(folder / "first.log", model, arguments, FIRST.options))
        other = one
        if way.own_process:
            one.wait()  # one after the other: each measures the memory that is free
            other = stack.enter_context(Worker(folder / "second.log", model, arguments, way.options))
        return look(one, other, ask, way)


def look(one: Worker, other: Worker, ask: Ask, way: Way) -> Trace:
    """Run the request both ways in engines that are there, and compare.

    Args:
        one, other: engines of the first and of the second run; they may be the same.
        ask, way: as in `trace`.

    Raises:
        WorkerError: if an engine dies.

    """
    first, second = one.run(ask, FIRST), other.run(ask, way)
    verdict = compare(first, second)
    values = None
    if verdict.difference is not None:
        # Once more, for the numbers at the one spot that is of interest.
        kept = (
            one.run(ask, FIRST, verdict.difference.first).kept,
            other.run(ask, way, verdict.difference.second).kept,
        )
        values = kept if None not in kept else None
    return Trace(ask, way, first, second, verdict, values)


def run(
    model: str,
    arguments: list[str],
    ask: Ask,
    way: Way,
    console: Console,
    json_file: Path | None = None,
) -> int:
    """Trace and report.

    Returns:
        0 if both runs are the same bit for bit, 1 if they differ, 2 if a run could not be made or did
        not take its path, 130 if it was interrupted.

    """
    folder = Path(tempfile.mkdtemp(prefix="vllm-invariant-trace-"))
    try:
        with console.status(f"tracing {len(ask.prompt)} + {ask.max_tokens} tokens: {FIRST.name}; {way.name}"):
            found = trace(model, arguments, ask, way, folder)
    except WorkerError as error:
        said = f"[bold red]could not run[/]: {escape(str(error))}\nThe engines' logs are in {folder}."
        console.print(said, highlight=False, soft_wrap=True)
        return COULD_NOT_RUN
    except KeyboardInterrupt:
        console.print("interrupted")
        return INTERRUPTED
    shutil.rmtree(folder, ignore_errors=True)
    code = DIFFERS if not found.verdict.same else SAME
    void = path_not_taken(way, found.first, found.second)
    if not found.verdict.compared:
        void = "nothing could be compared"
    if void is not None and code == SAME:
        console.print(f"[bold red]this proves nothing[/]: the second run was to be {way.name}, but {void}")
        code = COULD_NOT_RUN
    if json_file is not None:
        _write(json_file, report.to_json(found, code, void), console)
    console.print(report.screen(found))
    return code


def _write(file: Path, said: dict[str, Any], console: Console) -> None:
    try:
        file.write_text(json.dumps(said, indent=1))
    except OSError as error:
        console.print(f"[bold red]cannot write[/] {escape(str(file))}: {error.strerror}", highlight=False)
