"""Choose launch parameters for the Triton experts on this GPU: what a row of the table is made from.

A launch is used for every number of tokens, or for a range of them: that keeps a row's bits only if all
launches of the row give the same bits.  So every candidate is run on the same tokens and classed by its
bits, then checked against itself at every token count, and timed.

    python -m benchmarks.tune_moe [--shape qwen35-35b-a3b]
"""

import argparse
import hashlib
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import graph_time, report

TOKENS = (1, 8, 32, 64, 128, 256, 2048)
ROUTINGS = 8  # different tokens in turn, so that a round's weights do not sit in the cache from the last

# rows, columns and depth of a tile, warps, stages, tile rows that share weights
CANDIDATES = [
    (16, 32, 128, 4, 4, 1),
    (16, 64, 64, 4, 4, 1),
    (16, 64, 128, 4, 4, 1),
    (16, 64, 256, 4, 3, 1),
    (16, 128, 64, 4, 4, 1),
    (16, 128, 128, 4, 3, 1),
    (16, 128, 128, 8, 3, 1),
    (32, 64, 128, 4, 4, 1),
    (32, 128, 64, 4, 4, 1),
    (64, 64, 32, 4, 3, 8),
    (64, 64, 64, 4, 4, 1),
    (64, 64, 128, 4, 3, 1),
    (64, 128, 64, 4, 3, 1),
    (64, 128, 64, 8, 3, 1),
    (64, 256, 64, 8, 3, 1),
    (128, 64, 64, 4, 3, 1),
    (128, 128, 64, 4, 3, 1),
    (128, 128, 64, 8, 3, 1),
    (128, 256, 64, 8, 3, 1),
]
NAMES = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps", "num_stages", "GROUP_SIZE_M")


@dataclass(frozen=True)
class Experts:
    """Sizes of one layer's experts."""

    experts: int
    top_k: int
    width: int
    hidden: int


SHAPES = {
    "qwen35-35b-a3b": Experts(256, 8, 512, 2048),
    "qwen3-next-80b-a3b": Experts(512, 10, 512, 2048),
}


def launch(candidate: tuple[int, ...]) -> dict[str, int]:
    """A candidate as vLLM takes it."""
    return dict(zip(NAMES, candidate, strict=True)) | {"SPLIT_K": 1}


class Bench:
    """Random experts and tokens on the GPU."""

    def __init__(self, shape: Experts, tokens: int = max(TOKENS)) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        self.shape = shape
        normal = partial(torch.randn, generator=generator, device="cuda", dtype=torch.bfloat16)
        self.w13 = normal(shape.experts, 2 * shape.width, shape.hidden) * 0.05
        self.w2 = normal(shape.experts, shape.hidden, shape.width) * 0.05
        self.x = [normal(tokens, shape.hidden) for _ in range(ROUTINGS)]
        logits = [normal(tokens, shape.experts).float() for _ in range(ROUTINGS)]
        chosen = [each.softmax(-1).topk(shape.top_k) for each in logits]
        self.weights = [c.values / c.values.sum(-1, keepdim=True) for c in chosen]
        self.ids = [c.indices.int() for c in chosen]

    def run(self, tokens: int, routing: int = 0, config: dict[str, int] | None = None) -> torch.Tensor:
        """One pass of the first tokens of one routing; vLLM's own choice of a launch for None."""
        from vllm.model_executor.layers.fused_moe import fused_experts, override_config

        i = routing
        arguments = (self.w13, self.w2, self.weights[i][:tokens], self.ids[i][:tokens])
        with override_config(config):
            return fused_experts(self.x[i][:tokens], *arguments)

    def time(self, tokens: int, config: dict[str, int] | None = None) -> float:
        """Microseconds of a pass, replayed from a graph over all routings; the best of seven."""
        return min(graph_time.replayed(lambda routing: self.run(tokens, routing, config), ROUTINGS, 7))


def compile_one(shape: Experts, candidate: tuple[int, ...]) -> str | None:
    """Fill Triton's cache for a candidate.  Returns why it cannot be launched, if so."""
    bench = Bench(shape, tokens=65)
    try:
        for tokens in (1, 2, 8, 9, 13, 16, 64, 65):
            bench.run(tokens, config=launch(candidate))
        torch.cuda.synchronize()
    except Exception as error:  # a shape that needs more shared memory than there is
        return f"{type(error).__name__}: {error}"[:200]
    return None


def bits(tensor: torch.Tensor) -> str:
    """A short name for a tensor's bits."""
    return hashlib.sha256(tensor.cpu().view(torch.int16).numpy().tobytes()).hexdigest()[:8]


def rows_move(bench: Bench, config: dict[str, int] | None) -> int:
    """Rows whose bits differ between a call of all tokens and calls of the first few."""
    whole = bench.run(max(TOKENS), config=config)
    counts = (*range(1, 10), 12, 13, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1023)
    moved = (bench.run(count, config=config).ne(whole[:count]).any(-1).sum() for count in counts)
    return int(sum(moved))


def measure(shape: Experts, problems: list[str | None]) -> dict[str, Any]:
    """Every candidate that can be launched: class of bits, rows that move, times."""
    bench = Bench(shape)
    found: dict[str, Any] = {}
    named = {str(c): launch(c) for c, why in zip(CANDIDATES, problems, strict=True) if why is None}
    for name, config in [("stock", None), *named.items()]:
        found[name] = {
            "bits": bits(bench.run(64, config=config)),
            "rows that move": rows_move(bench, config),
            "us": {tokens: bench.time(tokens, config) for tokens in TOKENS},
        }
    skipped = {str(c): why for c, why in zip(CANDIDATES, problems, strict=True) if why}
    return {"launches": found, "not launched": skipped}


def lines(name: str, result: dict[str, Any]) -> list[str]:
    """A table of one shape: classes of equal bits, in each the launches by geometric mean."""
    launches = result["launches"]
    stock = {int(tokens): time for tokens, time in launches["stock"]["us"].items()}
    ranked = []
    for label, entry in launches.items():
        ratios = [entry["us"][tokens] / stock[int(tokens)] for tokens in entry["us"]]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        ranked.append((entry["bits"], mean, label, ratios, entry["rows that move"]))
    rows = [
        [label, found, f"{moved}", f"{mean:.2f}", *(f"{ratio:.2f}" for ratio in ratios)]
        for found, mean, label, ratios, moved in sorted(ranked)
    ]
    rows.append(["*stock, us*", "", "", "", *(f"{time:.1f}" for time in stock.values())])
    counts = [f"{tokens:,}" for tokens in stock]
    refused = [f"- {label}: {why}" for label, why in result["not launched"].items()]
    return [
        "",
        f"## {name}",
        "",
        *report.table(["launch", "bits", "rows that move", "mean", *counts], rows),
        *refused,
    ]


def main() -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="all by default")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    args = parser.parse_args()
    names, results = args.shape or list(SHAPES), {}
    with ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn")) as pool:
        problems = {n: pool.map(partial(compile_one, SHAPES[n]), CANDIDATES) for n in names}
        import vllm.model_executor.layers.fused_moe  # noqa: F401  (takes long; the workers compile meanwhile)

        problems = {n: list(each) for n, each in problems.items()}
    for name in names:
        results[name] = measure(SHAPES[name], problems[name])
    text = [
        *report.heading("Launches of the Triton experts"),
        "Routed experts of one layer, without router and shared expert. A launch is tile rows, columns and",
        "depth, warps, stages, and tile rows that share weights. Times are ratios to *stock*, vLLM's own",
        "choice by number of tokens without the flag; under the flag stock has (64, 64, 32, 4, 3, 8).",
        "*bits*: of 64 tokens' outputs, hashed. *rows that move*: rows whose bits differ in calls of fewer",
        "tokens.",
        *(line for name in names for line in lines(name, results[name])),
    ]
    report.write(args.out, "moe-launches", text, results)


if __name__ == "__main__":
    main()
