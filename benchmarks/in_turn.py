"""Processes that load together and are measured one after the other, each alone on the GPU."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report

MARK = "IN_TURN"  # starts the lines that are for the parent


@dataclass(frozen=True)
class Job:
    """One process.

    Attributes:
        arguments: of Python.
        environment: variables it needs, besides the caller's.

    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str]


def serve(measure: Callable[[], Any]) -> None:
    """In the process: say that it has loaded, then measure and answer each time that it is told to."""
    print(MARK, flush=True)
    for _ in sys.stdin:
        print(MARK, json.dumps(measure()), flush=True)


def run(jobs: Mapping[str, Job], logs: Path, rounds: int = 1) -> dict[str, list[Any]]:
    """What every process answers, by name, one answer a round.

    Args:
        jobs: by name.
        logs: folder of the processes' logs.
        rounds: how often each is measured; odd ones go through the processes backwards.

    Raises:
        RuntimeError: if one ends without an answer.

    """
    files = {name: logs / f"{report.file_name(name)}.log" for name in jobs}
    running = {name: _start(job, files[name]) for name, job in jobs.items()}
    found: dict[str, list[Any]] = {name: [] for name in jobs}
    try:
        for name, process in running.items():
            _said(process, files[name])
        for i in range(rounds):
            for name in list(running)[:: 1 if i % 2 == 0 else -1]:
                running[name].stdin.write("go\n")
                running[name].stdin.flush()
                found[name].append(json.loads(_said(running[name], files[name])))
        return found
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def _start(job: Job, log: Path) -> subprocess.Popen:
    with log.open("w") as errors:
        return subprocess.Popen(
            [sys.executable, *job.arguments],
            env={**os.environ, **job.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )


def _said(process: subprocess.Popen, log: Path) -> str:
    for line in process.stdout:
        if line.startswith(MARK):
            return line.removeprefix(MARK).strip()
    raise RuntimeError(f"a process ended early:\n{log.read_text()[-4000:]}")
