"""Linear layers under the flag: this package's launch, stock's kernel and cuBLAS, and tiles to choose from.

    python -m benchmarks.tune_linears

First the kernel's own tests run; nothing is timed if one fails.  Weights take turns until they no longer fit
into the cache together, as those of a model's layers do.  ``torch`` is ``torch.nn.functional.linear`` without
the flag, which is what stock serves with then.  All but that give the same bits.
"""

import argparse
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import graph_time, report
from vllm_invariant.ops.linear_launch import TABLE, Launch, Tile
from vllm_invariant.ops.linear_triton import linear

TESTS = "tests/kernels/test_linear.py"
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)

# (columns, depth) of each layer's products, by model: of GDN, attention, MLP or router and shared expert.
MODELS = {
    "design8, Qwen3.5-0.8B": [
        (12288, 1024), (8192, 1024), (64, 1024), (1024, 4096), (1024, 2048), (5120, 1024), (6144, 1024),
        (7168, 1024), (1024, 3072), (1024, 3584), (248320, 1024),
    ],
    "Qwen3.5-35B-A3B": [
        (12288, 2048), (64, 2048), (2048, 4096), (9216, 2048), (256, 2048), (1024, 2048), (2048, 512),
    ],
    "5120 wide, dense": [(16384, 5120), (5120, 6144), (34816, 5120), (5120, 17408)],
}  # fmt: skip

# rows, columns and depth of a tile, stages; warps
CANDIDATES = [
    (16, 32, 256, 3, 4), (16, 64, 128, 4, 4), (64, 32, 128, 4, 4), (64, 32, 128, 4, 8), (64, 64, 128, 3, 4),
    (128, 64, 64, 4, 8), (128, 128, 64, 3, 4), (128, 128, 64, 4, 8), (128, 256, 64, 3, 8),
]  # fmt: skip
CACHE = 160 << 20  # bytes of weights that take turns
MOST = 1 << 37  # operations of a product that is timed: a head's logits of thousands of rows are nobody's

Way = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def ways(launch: Launch) -> dict[str, Way]:
    """Everything that is timed, by name."""
    from vllm.model_executor.determinism.batch_invariant import linear_batch_invariant

    found: dict[str, Way] = {
        "torch": torch.nn.functional.linear,
        "stock, flag": linear_batch_invariant,
        "ours": lambda x, w: linear(x, w, launch),
    }
    for *size, warps in CANDIDATES:
        tiles = tuple(Tile(end, *size) for end in (1, 2, 3, None))
        only = Launch(tiles, warps, launch.programs)
        found[f"{(*size, warps)}"] = lambda x, w, only=only: linear(x, w, only)
    return found


def measure(columns: int, depth: int, launch: Launch) -> dict[str, dict[int, float]]:
    """Microseconds of one product, by way and number of rows."""
    draw = torch.Generator("cuda").manual_seed(0)
    copies = max(1, min(24, math.ceil(CACHE / (2 * columns * depth))))
    weights = [
        (depth**-0.5 * torch.randn(columns, depth, generator=draw, device="cuda")).bfloat16()
        for _ in range(copies)
    ]
    x = torch.randn(max(ROWS), depth, generator=draw, device="cuda").bfloat16()
    found: dict[str, dict[int, float]] = {}
    for name, way in ways(launch).items():
        found[name] = {}
        for rows in ROWS:
            if rows * columns * depth > MOST:
                continue
            launches = max(2, min(copies, 16)) if rows <= 512 else 2

            def once(i: int, way: Way = way, rows: int = rows) -> torch.Tensor:
                return way(x[:rows], weights[i % copies])

            times = graph_time.replayed(once, launches, 5)
            found[name][rows] = statistics.median(times)
    return found


def slowdown(found: list[dict[str, dict[int, float]]], name: str, rows: int) -> str:
    """Geometric mean of the ratios to ``torch``, and the worst."""
    ratios = [each[name][rows] / each["torch"][rows] for each in found if rows in each[name]]
    return f"{statistics.geometric_mean(ratios):.2f} ({max(ratios):.2f})"


def lines(measured: dict[str, list[dict[str, dict[int, float]]]], closing: str) -> list[str]:
    """The report."""
    text = [
        *report.heading("Linear layers under the flag"),
        "bfloat16. Ratios to *torch*, cuBLAS without the flag: geometric mean over the products (worst).",
        "In brackets, tiles for every number of rows: rows, columns, depth, stages, warps.",
        "",
    ]
    header = ["by rows", *(f"{rows:,}" for rows in ROWS)]
    for model, found in measured.items():
        rows = [[name, *(slowdown(found, name, r) for r in ROWS)] for name in found[0]]
        products = ", ".join(f"{n}x{k}" for n, k in MODELS[model])
        text += [f"## {model}", "", f"Columns x depth: {products}", "", *report.table(header, rows)]
    return [*text, f"Tests of the kernel, run just before: {closing}."]


def main() -> None:
    """Test, time, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    args = parser.parse_args()
    closing = report.passed_tests(TESTS)
    launch = TABLE[torch.cuda.get_device_capability()]
    measured = {model: [measure(n, k, launch) for n, k in shapes] for model, shapes in MODELS.items()}
    raw = {
        model: {f"{n}x{k}": each for (n, k), each in zip(MODELS[model], found, strict=True)}
        for model, found in measured.items()
    }
    report.write(args.out, "linears", lines(measured, closing), raw)


if __name__ == "__main__":
    main()
