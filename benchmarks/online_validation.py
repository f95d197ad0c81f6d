"""Deterministic requests to a loaded server, compared bit for bit with the same requests to an idle one.

    python -m benchmarks.online_validation --shape design8

A real server under the flag.  First each distinct target is asked alone.  Then background requests of three
prompt classes arrive at exponential intervals, and targets among them, as many at a time as the cap allows.
A target counts as crossed if it decoded in a step in which another request prefilled; the server's own
scheduler trace says so, and the client's clock must agree that it can have been.

Exit code 0 only if no request failed, nothing differs, and enough targets crossed mixed steps.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from benchmarks import models, report, servers
from benchmarks.offer import offer
from benchmarks.online_judge import Mismatches, crossings, mixed_steps, overlaps
from benchmarks.online_traffic import PROMPT_CLASSES, Reply, Request, ask, background, poisson, target_kinds
from benchmarks.scheduler_trace import VARIABLE
from benchmarks.servers import Mode

PLUGINS = {
    "scheduler_trace": "benchmarks.scheduler_trace:register",
    "support_only": "benchmarks.support_only:register",
}

Load = tuple[list[Reply], list[Reply], list[Reply]]


async def drive(url: str, model: str, args: argparse.Namespace, vocabulary: int) -> Load:
    """All traffic.  Returns replies to the targets alone, under load, and to the background."""
    kinds = target_kinds(vocabulary, args.sampled)
    targets = [(f"target-{i:04}", kinds[i % len(kinds)]) for i in range(args.targets)]
    others = [(f"background-{i:04}", r) for i, r in enumerate(background(args.background, vocabulary))]
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    async with AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=args.timeout
    ) as client:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bar = progress.add_task("alone", total=len(kinds))
            alone = []
            for i, kind in enumerate(kinds):
                alone.append(await ask(client, model, f"alone-{i:04}", kind))
                progress.advance(bar)
            cap = asyncio.Semaphore(args.concurrency)

            async def flow(label: str, requests: list[tuple[str, Request]], rate: float) -> list[Reply]:
                bar = progress.add_task(label, total=len(requests))
                return await poisson(client, model, requests, rate, cap, lambda _: progress.advance(bar))

            # Targets arrive somewhat faster, so that the last of them still has company.
            target_rate = 1.1 * args.rate * len(targets) / len(others)
            loaded, behind = await asyncio.gather(
                flow("targets", targets, target_rate), flow("background", others, args.rate)
            )
    return alone, loaded, behind


def judge(load: Load, trace: Path | None, args: argparse.Namespace) -> dict[str, Any]:
    """Everything that is reported, and the verdict."""
    alone, loaded, behind = load
    everyone = [*alone, *loaded, *behind]
    failures = [f"{reply.name}: {reply.error}" for reply in everyone if reply.error is not None]
    by_request = {reply.request: reply for reply in alone}
    mismatches = Mismatches()
    for reply in loaded:
        mismatches.add(by_request[reply.request], reply)
    traced = None if trace is None else mixed_steps(trace)
    crossed = crossings(loaded, [*loaded, *behind], traced)
    by_clock = sum(overlaps(reply, [*loaded, *behind]) for reply in loaded)
    count = sum(steps > 0 for steps in crossed)
    return {
        "background": len(behind),
        "targets": len(loaded),
        "distinct_targets": len(alone),
        "crossed": count,
        "mixed_steps": sum(crossed),
        "crossed_by_clock": by_clock,
        "traced": trace is not None,
        "failures": failures,
        **asdict(mismatches),
        "passed": not failures and not mismatches.any() and min(count, by_clock) >= args.min_crossed,
    }


def lines(found: dict[str, Any], mode: Mode | None, args: argparse.Namespace) -> list[str]:
    """The report."""
    rows = [
        ["background requests", f"{found['background']}"],
        ["target requests", f"{found['targets']} (of {found['distinct_targets']} kinds)"],
        ["target requests that crossed mixed steps", f"{found['crossed']} (at least {args.min_crossed})"],
        ["mixed steps they crossed", f"{found['mixed_steps']}" if found["traced"] else "not traced"],
        ["the same by the client's clock", f"{found['crossed_by_clock']}"],
        ["request failures", f"{len(found['failures'])}"],
        ["generated-token mismatches", f"{found['tokens']}"],
        ["selected-token-logprob mismatches", f"{found['selected_logprobs']}"],
        ["top-logprob-map mismatches", f"{found['top_logprob_maps']}"],
        ["maximum selected-token-logprob difference", f"{found['maximum_difference']}"],
        ["verdict", "PASS" if found["passed"] else "FAIL"],
    ]
    ranks, _ = report.ranks(args.tensor_parallel_size)
    sampling = "greedy, and sampled with a seed" if args.sampled else "greedy"
    return [
        *report.heading(f"Online validation, {args.model or args.shape}{ranks}"),
        f"Poisson arrivals, {args.rate:g} a second, at most {args.concurrency} at a time; prompts of "
        f"{', '.join(map(str, PROMPT_CLASSES))} tokens; targets {sampling}.",
        "",
        *report.table(["", "count"], rows),
        *(f"- {failure}" for failure in found["failures"][:10]),
        f"Server: {args.base_url}" if mode is None else f"    {mode.described()}",
    ]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape", choices=models.SHAPES, default="design8", help="random checkpoint to serve"
    )
    parser.add_argument("--model", type=Path, help="checkpoint to serve instead")
    parser.add_argument(
        "--base-url", help="a server that runs already; then --served-model-name names its model"
    )
    parser.add_argument("--served-model-name", default=servers.NAME)
    parser.add_argument("--vocabulary", type=int, default=2000, help="prompts are token ids below this")
    parser.add_argument("--background", type=int, default=823)
    parser.add_argument("--targets", type=int, default=69)
    parser.add_argument("--min-crossed", type=int, default=36)
    parser.add_argument("--rate", type=float, default=16.0, help="background arrivals a second")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--greedy-only", dest="sampled", action="store_false")
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument(
        "--control", action="store_true", help="serve stock with only its support answer changed: must fail"
    )
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--kv-cache-gib", type=float, default=8.0)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--server-option", action="append", default=[], help="one more word for vllm serve")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a request may take")
    parser.add_argument("--start-limit", type=float, default=400.0, help="seconds")
    parser.add_argument("--models", type=Path, help="folder that keeps checkpoints")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    parser.add_argument("--work", type=Path, help="folder that keeps the log and the trace")
    return parser.parse_args(argv)


def serve_and_drive(args: argparse.Namespace, scratch: Path) -> tuple[Load, Path, Mode]:
    """The traffic, to a server started here."""
    work = args.work or scratch
    work.mkdir(parents=True, exist_ok=True)
    trace = (work / "trace.jsonl").resolve()
    trace.write_text("")
    plugin = offer(scratch / "plugins", PLUGINS)
    served = "support_only" if args.control else "vllm_invariant"
    environment = {"VLLM_BATCH_INVARIANT": "1", "VLLM_PLUGINS": f"{served},scheduler_trace"}
    caching = "--enable-prefix-caching" if args.prefix_caching else "--no-enable-prefix-caching"
    mode = Mode("online", environment | plugin | {VARIABLE: str(trace)}, (caching, *args.server_option))
    model = args.model or models.make_model(args.shape, args.models or scratch / "models")
    common = servers.common_options(
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        kv_cache_gib=args.kv_cache_gib,
        tensor_parallel_size=args.tensor_parallel_size,
    )
    with servers.running([mode], model, common, work, together=True, limit=args.start_limit) as running:
        load = asyncio.run(drive(running["online"].url, servers.NAME, args, args.vocabulary))
    return load, trace, Mode("online", environment, mode.options)


def main() -> None:
    """Serve, drive, judge, write."""
    args = parse()
    with tempfile.TemporaryDirectory() as scratch:
        if args.base_url:
            load = asyncio.run(drive(args.base_url, args.served_model_name, args, args.vocabulary))
            found, mode = judge(load, None, args), None
        else:
            load, trace, mode = serve_and_drive(args, Path(scratch))
            found = judge(load, trace, args)
    name = args.model.name if args.model else args.shape
    _, ranks = report.ranks(args.tensor_parallel_size)
    report.write(
        args.out,
        f"online-validation-{name}{ranks}{'-control' * args.control}",
        lines(found, mode, args),
        json.loads(json.dumps(found)),
    )
    sys.exit(0 if found["passed"] else 1)


if __name__ == "__main__":
    main()
