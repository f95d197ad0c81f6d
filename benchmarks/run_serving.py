"""What the plugin costs: five servers of one model, asked the same in turn.

    python -m benchmarks.run_serving --shape design8

Modes: stock vLLM and vLLM with the plugin, both without the flag; under the flag, stock with nothing but
its support answer changed, and the plugin with either arithmetic.  Prefix caching is off in all of them:
stock's cache blocks do not lie on the token grid, so hits would have other lengths.  Rounds go through the
modes in turn, forwards and backwards, so that a machine that gets slower or faster does not favour one; a
figure is the median of the rounds, and a ratio the median of the rounds' ratios.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import bench_client, models, report, servers
from benchmarks.bench_client import Measurement
from benchmarks.offer import offer
from benchmarks.servers import BenchServer, Mode

FLAG = {"VLLM_BATCH_INVARIANT": "1"}
STOCK, OURS = "stock, normal", "ours, normal"
SUPPORT, INVARIANT = "stock, support answer only, under the flag", "ours, under the flag"
RECURRENT = "ours, under the flag, recurrent"
ARITHMETIC = ("--additional-config", '{"vllm_invariant": {"gdn_arithmetic": "recurrent"}}')

# (figure, column) of the table: what `vllm bench serve` calls it, and we.
FIGURES = (
    ("output_throughput", "output tok/s"),
    ("median_ttft_ms", "p50 TTFT, ms"),
    ("median_itl_ms", "p50 ITL, ms"),
)

# (of, against, output tok/s that should at least be reached, if something was set out to be).
RATIOS = (
    (OURS, STOCK, 0.99),
    (INVARIANT, STOCK, 0.90),
    (INVARIANT, SUPPORT, 1.05),
    (RECURRENT, INVARIANT, None),
)


def modes(plugins: Path, options: list[str]) -> list[Mode]:
    """All servers."""
    support = offer(plugins, {"support_only": "benchmarks.support_only:register"})
    common = ("--no-enable-prefix-caching", *options)
    return [
        Mode(STOCK, {"VLLM_PLUGINS": ""}, common),
        Mode(OURS, {"VLLM_PLUGINS": "vllm_invariant"}, common),
        Mode(SUPPORT, FLAG | {"VLLM_PLUGINS": "support_only"} | support, common),
        Mode(INVARIANT, FLAG | {"VLLM_PLUGINS": "vllm_invariant"}, common),
        Mode(RECURRENT, FLAG | {"VLLM_PLUGINS": "vllm_invariant"}, (*common, *ARITHMETIC)),
    ]


def workload(
    server: BenchServer, model: Path, args: argparse.Namespace, prompts: int, seed: int
) -> tuple[str, ...]:
    """Arguments of ``vllm bench serve``."""
    return (
        *("--base-url", server.url, "--model", str(model), "--served-model-name", servers.NAME),
        *("--dataset-name", "random", "--num-prompts", str(prompts), "--seed", str(seed)),
        *("--random-input-len", str(args.input_len), "--random-output-len", str(args.output_len)),
        *("--random-range-ratio", str(args.range_ratio), "--ignore-eos", "--temperature", "0"),
        *("--request-rate", str(args.request_rate), "--max-concurrency", str(args.concurrency)),
    )


def plan(running: dict[str, BenchServer], model: Path, args: argparse.Namespace) -> list[Measurement]:
    """A short warm-up for each mode, then the rounds."""
    jobs = [
        Measurement(name, "warm-up", -1, workload(server, model, args, args.concurrency, 999))
        for name, server in running.items()
    ]
    for i in range(args.rounds):
        order = list(running.items())
        for name, server in order if i % 2 == 0 else order[::-1]:
            jobs.append(Measurement(name, "random", i, workload(server, model, args, args.num_prompts, i)))
    return jobs


def lines(
    args: argparse.Namespace, servers_: list[Mode], found: dict[str, list[dict[str, Any]]]
) -> list[str]:
    """The report."""
    rows = [
        [name, *(report.median_and_spread([r[key] for r in results]) for key, _ in FIGURES)]
        for name, results in found.items()
    ]
    ratios = [
        [
            f"{of} / {against}",
            *(report.ratio(found[of], found[against], key) for key, _ in FIGURES),
            "" if goal is None else f"{goal:.2f}",
        ]
        for of, against, goal in RATIOS
        if of in found and against in found
    ]
    columns = [column for _, column in FIGURES]
    return [
        *report.heading(f"Serving, {args.shape}, prefix caching off"),
        f"Median of {args.rounds} rounds of {args.num_prompts} requests (lowest to highest), "
        f"{args.concurrency} at a time.",
        "",
        *report.table(["mode", *columns], rows),
        *report.table(["ratio", *columns, "tok/s to reach"], ratios),
        "Servers:",
        "",
        *(f"    {mode.described()}" for mode in servers_),
    ]


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=models.SHAPES, default="design8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-prompts", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--request-rate", default="inf")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--range-ratio", type=float, default=0.2, help="lengths vary by this much either way")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--kv-cache-gib", type=float, default=8.0)
    parser.add_argument("--server-option", action="append", default=[], help="one more word for vllm serve")
    parser.add_argument("--only", action="append", help="a mode's name; all modes by default")
    parser.add_argument("--one-by-one", action="store_true", help="do not start the servers together")
    parser.add_argument("--start-limit", type=float, default=400.0, help="seconds")
    parser.add_argument("--models", type=Path, help="folder that keeps checkpoints")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    parser.add_argument("--work", type=Path, help="folder that keeps logs")
    return parser.parse_args()


def main() -> None:
    """Start, measure, write."""
    args = parse()
    with tempfile.TemporaryDirectory() as scratch:
        work = args.work or Path(scratch)
        model = models.make_model(args.shape, args.models or Path(scratch) / "models")
        chosen = modes(Path(scratch) / "plugins", args.server_option)
        chosen = [mode for mode in chosen if mode.name in args.only] if args.only else chosen
        common = servers.common_options(
            max_model_len=args.max_model_len, max_num_seqs=args.max_num_seqs, kv_cache_gib=args.kv_cache_gib
        )
        found: dict[str, list[dict[str, Any]]] = {mode.name: [] for mode in chosen}
        with servers.running(
            chosen, model, common, work / "logs", together=not args.one_by_one, limit=args.start_limit
        ) as running:
            for measurement, result in bench_client.run(plan(running, model, args), work / "bench"):
                found[measurement.mode].append(result)
    raw = {name: [{k: r[k] for k, _ in FIGURES} for r in results] for name, results in found.items()}
    report.write(args.out, f"serving-{args.shape}", lines(args, chosen, found), raw)


if __name__ == "__main__":
    main()
