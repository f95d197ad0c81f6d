"""Run ``vllm bench serve`` several times in one process, which imports vLLM once.

As a program it reads a JSON list of argument lists from standard input and runs each.  To what ``vllm bench
serve`` saves it adds ``mean_engine_ttft_ms``: the part of the time to first token that requests spent in the
engine, waiting and being prefilled, by the server's own histograms.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from vllm_invariant.audit import counters

IN_ENGINE = ("vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds")
ENGINE_TTFT = "mean_engine_ttft_ms"


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


def engine_time(url: str) -> tuple[float, float]:
    """Seconds that a server's finished requests spent in its engine until their first token; how many."""
    totals = counters.totals(httpx.get(f"{url}/metrics", timeout=30).text)
    return sum(totals.get(f"{name}_sum", 0.0) for name in IN_ENGINE), totals.get(f"{IN_ENGINE[0]}_count", 0.0)


def main() -> None:
    """Run the jobs on standard input."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as bench_serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for job in json.load(sys.stdin):
        parser = FlexibleArgumentParser()
        add_cli_args(parser)
        args = parser.parse_args(job)
        seconds_before, count_before = engine_time(args.base_url)
        bench_serve(args)
        seconds, count = engine_time(args.base_url)
        mean = 1e3 * (seconds - seconds_before) / (count - count_before)
        saved = Path(args.result_dir, args.result_filename)
        result = json.loads(saved.read_text()) | {ENGINE_TTFT: mean}
        saved.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
