"""`vllm-invariant audit` again and again: no false alarm on a server with the flag, found without it.

Two servers on one checkpoint, which differ in the flag alone.  The first is audited many times, each time
with other prompts and other arrivals; the second once.

    python -m benchmarks.audit_runs [--runs 20] [--shape design8] [--at-once 1] [--eager]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import report, servers
from benchmarks.models import SHAPES, make_model

BUDGET = 2048
MODEL = servers.NAME
SET, UNSET = "flag set", "flag unset"


def modes(eager: bool, dev: bool) -> list[servers.Mode]:
    """The two servers.  ``dev``: with vLLM's development endpoints."""
    options = ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
    options += ["--max-num-batched-tokens", str(BUDGET), *(["--enforce-eager"] if eager else [])]
    common = {"VLLM_PLUGINS": "vllm_invariant", "VLLM_SERVER_DEV_MODE": str(int(dev))}
    flags = {SET: {"VLLM_BATCH_INVARIANT": "1"}, UNSET: {}}
    return [servers.Mode(name, common | flag, tuple(options)) for name, flag in flags.items()]


def audit(url: str, seed: int, tokens: int, folder: Path) -> dict[str, Any]:
    """One audit in a process of its own: its JSON report."""
    path = folder / f"{seed}-{url.rpartition(':')[2]}.json"
    words = ["audit", "--base-url", url, "--prompt-seed", str(seed), "--tokens", str(tokens)]
    words += ["--budget", str(BUDGET), "--json", str(path)]
    program = [sys.executable, "-c", "from vllm_invariant.cli import app; app()"]
    done = subprocess.run([*program, *words], capture_output=True, text=True, check=False)
    if not path.is_file():
        sys.exit(f"the audit failed:\n{done.stdout}{done.stderr}")
    found = json.loads(path.read_text())
    print(f"{found['exit_code']}: {found['verdict']} ({found['seconds']:.0f} s)", file=sys.stderr, flush=True)
    return found


def summary(found: list[dict[str, Any]]) -> list[list[str]]:
    """One line an axis, over all audits of a server."""
    rows = []
    for name in dict.fromkeys(row["axis"] for each in found for row in each["rows"]):
        every = [row for each in found for row in each["rows"] if row["axis"] == name]
        counts = (
            len(every),
            sum(row["void"] is None for row in every),
            sum(len(row["cases"]) for row in every),
            sum(case["cached"] or 0 for row in every for case in row["cases"]),
            sum(row["tokens"] for row in every),
            sum(row["logprobs"] for row in every),
        )
        rows.append([name, *(f"{count:,}" for count in counts)])
    return rows


def main() -> None:
    """Audit and report; exit code 0 only if the flag decides."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=1, help="audits of one server that run together")
    parser.add_argument("--shape", choices=SHAPES, default="design8")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--eager", action="store_true", help="no torch.compile and no CUDA graphs")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    args = parser.parse_args()
    common = servers.common_options(max_model_len=8192, max_num_seqs=64, kv_cache_gib=2)
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(args.shape, folder)
        # Audits that run together must not empty each other's caches.
        wanted = modes(args.eager, dev=args.at_once == 1)
        with servers.running(wanted, model, common, folder / "logs", together=True, limit=600) as started:
            for mode, runs in ((SET, args.runs), (UNSET, 1)):
                with ThreadPoolExecutor(args.at_once) as pool:
                    url = started[mode].url
                    seeds = range(runs)
                    found[mode] = list(pool.map(lambda s, u=url: audit(u, s, args.tokens, folder), seeds))
    how = "eager" if args.eager else "compiled"
    lines = report.heading(f"Audits of a server with and without the flag, {args.shape}, {how}")
    header = [
        "axis",
        "audits",
        "path proven",
        "answers",
        "hit tokens",
        "differing tokens",
        "differing logprobs",
    ]
    for mode, audits in found.items():
        codes = [each["exit_code"] for each in audits]
        lines += [
            f"{mode}: exit codes {', '.join(map(str, codes))}.",
            "",
            *report.table(header, summary(audits)),
        ]
    report.write(args.out, f"audit-{args.shape}", lines, found)
    passed = all(each["exit_code"] == 0 for each in found[SET])
    sys.exit(0 if passed and found[UNSET][0]["exit_code"] == 1 else 1)


if __name__ == "__main__":
    main()
