"""vLLM servers to measure: one a mode, started together, ended whatever happens."""

import contextlib
import json
import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks import report
from vllm_invariant.audit import server

NAME = "bench"  # the model's name in requests
GIB = 1 << 30

# Variables that decide what a server is; a mode sets them, the caller's own values do not count.
DECISIVE = ("VLLM_BATCH_INVARIANT", "VLLM_PLUGINS")


@dataclass(frozen=True)
class Mode:
    """One server.

    Attributes:
        name: of its row in the table.
        environment: variables it needs, besides the caller's environment.
        options: of ``vllm serve``, besides the common ones.

    """

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()

    def described(self) -> str:
        """As a command line, without what is common to all modes."""
        unset = [f"-u {name}" for name in DECISIVE if name not in self.environment]
        shown = [f'{k}="{v}"' for k, v in self.environment.items() if k != "PYTHONPATH"]
        return " ".join(["env", *unset, *shown, "vllm serve MODEL", shlex.join(self.options)])


def common_options(
    *, max_model_len: int, max_num_seqs: int, kv_cache_gib: float, tensor_parallel_size: int = 1
) -> list[str]:
    """Options of every server, whatever its mode.  The cache's size is a GPU's."""
    options = [
        *("--tensor-parallel-size", str(tensor_parallel_size)),
        *("--max-model-len", str(max_model_len)),
        *("--max-num-seqs", str(max_num_seqs)),
        *("--kv-cache-memory-bytes", str(int(kv_cache_gib * GIB))),
    ]
    if torch.cuda.is_available():
        # A share that many servers on one GPU can start with; the cache's size is given above.  The chunk
        # kernels everywhere: what the package uses under the flag, and stock with it.
        options += ["--gpu-memory-utilization", "0.1"]
        options += ["--additional-config", json.dumps({"gdn_prefill_backend": "triton"})]
    return options


class BenchServer(server.Server):
    """A server of one mode."""

    def __init__(self, mode: Mode, model: Path, common: Sequence[str], log: Path) -> None:
        self.mode, self.log = mode, log
        self.port = server.free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        address = ["--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(self.port)]
        inherited = {k: v for k, v in os.environ.items() if k not in DECISIVE}
        quiet = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        defaults = {"OMP_WAIT_POLICY": "passive"}
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [*server.serve_command(), str(model), *address, *common, *mode.options],
                env=defaults | inherited | quiet | dict(mode.environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


@contextlib.contextmanager
def running(
    modes: Sequence[Mode], model: Path, common: Sequence[str], logs: Path, *, together: bool, limit: float
) -> Iterator[dict[str, BenchServer]]:
    """All servers, ready, by mode name.

    Args:
        modes: one server each.
        model: checkpoint folder.
        common: options of every server.
        logs: folder of the servers' logs.
        together: start all before waiting for the first; else one after another.
        limit: seconds each may take to answer.

    Raises:
        ServerFailed: if one does not start.

    """
    logs.mkdir(parents=True, exist_ok=True)
    servers: dict[str, BenchServer] = {}
    try:
        for mode in modes:
            log = logs / f"{report.file_name(mode.name)}.log"
            servers[mode.name] = BenchServer(mode, model, common, log)
            if not together:
                servers[mode.name].wait_until_ready(limit)
        for each in servers.values():
            each.wait_until_ready(limit)
        yield servers
    finally:
        for each in servers.values():  # all at once: each takes seconds to end
            each.process.terminate()
        for each in servers.values():
            each.stop()
