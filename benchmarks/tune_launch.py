"""Choose launch parameters for the GDN chunk kernels on this GPU, and print the table row.

For each autotuned kernel, every candidate upstream offers is timed on several batch shapes; the row
holds the candidate with the smallest geometric mean of its slowdowns against each shape's best.

    python benchmarks/tune_launch.py [--head-dim 128] [--json FILE]
"""

import argparse
import importlib
import json
import math
from pathlib import Path

import torch

from vllm_invariant.cuda import FLA
from vllm_invariant.ops.launch import KERNELS, autotuner

# (key heads, value heads), (sequence lengths)
SHAPES = [
    ((16, 32), [64]),
    ((16, 32), [2048]),
    ((16, 32), [8192]),
    ((16, 32), [512] * 4),
    ((16, 32), [256] * 32),
    ((16, 16), [2048]),
]


def run_chunk(heads: tuple[int, int], lengths: list[int], dim: int) -> None:
    """One chunk prefill of random data through upstream's own function."""
    chunk = importlib.import_module(f"{FLA}.chunk")
    hk, hv = heads
    tokens = sum(lengths)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.nn.functional.normalize(torch.randn(1, tokens, hk, dim, **options).float(), dim=-1).bfloat16()
    k = torch.nn.functional.normalize(torch.randn(1, tokens, hk, dim, **options).float(), dim=-1).bfloat16()
    v = torch.randn(1, tokens, hv, dim, **options)
    g = -torch.rand(1, tokens, hv, device="cuda") * 0.1
    beta = torch.rand(1, tokens, hv, device="cuda")
    state = torch.randn(len(lengths), hv, dim, dim, device="cuda")
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    chunk.chunk_gated_delta_rule(
        q, k, v, g, beta, initial_state=state, output_final_state=True, cu_seqlens=starts
    )
    torch.cuda.synchronize()


def main() -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--json", type=Path, help="write every timing here")
    args = parser.parse_args()
    tuners = {
        n: autotuner(getattr(importlib.import_module(f"{FLA}.{m}"), k)) for n, (m, k) in KERNELS.items()
    }
    slowdowns: dict[str, dict[str, list[float]]] = {n: {} for n in tuners}
    for heads, lengths in SHAPES:
        for tuner in tuners.values():
            tuner.cache.clear()
        run_chunk(heads, lengths, args.head_dim)
        for name, tuner in tuners.items():
            times = {str(c): (t[0] if isinstance(t, list) else t) for c, t in tuner.configs_timings.items()}
            best = min(times.values())
            for config, time in times.items():
                slowdowns[name].setdefault(config, []).append(time / best)
    print(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
    for name, configs in slowdowns.items():
        ranked = sorted((math.exp(sum(map(math.log, r)) / len(r)), c, max(r)) for c, r in configs.items())
        for mean, config, worst in ranked[:3]:
            print(f"{name:8} geomean {mean:.3f} worst {worst:.3f}  {config}")
    if args.json:
        args.json.write_text(json.dumps(slowdowns, indent=1))


if __name__ == "__main__":
    main()
