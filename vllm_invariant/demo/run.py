# In a vLLM branch: not needed (a test would assert instead).
"""The demo from start to end: checkpoint, stock's refusal, server, axes, table, verdict."""

import asyncio
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich import progress
from rich.console import Console

from vllm_invariant.demo import report
from vllm_invariant.demo.axes import AXES, BOOT, REFERENCE, Axis, Outcome
from vllm_invariant.demo.prompts import PRIVATE, PromptSet, prompt_set
from vllm_invariant.demo.refusal import stock_refusal
from vllm_invariant.demo.server import Server, ServerFailed, running, tail
from vllm_invariant.demo.traffic import Line


class DemoFailed(RuntimeError):
    """The demo could not be carried out; its message says why."""


class Bar:
    """A progress bar whose label says what is going on."""

    def __init__(self, bars: progress.Progress, steps: int) -> None:
        self._bars = bars
        self._task = bars.add_task("", total=steps)

    def say(self, text: str) -> None:
        """Change the label."""
        self._bars.update(self._task, description=text)

    def tick(self) -> None:
        """One step done."""
        self._bars.advance(self._task)


@contextmanager
def _bar(console: Console) -> Iterator[Bar]:
    columns = (
        progress.SpinnerColumn(),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("{task.description}"),
    )
    with progress.Progress(*columns, console=console) as bars:
        # The checkpoint, the refusal, two starts, and every needle on every axis and as reference.
        yield Bar(bars, 4 + len(PRIVATE) * (len(AXES) + 2))


def _checkpoint(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="fla")  # transformers imports it; no kernel of it runs
        from transformers.utils import logging

        from vllm_invariant.demo.checkpoint import make_checkpoint

        logging.disable_progress_bar()
        return make_checkpoint(folder / "tiny")


def _ask(server: Server, wanted: Sequence[Axis], prompts: PromptSet, bar: Bar) -> list[Outcome]:
    """Ask a server the needles on each axis in turn."""

    async def ask() -> list[Outcome]:
        outcomes = []
        async with Line(server.url) as line:
            for axis in wanted:
                bar.say(f"{axis.name}: {axis.how}")
                outcomes.append(await axis.ask(line, prompts, bar.tick))
        return outcomes

    try:
        return asyncio.run(ask())
    except Exception as error:
        server.check_alive()
        raise DemoFailed(f"{error!r}; the server's log ends:\n{tail(server.log)}") from error


def _outcomes(folder: Path, log: Path, console: Console) -> list[Outcome]:
    """Everything but the verdict.  Returns the reference, then `AXES`, then `BOOT`."""
    with _bar(console) as bar:
        bar.say("making a tiny GDN hybrid and its tokenizer")
        model = _checkpoint(folder)
        prompts = prompt_set(model)
        bar.tick()

        bar.say("asking stock vLLM")
        refusal = stock_refusal(model, log)
        if refusal is None:
            raise DemoFailed(f"stock vLLM did not refuse the model; its log ends:\n{tail(log)}")
        console.print(f"stock vLLM: {refusal}", highlight=False, soft_wrap=True)
        bar.tick()

        bar.say("starting a server")
        with running(model, log) as server:
            console.print("with vllm-invariant: it serves, prefix cache on", highlight=False)
            bar.tick()
            outcomes = _ask(server, [REFERENCE, *AXES], prompts, bar)
        bar.say("starting another server")
        with running(model, log) as server:
            bar.tick()
            outcomes += _ask(server, [BOOT], prompts, bar)
        bar.say("done")
    return outcomes


def _judge(outcomes: list[Outcome], console: Console) -> bool:
    """Print table and verdict.  Returns whether the promise held."""
    reference, *others = outcomes
    rows = [
        report.compare(axis, reference.answers, outcome)
        for axis, outcome in zip([*AXES, BOOT], others, strict=True)
    ]
    console.print(report.table(reference, rows))
    problems = report.failures(reference, rows)
    for problem in problems:
        console.print(f"FAILED: {problem}", style="red", markup=False, highlight=False)
    if not problems:
        console.print(f"PASSED: {report.success(reference, rows)}", style="green", highlight=False)
    return not problems


def run(console: Console) -> int:
    """Run the demo.

    Returns:
        0 if every axis came about, hits happened and no bit differs; 1 otherwise; 130 after Ctrl-C.
        Unless it is 0, the servers' log is kept and its place printed.

    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are ended then too
    folder = Path(tempfile.mkdtemp(prefix="vllm-invariant-demo-"))
    log = folder / "server.log"
    code = 1
    try:
        code = 0 if _judge(_outcomes(folder, log, console), console) else 1
    except (DemoFailed, ServerFailed) as error:
        console.print(f"FAILED: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        console.print("interrupted")
        code = 130
    finally:
        if code and log.is_file():
            shutil.rmtree(folder / "tiny", ignore_errors=True)
            console.print(f"the servers' log: {log}", highlight=False, soft_wrap=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return code
