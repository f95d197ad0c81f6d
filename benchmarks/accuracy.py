"""How far from transformers' float32 forward the served model is: ours under the flag against stock's normal.

    python -m benchmarks.accuracy --shape design8

The logprob of every prompt token (after the first) of 32 prompts, from three programs, each in a process of
its own: transformers in float32, eager, with its own PyTorch functions; stock vLLM without the flag; and vLLM
with the plugin under the flag.  Exit code 0 only if ours errs at most 1.02 times as much as stock's.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import models, report

REFERENCE, STOCK, OURS = "reference", "stock", "ours"
ENVIRONMENTS = {
    REFERENCE: {"VLLM_PLUGINS": ""},
    STOCK: {"VLLM_PLUGINS": ""},
    OURS: {"VLLM_PLUGINS": "vllm_invariant", "VLLM_BATCH_INVARIANT": "1"},
}
LIMIT = 1.02


def prompts(count: int, longest: int) -> list[list[int]]:
    """Random prompts of 2 to ``longest`` tokens; the longest is among them."""
    source = random.Random(0)
    lengths = [longest, *(source.randint(2, longest) for _ in range(count - 1))]
    return [[source.randrange(1, 2000) for _ in range(length)] for length in lengths]


def reference(model: Path, asked: list[list[int]]) -> list[list[float]]:
    """Logprobs of each prompt's tokens but the first, by transformers in float32."""
    from tests.oracles import plain_transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with plain_transformers() as qwen, torch.inference_mode():
        net = qwen.Qwen3_5ForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
        net.to(device).eval()
        found = []
        for prompt in asked:
            ids = torch.tensor([prompt], device=device)
            logprobs = net(ids).logits[0, :-1].float().log_softmax(-1)
            found.append(logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist())
    return found


def served(model: Path, asked: list[list[int]], options: dict[str, Any]) -> list[list[float]]:
    """The same by vLLM, as this process's environment has it, all prompts at once."""
    from vllm import LLM, SamplingParams

    if torch.cuda.is_available():
        options = options | {"additional_config": {"gdn_prefill_backend": "triton"}}
    llm = LLM(str(model), enforce_eager=True, enable_prefix_caching=False, seed=0, **options)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in asked], params, use_tqdm=False)
    return [
        [entry[token].logprob for entry, token in zip(o.prompt_logprobs[1:], prompt[1:], strict=True)]
        for o, prompt in zip(outputs, asked, strict=True)
    ]


def work(who: str, model: Path, args: argparse.Namespace, out: Path) -> None:
    """One program's logprobs, to a file."""
    asked = prompts(args.prompts, args.longest)
    options = {"max_model_len": args.longest + 64, "kv_cache_memory_bytes": int(args.kv_cache_gib * 2**30)}
    if torch.cuda.is_available():
        options["gpu_memory_utilization"] = 0.1  # only what must be free at start
    found = reference(model, asked) if who == REFERENCE else served(model, asked, options)
    out.write_text(json.dumps(found))


def run(who: str, model: Path, folder: Path) -> list[float]:
    """`work` in a process of its own.  Returns the logprobs of all prompts in a row."""
    out, log = folder / f"{who}.json", folder / f"{who}.log"
    inherited = {k: v for k, v in os.environ.items() if k not in ("VLLM_BATCH_INVARIANT", "VLLM_PLUGINS")}
    fixed = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "benchmarks.accuracy", *sys.argv[1:], "--worker", who]
    command += ["--worker-model", str(model), "--worker-out", str(out)]
    with log.open("w") as stream:
        environment = {"OMP_WAIT_POLICY": "passive"} | inherited | fixed | ENVIRONMENTS[who]
        code = subprocess.run(command, env=environment, stdout=stream, stderr=stream).returncode
    if code != 0:
        raise RuntimeError(f"{who} ended with code {code}: {log.read_text()[-3000:]}")
    return [logprob for row in json.loads(out.read_text()) for logprob in row]


def errors(found: Sequence[float], expected: Sequence[float]) -> tuple[float, float]:
    """Root mean square and maximum of the difference."""
    apart = [a - b for a, b in zip(found, expected, strict=True)]
    return math.sqrt(sum(x * x for x in apart) / len(apart)), max(map(abs, apart))


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=models.SHAPES, default="design8")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--longest", type=int, default=700)
    parser.add_argument("--kv-cache-gib", type=float, default=4.0)
    parser.add_argument("--models", type=Path, help="folder that keeps checkpoints")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    for name in ("--worker", "--worker-model", "--worker-out"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run the three programs, compare, write."""
    args = parse()
    if args.worker:
        work(args.worker, Path(args.worker_model), args, Path(args.worker_out))
        return
    with tempfile.TemporaryDirectory() as scratch:
        model = models.make_model(args.shape, args.models or Path(scratch) / "models")
        expected, *found = (run(who, model, Path(scratch)) for who in (REFERENCE, STOCK, OURS))
    stock, ours = (errors(each, expected) for each in found)
    ratio = ours[0] / stock[0]
    rows = [
        ["stock, normal", f"{stock[0]:.6f}", f"{stock[1]:.6f}", "1.000"],
        ["ours, under the flag", f"{ours[0]:.6f}", f"{ours[1]:.6f}", f"{ratio:.3f}"],
    ]
    header = ["", "RMS error", "largest error", "RMS against stock"]
    text = [
        *report.heading(f"Accuracy, {args.shape}"),
        f"Logprobs of {len(expected)} tokens of {args.prompts} prompts against transformers' float32 "
        f"forward; at most {LIMIT} times stock's error.",
        "",
        *report.table(header, rows),
    ]
    raw = {"tokens": len(expected), "stock": stock, "ours": ours, "ratio": ratio, "limit": LIMIT}
    report.write(args.out, f"accuracy-{args.shape}", text, raw)
    sys.exit(0 if ratio <= LIMIT else 1)


if __name__ == "__main__":
    main()
