"""What launches could make of the router's and the shared expert's products on this GPU.

    python -m benchmarks.tune_moe_linears

Under the flag cuBLASLt may not split the depth of a product, and one with few columns then runs on a few
processors.  Here vLLM's own persistent kernel computes it with small tiles.  Nothing serves with it yet.
Like `benchmarks.tune_moe`: every candidate is classed by the bits of its results, checked against itself
at every number of rows, and timed, next to ``torch.nn.functional.linear`` with and without the flag.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import graph_time, report
from benchmarks.tune_moe import TOKENS, bits
from vllm_invariant.ops.moe_launch import Launch

# (columns, depth): routers of 256 and 512 experts; a shared expert's gate, up and down.
SHAPES = [(256, 2048), (512, 2048), (1, 2048), (1024, 2048), (2048, 512)]
CANDIDATES = [
    (16, 16, 128, 4, 5),
    (16, 16, 256, 4, 4),
    (16, 32, 128, 4, 4),
    (16, 32, 256, 4, 3),
    (16, 64, 128, 4, 4),
    (32, 32, 128, 4, 4),
    (32, 64, 128, 4, 4),
    (64, 32, 128, 4, 4),
    (64, 64, 64, 4, 4),
    (64, 64, 128, 4, 3),
    (64, 128, 64, 4, 4),
    (128, 64, 64, 4, 4),
    (128, 128, 64, 8, 3),
]
INPUTS = 8
COUNTS = (*range(1, 10), 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1023)


def matmul(x: torch.Tensor, weight: torch.Tensor, launch: Launch) -> torch.Tensor:
    """``x @ weight.T`` by vLLM's invariant kernel.

    Args:
        x: (rows, depth) bfloat16.
        weight: (columns, depth) bfloat16.
        launch: its tiles, warps and stages.

    Returns:
        (rows, columns) bfloat16.

    """
    from vllm.model_executor.determinism.batch_invariant import matmul_kernel_persistent
    from vllm.utils.platform_utils import num_compute_units

    (rows, depth), columns = x.shape, weight.shape[0]
    out = x.new_empty(rows, columns)
    tile_rows, tile_columns, tile_depth = launch.tile
    tiles = -(-rows // tile_rows) * -(-columns // tile_columns)
    matmul_kernel_persistent[(min(num_compute_units(x.device.index), tiles),)](
        *(x, weight, out, None),
        *(rows, columns, depth),
        *(x.stride(0), x.stride(1), weight.stride(1), weight.stride(0), out.stride(0), out.stride(1), 1),
        BLOCK_SIZE_M=tile_rows,
        BLOCK_SIZE_N=tile_columns,
        BLOCK_SIZE_K=tile_depth,
        GROUP_SIZE_M=launch.group,
        NUM_SMS=num_compute_units(x.device.index),
        A_LARGE=False,
        B_LARGE=False,
        C_LARGE=False,
        HAS_BIAS=False,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    return out


def time(run: Any, inputs: list[torch.Tensor], rows: int) -> float:
    """Microseconds of a call, replayed from a graph; the best of nine."""
    return min(graph_time.replayed(lambda i: run(inputs[i][:rows]), len(inputs), 9))


def measure(columns: int, depth: int, *, candidates: bool) -> dict[str, Any]:
    """Every way to compute one shape."""
    random = {"generator": torch.Generator("cuda").manual_seed(0), "device": "cuda"}
    weight = (torch.randn(columns, depth, **random) * depth**-0.5).bfloat16()
    inputs = [torch.randn(max(TOKENS), depth, **random).bfloat16() for _ in range(INPUTS)]
    ways: dict[str, Any] = {"torch": lambda x: torch.nn.functional.linear(x, weight)}
    if candidates:
        for m, n, k, warps, stages in CANDIDATES:
            launch = Launch(None, (m, n, k), warps, stages)
            ways[str((m, n, k, warps, stages))] = lambda x, launch=launch: matmul(x, weight, launch)
    found = {}
    for name, run in ways.items():
        whole = run(inputs[0])
        found[name] = {
            "bits": bits(whole),
            "rows that move": sum(int(run(inputs[0][:c]).ne(whole[:c]).any(-1).sum()) for c in COUNTS),
            "us": {rows: time(run, inputs, rows) for rows in TOKENS},
        }
    return found


def child(invariant: bool) -> None:
    """One process's share, printed: torch without the flag, or everything with it."""
    if invariant:
        from vllm.model_executor.determinism.batch_invariant import init_batch_invariance

        init_batch_invariance()
    found = {f"{n}x{k}": measure(n, k, candidates=invariant) for n, k in SHAPES}
    print("MEASURED", json.dumps(found))


def lines(stock: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """A table a shape."""
    text = []
    for shape, found in ours.items():
        ways = {"torch, no flag": stock[shape]["torch"], "torch, flag": found.pop("torch"), **found}
        rows = [
            [name, way["bits"], f"{way['rows that move']}", *(f"{t:.1f}" for t in way["us"].values())]
            for name, way in ways.items()
        ]
        header = ["us", "bits", "rows that move", *(f"{tokens:,}" for tokens in TOKENS)]
        text += ["", f"## {shape}", "", *report.table(header, rows)]
    return text


def main() -> None:
    """Measure in two processes, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    parser.add_argument("--child", choices=["0", "1"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child == "1")
        return
    found = []
    for flag in "01":
        command = [sys.executable, "-m", "benchmarks.tune_moe_linears", "--child", flag]
        environment = os.environ | {"VLLM_BATCH_INVARIANT": flag}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        line = next(line for line in done.stdout.splitlines() if line.startswith("MEASURED "))
        found.append(json.loads(line.removeprefix("MEASURED ")))
    raw = {"without the flag": found[0], "with the flag": json.loads(json.dumps(found[1]))}
    title = "Launches of the router's and the shared expert's products"
    report.write(args.out, "moe-linears", [*report.heading(title), *lines(*found)], raw)


if __name__ == "__main__":
    main()
