"""What the prefix cache saves under the flag, and what finer hits cost a request that has none.

    python -m benchmarks.run_prefix_cache --shape design8

Three servers under the flag: no prefix cache, hits on whole blocks, hits on the 64-token grid (the default).
Each is asked prompts that share a 2,000-token prefix, at concurrency 1 and 16, after one request that puts
the prefix into the cache; and distinct 2,000-token prompts at concurrency 1, which hit nothing.  Rounds go
through the servers in turn, forwards and backwards; a figure is the median of the rounds, and a ratio the
median of the rounds' ratios.  What a request's time to first token is not spent on in the engine, waiting or
being prefilled, goes to the HTTP server and the client: text to tokens, and JSON.
"""

import argparse
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx

from benchmarks import bench_client, models, report, servers
from benchmarks.bench_client import Measurement
from benchmarks.servers import BenchServer, Mode
from vllm_invariant.audit import counters

FLAG = {"VLLM_BATCH_INVARIANT": "1", "VLLM_PLUGINS": "vllm_invariant"}
OFF, BLOCK, GRID = "off", "on, whole blocks", "on, 64-token grid"
COLD = "cold"
MEDIAN = "median_ttft_ms"
FIGURES = ("mean_ttft_ms", bench_client.ENGINE_TTFT, MEDIAN, "mean_tpot_ms")

# Of every measurement.
COMMON = (
    *("--served-model-name", servers.NAME, "--dataset-name", "prefix_repetition"),
    *("--ignore-eos", "--temperature", "0"),
)

# Median TTFT against no cache, at concurrency 16, that should at most be seen.
GOALS = {BLOCK: 0.70, GRID: 0.35}
COLD_GOAL = 1.03  # finer hits against whole blocks


def modes(block: int, options: list[str]) -> list[Mode]:
    """The three servers.  ``block``: tokens of the scheduler's block."""
    on = "--enable-prefix-caching"
    return [
        Mode(OFF, FLAG, ("--no-enable-prefix-caching", *options)),
        Mode(BLOCK, FLAG, (on, "--prefix-match-unit", str(block), *options)),
        Mode(GRID, FLAG, (on, *options)),
    ]


def cache_config(server: BenchServer) -> dict[str, str]:
    """What the server says of its cache, from its metrics."""
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    return counters.parse(text).cache


def cached_share(server: BenchServer) -> float:
    """Prompt tokens the server took from its cache, of all it was asked."""
    totals = counters.totals(httpx.get(f"{server.url}/metrics", timeout=30).text)
    hits, queries = (totals.get(f"vllm:prefix_cache_{name}_total", 0.0) for name in ("hits", "queries"))
    return hits / queries if queries else 0.0


def check(running: dict[str, BenchServer], block: int) -> None:
    """Each server has the block and the hits its row says.

    Raises:
        RuntimeError: if one has not.

    """
    units = {}
    for name, server in running.items():
        config = cache_config(server)
        units[name] = config["prefix_match_unit"]
        if name != OFF and int(config["block_size"]) != block:
            raise RuntimeError(f"{name}: the block is {config['block_size']} tokens, not {block}")
    if (units[BLOCK], units[GRID]) != (str(block), "64"):
        raise RuntimeError(f"hits land every {units} tokens")


def shared(args: argparse.Namespace, concurrency: int) -> tuple[str, ...]:
    """Prompts with one prefix."""
    return (
        *("--num-prompts", str(args.requests + 3 * concurrency), "--max-concurrency", str(concurrency)),
        *("--prefix-repetition-num-prefixes", "1", "--num-warmups", "1"),
        *("--prefix-repetition-prefix-len", str(args.prefix_len)),
        *("--prefix-repetition-suffix-len", str(args.suffix_len)),
        *("--prefix-repetition-output-len", str(args.output_len)),
    )


def cold(args: argparse.Namespace) -> tuple[str, ...]:
    """Distinct prompts of the prefix's length."""
    return (
        *("--num-prompts", str(args.cold_requests), "--max-concurrency", "1"),
        *("--prefix-repetition-num-prefixes", str(args.cold_requests)),
        *("--prefix-repetition-prefix-len", str(args.prefix_len - args.suffix_len)),
        *("--prefix-repetition-suffix-len", str(args.suffix_len)),
        *("--prefix-repetition-output-len", "4"),
    )


def plan(running: dict[str, BenchServer], model: Path, args: argparse.Namespace) -> list[Measurement]:
    """Every workload once as a warm-up, then the rounds.  A round has prompts of its own."""
    workloads = {f"c{c}": shared(args, c) for c in args.concurrency} | {COLD: cold(args)}
    jobs = []
    for i in range(-1, args.rounds):
        order = list(running.items())
        for name, server in order if i % 2 == 0 else order[::-1]:
            for number, (workload, arguments) in enumerate(workloads.items()):
                seed = 1000 + 10 * i + number
                address = ("--base-url", server.url, "--model", str(model), "--seed", str(seed))
                jobs.append(Measurement(name, workload, i, (*address, *COMMON, *arguments)))
    return jobs


Found = dict[str, dict[str, list[dict[str, Any]]]]  # by workload, then mode


def lines(
    args: argparse.Namespace, chosen: list[Mode], block: int, shares: dict[str, float], found: Found
) -> list[str]:
    """The report."""
    rows, cold_rows = [], []
    for workload, by_mode in found.items():
        for name, results in by_mode.items():
            base = by_mode[OFF if workload != COLD else BLOCK]
            ratio = report.ratio(results, base, MEDIAN)
            figures = [report.median_and_spread([r[k] for r in results]) for k in FIGURES]
            if workload == COLD:
                goal = f"{COLD_GOAL:.2f}" if name == GRID else ""
                cold_rows.append([name, *figures[:3], ratio, goal])
            else:
                goal = f"{GOALS[name]:.2f}" if name in GOALS and workload == "c16" else ""
                rows.append([name, workload[1:], *figures, ratio, goal])
    ranks, _ = report.ranks(args.tensor_parallel_size)
    ttft = ["mean TTFT (ms)", "of it in the engine", "median TTFT (ms)"]
    return [
        *report.heading(f"Prefix cache under the flag, {args.shape}{ranks}"),
        f"Prompts of {args.prefix_len} shared and {args.suffix_len} own tokens, {args.output_len} generated. "
        f"Block {block} tokens. Median of {args.rounds} rounds (lowest to highest).",
        "",
        *report.table(["prefix cache", "c", *ttft, "mean TPOT (ms)", "median TTFT / off", "at most"], rows),
        f"Distinct prompts of {args.prefix_len} tokens, one at a time, nothing to hit:",
        "",
        *report.table(["prefix cache", *ttft, "median TTFT / whole blocks", "at most"], cold_rows),
        "Prompt tokens taken from the cache, warm-up and cold requests included: "
        + ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
        + ".",
        "",
        "Servers:",
        "",
        *(f"    {mode.described()}" for mode in chosen),
    ]


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=models.SHAPES, default="design8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=16, help="and three for each unit of concurrency")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--cold-requests", type=int, default=32)
    parser.add_argument("--prefix-len", type=int, default=2000)
    parser.add_argument("--suffix-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--kv-cache-gib", type=float, default=8.0)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--server-option", action="append", default=[], help="one more word for vllm serve")
    parser.add_argument("--one-by-one", action="store_true", help="do not start the servers together")
    parser.add_argument("--start-limit", type=float, default=400.0, help="seconds")
    parser.add_argument("--models", type=Path, help="folder that keeps checkpoints")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    parser.add_argument("--work", type=Path, help="folder that keeps logs")
    return parser.parse_args()


def main() -> None:
    """Start, measure, write."""
    args = parse()
    block = models.state_block(args.shape)
    chosen = modes(block, args.server_option)
    found: Found = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as scratch:
        work = args.work or Path(scratch)
        model = models.make_model(args.shape, args.models or Path(scratch) / "models")
        common = servers.common_options(
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            kv_cache_gib=args.kv_cache_gib,
            tensor_parallel_size=args.tensor_parallel_size,
        )
        with servers.running(
            chosen, model, common, work / "logs", together=not args.one_by_one, limit=args.start_limit
        ) as running:
            check(running, block)
            for measurement, result in bench_client.run(plan(running, model, args), work / "bench"):
                found[measurement.workload][measurement.mode].append(result)
            shares = {name: cached_share(server) for name, server in running.items()}
    raw = {
        w: {n: [{k: r[k] for k in FIGURES} for r in rs] for n, rs in by.items()} for w, by in found.items()
    }
    _, ranks = report.ranks(args.tensor_parallel_size)
    report.write(
        args.out, f"prefix-cache-{args.shape}{ranks}", lines(args, chosen, block, shares, found), raw
    )


if __name__ == "__main__":
    main()
