"""Run ``vllm bench serve`` several times in one process, which imports vLLM once.

As a program it reads a JSON list of argument lists from standard input and runs each.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Measurement:
    """One ``vllm bench serve``.

    Attributes:
        mode: whose server is asked.
        workload: name of what is asked.
        round: 0, 1, ...; negative for a warm-up whose result is dropped.
        arguments: of ``vllm bench serve``.

    """

    mode: str
    workload: str
    round: int
    arguments: tuple[str, ...]


def run(measurements: Sequence[Measurement], folder: Path) -> list[tuple[Measurement, dict[str, Any]]]:
    """Run all, in this order.

    Args:
        measurements: what to run.
        folder: where results and the client's log go.

    Returns:
        Those that were no warm-up, with what ``vllm bench serve`` saved.

    Raises:
        RuntimeError: if the client, or any request, failed.

    """
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{i:03}.json" for i in range(len(measurements))]
    jobs = [
        [*m.arguments, "--save-result", "--result-dir", str(folder), "--result-filename", name]
        for m, name in zip(measurements, names, strict=True)
    ]
    log = folder / "client.log"
    with log.open("w") as out:
        command = [sys.executable, "-m", "benchmarks.bench_client"]
        code = subprocess.run(command, input=json.dumps(jobs), text=True, stdout=out, stderr=out).returncode
    if code != 0:
        raise RuntimeError(f"the client ended with code {code}: {log.read_text()[-3000:]}")
    results = []
    for measurement, name in zip(measurements, names, strict=True):
        result = json.loads((folder / name).read_text())
        if result["failed"] or not result["completed"]:
            raise RuntimeError(f"{measurement}: {result['failed']} requests failed, see {log}")
        if measurement.round >= 0:
            results.append((measurement, result))
    return results


def main() -> None:
    """Run the jobs on standard input."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as bench_serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for job in json.load(sys.stdin):
        parser = FlexibleArgumentParser()
        add_cli_args(parser)
        bench_serve(parser.parse_args(job))


if __name__ == "__main__":
    main()
