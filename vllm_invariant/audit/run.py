# In a vLLM branch: not needed (a test would assert instead).
"""An audit from start to end: survey, reference, axes, files, table, verdict."""

import asyncio
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_invariant.audit.axes import AXES, REFERENCE, Axis, Exam
from vllm_invariant.audit.failure import AuditFailed
from vllm_invariant.audit.files import write_json, write_junit
from vllm_invariant.audit.geometry import Sizes
from vllm_invariant.audit.page import write_page
from vllm_invariant.audit.progress import Bar, progress_bar
from vllm_invariant.audit.prompts import Supply
from vllm_invariant.audit.reference import Reference, compare_with
from vllm_invariant.audit.report import EQUAL, NOT_EXERCISED, Report, compare, table
from vllm_invariant.audit.server import Launch, ServerFailed, reason, running
from vllm_invariant.audit.survey import survey
from vllm_invariant.audit.traffic import Address, Line

FLAG = "VLLM_BATCH_INVARIANT"
OTHER_PROCESS = ("boot", "mode")  # axes that need answers of another process


@dataclass(frozen=True)
class Wish:
    """What to audit, and how.

    Attributes:
        address: of a running server; without an address ``launch`` is started.
        launch: what to start, or None.
        sizes: given by hand.
        axes: beginnings of the names of the axes to ask; all if empty.
        tokens: generated for each target.
        seed: of everything drawn.
        against: answers to compare with, or None.
        save, json, junit, html: files to write.
        command: that gives this audit again.

    """

    address: Address | None = None
    launch: Launch | None = None
    sizes: Sizes = field(default_factory=Sizes)
    axes: tuple[str, ...] = ()
    tokens: int = 32
    seed: int = 0
    against: Path | None = None
    save: Path | None = None
    json: Path | None = None
    junit: Path | None = None
    html: Path | None = None
    command: str = ""

    def asks(self, axis: str) -> bool:
        """Whether an axis is asked for."""
        return not self.axes or any(axis.split(",")[0] == wanted for wanted in self.axes)


class Audit:
    """One audit in progress.  What it has found so far is in ``report`` at any time."""

    def __init__(self, wish: Wish, bar: Bar) -> None:
        self.wish, self.bar = wish, bar
        self.report = Report(command=wish.command, url=wish.address.url if wish.address else None)
        self.found: Reference | None = None

    async def ask(self, address: Address) -> None:
        """Reference and axes on one server."""
        self.bar.say("looking at the server")
        seen = await survey(address, self.wish.sizes)
        self.report.facts, self.report.geometry = seen.facts, seen.geometry
        supply = Supply(seen.text, seen.geometry, self.wish.tokens, self.wish.seed)
        if not supply.targets:
            raise AuditFailed(f"no prompt fits a context of {seen.geometry.max_len} tokens")
        async with Line(seen.address) as line:
            exam = Exam(line, seen.geometry, supply)
            try:
                await self._row(REFERENCE, exam)
                self.report.prompts = exam.prompts
                self.found = Reference.of(exam, seen.facts, "the server before")
                if self.wish.save:
                    self.found.save(self.wish.save)
                for axis in AXES:
                    if self.wish.asks(axis.name):
                        await self._row(axis, exam)
            finally:
                self.report.retries += line.retries

    async def _row(self, axis: Axis, exam: Exam) -> None:
        if why := axis.missing(exam):
            self.report.not_asked[axis.name] = why
            return
        self.bar.say(axis.name, len(exam.targets))
        outcome = await axis.ask(exam, self.bar.tick)
        self.bar.catch_up()
        self.report.rows.append(compare(axis.name, axis.how, exam.prompts, exam.reference, outcome))

    async def ask_again(self, address: Address, reference: Reference, axis: str | None = None) -> None:
        """Compare a server with answers of another process.  ``axis``: the one this is to show."""
        self.bar.say(f"against {reference.source}", len(reference.prompts))
        seen = await survey(address, self.wish.sizes)
        async with Line(seen.address) as line:
            try:
                row = await compare_with(reference, line, seen, self.bar.tick, axis)
            finally:
                self.report.retries += line.retries
        self.report.rows.append(row)

    def not_asked(self) -> None:
        """Note the axes that need answers of another process, unless they were compared."""
        for axis in OTHER_PROCESS:
            if self.wish.asks(axis) and not any(row.axis == axis for row in self.report.rows):
                why = "needs answers that another process gave (--against)"
                self.report.not_asked.setdefault(axis, why)


async def _on_a_running_server(audit: Audit, address: Address) -> None:
    against = Reference.load(audit.wish.against) if audit.wish.against else None
    await audit.ask(address)
    if against:
        await audit.ask_again(address, against)


def _other_mode(reference: Reference) -> tuple[str, ...] | None:
    """Options of a server in another mode that has the same bits, or None if there is no such mode."""
    facts = reference.facts
    if not facts.mode or (facts.device or "").startswith("cpu"):
        return None
    return ("--no-async-scheduling" if facts.mode["async scheduling"] == "True" else "--async-scheduling",)


def _on_servers_of_our_own(audit: Audit, launch: Launch, log: Path) -> None:
    """One server for the axes, and one more for boot and for mode each."""

    def serve(more: tuple[str, ...], what: str, ask: Callable[[Address], Coroutine[Any, Any, None]]) -> None:
        audit.bar.say(f"starting {what}")
        with running(replace(launch, options=(*launch.options, *more)), log) as server:
            try:
                asyncio.run(ask(Address(server.url)))
            except AuditFailed:
                server.check_alive()  # if it died, its log says more
                raise

    against = Reference.load(audit.wish.against) if audit.wish.against else None

    async def first(address: Address) -> None:
        await audit.ask(address)
        if against:
            await audit.ask_again(address, against)

    serve((), "a server", first)
    found = audit.found
    assert found is not None
    if audit.wish.asks("boot"):
        serve((), "another server", lambda address: audit.ask_again(address, found, "boot"))
    if audit.wish.asks("mode"):
        if other := _other_mode(found):
            serve(other, f"a server with {other[0]}", lambda address: audit.ask_again(address, found, "mode"))
        else:
            audit.report.not_asked["mode"] = "this engine has no other mode with the same bits"


def _check_files(wish: Wish) -> None:
    """Fail before anything is asked, not after."""
    for option in ("save", "json", "junit", "html"):
        path: Path | None = getattr(wish, option)
        if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
            raise AuditFailed(f"--{option} {path} cannot be written")


def _carry_out(audit: Audit, wish: Wish, log: Path) -> None:
    _check_files(wish)
    if wish.address:
        asyncio.run(_on_a_running_server(audit, wish.address))
    elif wish.launch:
        _on_servers_of_our_own(audit, wish.launch, log)
    audit.not_asked()
    audit.report.finished = True
    audit.bar.say("done")


def _write(report: Report, wish: Wish, console: Console) -> None:
    for path, write in ((wish.json, write_json), (wish.junit, write_junit), (wish.html, write_page)):
        if path is None:
            continue
        try:
            write(report, path)
        except OSError as error:
            console.print(f"{path}: {error.strerror}", style="red", highlight=False, soft_wrap=True)


def _print(report: Report, console: Console) -> None:
    if len(report.rows) > 1:
        console.print(table(report))
    if report.retries:
        console.print(
            f"{report.retries} requests were sent again because the server was busy", highlight=False
        )
    style = "green" if report.code == EQUAL else "yellow" if report.code == NOT_EXERCISED else "red"
    console.print(report.verdict, style=style, markup=False, highlight=False, soft_wrap=True)


def root(base_url: str) -> str:
    """A server's address without the ``/v1`` that clients put behind it."""
    return base_url.rstrip("/").removesuffix("/v1")


def flag() -> dict[str, str]:
    """The flag for a server of our own: set, unless the caller's environment says otherwise."""
    return {FLAG: os.environ.get(FLAG, "1")}


def command() -> str:
    """The command line of this process."""
    setting = f"{FLAG}={os.environ[FLAG]} " if FLAG in os.environ else ""
    return setting + shlex.join(["vllm-invariant", *sys.argv[1:]])


def audit(wish: Wish, console: Console) -> int:
    """Carry out an audit, write its files and print what it found.

    A partial report is written whatever ends the audit.

    Returns:
        0 if every axis asked took its path and no bit differs, 1 if bits differ, 2 if the audit could
        not be carried out, 3 if an axis did not take its path, 130 after Ctrl-C.  Unless it is 0, the
        log of servers started here is kept and its place printed.

    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are ended then too
    folder = Path(tempfile.mkdtemp(prefix="vllm-invariant-audit-"))
    log = folder / "server.log"
    start = time.monotonic()
    with progress_bar(console) as bar:
        going = Audit(wish, bar)
        report = going.report
        try:
            _carry_out(going, wish, log)
        except AuditFailed as error:
            report.error = str(error)
        except ServerFailed as error:
            first = str(error).splitlines()[0].rstrip(":")
            report.error = f"{first}: {reason(log) or 'see its log'}"
            console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        except KeyboardInterrupt:
            report.interrupted, report.error = True, "interrupted"
        finally:
            report.seconds = time.monotonic() - start
            _write(report, wish, console)
    _print(report, console)
    if report.code and log.is_file():
        console.print(f"the servers' log: {log}", highlight=False, soft_wrap=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return report.code
