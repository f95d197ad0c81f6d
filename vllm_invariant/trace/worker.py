# In a vLLM branch: not needed (a tool for users).
"""Engines in processes of their own, which answer one request after another."""

import contextlib
import multiprocessing
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from vllm_invariant.options import reason
from vllm_invariant.trace.plan import Ask, Way
from vllm_invariant.trace.record import Run, Spot

# Read while vLLM is imported.  The flag can be set otherwise: VLLM_BATCH_INVARIANT=0 traces stock.
ENVIRONMENT = {
    "VLLM_BATCH_INVARIANT": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
ALWAYS = ("VLLM_ENABLE_V1_MULTIPROCESSING",)


class WorkerError(RuntimeError):
    """The engine could not be started or died.  The message is for the user."""


def serve(connection: Any, log: str, model: str, arguments: list[str], options: dict[str, Any]) -> None:
    """The process: build an engine, then run what is asked for until the other end hangs up."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):  # also of compiled code and of processes the engine starts
        os.dup2(descriptor, stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    for name, value in ENVIRONMENT.items():
        if name in ALWAYS:
            os.environ[name] = value
        os.environ.setdefault(name, value)
    try:
        from vllm_invariant.trace.engine import TraceEngine

        engine = TraceEngine(model, arguments, options)
        connection.send(None)
        while (job := connection.recv()) is not None:
            connection.send(engine.run(*job))
    except EOFError:
        pass
    except BaseException as error:  # whatever it is, the other end has to hear of it
        connection.send(f"{type(error).__name__}: {reason(error)}")
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


class Worker:
    """The other end.  A context manager: leaving it ends the process."""

    def __init__(self, log: Path, model: str, arguments: list[str], options: dict[str, Any]) -> None:
        self.log = log
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, str(log), model, arguments, options))
        self._process.start()
        theirs.close()
        self._ready = False

    def wait(self) -> None:
        """Wait for the engine.

        Raises:
            WorkerError: if it cannot be started, with the reason.

        """
        if not self._ready:
            self._receive()
            self._ready = True

    def run(self, ask: Ask, way: Way, keep: Spot | None = None) -> Run:
        """Run the request one way; see `engine.TraceEngine.run`.

        Raises:
            WorkerError: if the engine fails.

        """
        self.wait()
        self._connection.send((ask, way, keep))
        run: Run = self._receive()
        return run

    def _receive(self) -> Any:
        try:
            answer = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join(10)
            code = self._process.exitcode
            raise WorkerError(f"the engine's process ended with code {code}") from None
        if isinstance(answer, str):
            raise WorkerError(answer)
        return answer

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.is_alive():
            with contextlib.suppress(BrokenPipeError, ConnectionError):
                self._connection.send(None)
            self._process.join(20 if kind is None else 0)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(10)
        self._connection.close()
