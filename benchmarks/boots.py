"""Fresh boots with empty kernel caches give the same bits.

Each boot is a process of its own whose Triton, Inductor and vLLM caches are new and empty.  It serves the
same greedy and seeded requests, cold and on a hit, and reports one hash of all token ids and raw logprobs.

    python -m benchmarks.boots [--boots 4] [--shape design8] [--eager] [--tensor-parallel-size 2]
"""

import argparse
import hashlib
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import models, report

LENGTHS = (3, 63, 64, 65, 129, 300, 513, 700, 1089, 2000)
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT")


def serve(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """What one boot says: a hash of everything it returned, and how many tokens it took from its cache."""
    from vllm import LLM, SamplingParams

    vocabulary = models.vocabulary(args.shape)
    llm = LLM(
        model,
        enforce_eager=args.eager,
        tensor_parallel_size=args.tensor_parallel_size,
        enable_expert_parallel=args.enable_expert_parallel,
        max_model_len=4096,
        max_num_batched_tokens=2048,
        max_num_seqs=32,
        max_logprobs=20,
        enable_prefix_caching=True,
        kv_cache_memory_bytes=2 << 30,
        gpu_memory_utilization=0.1,
    )
    source = random.Random(0)
    prompts = [{"prompt_token_ids": [source.randrange(1, vocabulary) for _ in range(n)]} for n in LENGTHS]
    greedy = SamplingParams(temperature=0, max_tokens=32, logprobs=20, ignore_eos=True, detokenize=False)
    seeded = SamplingParams(
        temperature=1, seed=7, max_tokens=32, logprobs=20, ignore_eos=True, detokenize=False
    )
    digest, hits = hashlib.sha256(), 0
    for params in (greedy, greedy, seeded):  # cold, on hits, drawn
        for output in llm.generate(prompts, params, use_tqdm=False):
            answer = output.outputs[0]
            hits += output.num_cached_tokens or 0
            digest.update(struct.pack(f"{len(answer.token_ids)}q", *answer.token_ids))
            for position in answer.logprobs:
                for token, entry in sorted(position.items()):
                    digest.update(struct.pack("qf", token, entry.logprob))
    return {"hash": digest.hexdigest(), "hit_tokens": hits}


def boot(number: int, model: Path, folder: Path) -> dict[str, Any]:
    """Run `serve` in a process with empty caches, with the options of this one."""
    answer = folder / f"{number}.json"
    environment = os.environ | {"VLLM_BATCH_INVARIANT": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    environment |= {name: str(folder / f"{number}-{name.lower()}") for name in CACHES}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.boots", *sys.argv[1:], "--child", str(model), str(answer)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"boot {number} failed:\n{done.stdout[-20_000:]}")
    return json.loads(answer.read_text())


def main() -> None:
    """Boot, compare, report; exit code 0 only if all hashes are one and hits happened."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--boots", type=int, default=4)
    parser.add_argument("--shape", choices=models.SHAPES, default="design8")
    parser.add_argument("--eager", action="store_true", help="no torch.compile and no CUDA graphs")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--enable-expert-parallel", action="store_true")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    parser.add_argument("--child", nargs=2, metavar=("MODEL", "ANSWER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        model, answer = args.child
        Path(answer).write_text(json.dumps(serve(model, args)))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = models.make_model(args.shape, Path(folder))
        with ThreadPoolExecutor() as pool:
            boots = list(pool.map(lambda i: boot(i, model, Path(folder)), range(args.boots)))
    how = "eager" if args.eager else "compiled, CUDA graphs"
    how += ", expert parallelism" if args.enable_expert_parallel else ""
    ranks, suffix = report.ranks(args.tensor_parallel_size)
    suffix += "-ep" if args.enable_expert_parallel else ""
    lines = report.heading(f"{args.boots} fresh boots with empty kernel caches, {args.shape}, {how}{ranks}")
    rows = [[str(i), str(b["hit_tokens"]), f"`{b['hash']}`"] for i, b in enumerate(boots)]
    lines += report.table(["boot", "hit tokens", "SHA-256 of all token ids and logprobs"], rows)
    report.write(args.out, f"boots{suffix}", lines, boots)
    same = len({b["hash"] for b in boots}) == 1
    sys.exit(0 if same and all(b["hit_tokens"] > 0 for b in boots) else 1)


if __name__ == "__main__":
    main()
