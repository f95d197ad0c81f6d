"""A server is started, watched and ended whole; stand-ins take vLLM's place."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from vllm_invariant.audit import server
from vllm_invariant.audit.server import Launch

HEALTHY = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass

http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
DYING = "import sys; print('the reason'); sys.exit(3)"
SILENT = "import time; time.sleep(600)"


@pytest.fixture
def stand_in(monkeypatch):
    def use(script: str) -> None:
        monkeypatch.setattr(server, "serve_command", lambda: [sys.executable, "-c", script])

    return use


def is_running(pid: int) -> bool:
    """Whether a process runs: one that waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} was left running"
        time.sleep(0.05)


def test_a_server_is_ended_with_its_children(stand_in, tmp_path):
    stand_in(HEALTHY)
    with server.running(Launch(str(tmp_path)), tmp_path / "log") as running:
        child = int((tmp_path / "log").read_text().split()[1])
        assert is_running(child)
        running.check_alive()
    wait_until_gone(child)
    assert running.process.returncode == -signal.SIGTERM


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_server_is_ended_when_the_block_raises(stand_in, tmp_path, error):
    stand_in(HEALTHY)
    with pytest.raises(error), server.running(Launch(str(tmp_path)), tmp_path / "log") as running:
        raise error
    assert running.process.returncode is not None


def test_a_server_that_ignores_sigterm_is_killed(stand_in, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "STOP_LIMIT", 0.2)
    stand_in("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + HEALTHY)
    with server.running(Launch(str(tmp_path)), tmp_path / "log") as running:
        child = int((tmp_path / "log").read_text().split()[1])
    wait_until_gone(child)
    assert running.process.returncode == -signal.SIGKILL


def test_a_server_that_dies_at_start_shows_why(stand_in, tmp_path):
    stand_in(DYING)
    with (
        pytest.raises(server.ServerFailed, match=r"(?s)code 3.*the reason"),
        server.running(Launch(str(tmp_path)), tmp_path / "log"),
    ):
        pass


def test_a_server_that_never_answers_is_given_up_and_ended(stand_in, tmp_path):
    stand_in(SILENT)
    silent = server.Server(Launch(str(tmp_path)), tmp_path / "log")
    try:
        with pytest.raises(server.ServerFailed, match="did not answer"):
            silent.wait_until_ready(limit=0.5)
    finally:
        silent.stop()
    assert not is_running(silent.process.pid)


def test_tail_shows_the_end(tmp_path):
    log = tmp_path / "log"
    assert server.tail(log) == "(the log is empty)"
    log.write_text("".join(f"line {i}\n" for i in range(100)))
    assert server.tail(log, lines=2) == "line 98\nline 99"


def test_what_is_wanted_comes_before_what_the_caller_has(monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    environment = server.environment({"VLLM_BATCH_INVARIANT": "1"})
    assert environment["VLLM_BATCH_INVARIANT"] == "1"
    assert environment["OMP_WAIT_POLICY"] == "active"
    assert os.environ["VLLM_BATCH_INVARIANT"] == "0"


def test_an_option_wanted_is_the_last_word_but_only_loopback_is_served():
    options = server.options(["--no-enable-prefix-caching", "--host", "0.0.0.0"], 1234)
    assert options.index("--no-enable-prefix-caching") > options.index("--enable-prefix-caching")
    assert options[-4:] == ["--host", "127.0.0.1", "--port", "1234"]
