"""GPU time of an engine's steps, by mode: what the flag costs where the GPU is the limit, and not the host.

    python -m benchmarks.step_table --shape design8

The modes are those of `benchmarks.run_serving`, each an engine in a process of its own, compiled and with
CUDA graphs; they load together and are measured in turn, each alone.  A time is the sum of the durations of
all kernels in a step, by torch's profiler.  The host has no part in it, so it is steady where the wall clock
of a small model's server is not.
"""

import argparse
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import in_turn, models, report
from benchmarks.run_serving import RATIOS, RECURRENT, modes

ENVIRONMENT = {
    "VLLM_BATCH_INVARIANT": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
DECODES = (1, 8, 32, 128)  # sequences
PREFILLS = ((1, 512), (1, 2048), (4, 2048))  # prompts, tokens of each
STEPS = 16  # of decode, in one measurement
NAMES = [*(f"decode, {n}" for n in DECODES), *(f"prefill, {n} x {length:,}" for n, length in PREFILLS)]


class Engine:
    """A served model, stepped by hand."""

    def __init__(self, model: Path, vocabulary: int, *, recurrent: bool) -> None:
        from vllm import LLM

        config: dict[str, Any] = {"gdn_prefill_backend": "triton"}
        if recurrent:
            config["vllm_invariant"] = {"gdn_arithmetic": "recurrent"}
        llm = LLM(
            str(model),
            max_model_len=4096,
            max_num_seqs=max(DECODES),
            max_num_batched_tokens=8192,
            enable_prefix_caching=False,
            additional_config=config,
            kv_cache_memory_bytes=4 << 30,
            gpu_memory_utilization=0.1,
        )
        self.engine, self.vocabulary, self.asked = llm.llm_engine, vocabulary, 0
        self.source = random.Random(0)

    def ask(self, prompts: int, length: int, tokens: int) -> None:
        """Add requests; nothing is computed yet."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        for _ in range(prompts):
            ids = [self.source.randrange(1, self.vocabulary) for _ in range(length)]
            self.engine.add_request(str(self.asked), {"prompt_token_ids": ids}, params)
            self.asked += 1

    def finish(self) -> None:
        """Step until nothing is left to do."""
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def decode(self, sequences: int) -> float:
        """Milliseconds of a step in which ``sequences`` decode."""
        self.ask(sequences, 32, STEPS + 8)
        for _ in range(4):  # the prompts, and the first decodes
            self.engine.step()
        spent = kernels(lambda: [self.engine.step() for _ in range(STEPS)])
        self.finish()
        return spent / STEPS

    def prefill(self, prompts: int, length: int) -> float:
        """Milliseconds of a step that prefills whole prompts and takes a token for each."""
        self.ask(prompts, length, 1)
        return kernels(self.finish)

    def measure(self) -> dict[str, float]:
        """Every workload once."""
        times = [*(self.decode(n) for n in DECODES), *(self.prefill(*shape) for shape in PREFILLS)]
        return dict(zip(NAMES, times, strict=True))


def kernels(work: Callable[[], object]) -> float:
    """Milliseconds of all kernels that ``work`` runs."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profiler.key_averages()) / 1e3


def child(args: argparse.Namespace) -> None:
    """One mode's process."""
    engine = Engine(args.model, models.vocabulary(args.shape), recurrent=args.child == RECURRENT)
    engine.measure()
    in_turn.serve(engine.measure)


def lines(args: argparse.Namespace, found: dict[str, list[dict[str, float]]]) -> list[str]:
    """The report."""
    rows = [
        [name, *(report.median_and_spread([r[work] for r in answers], 3) for work in NAMES)]
        for name, answers in found.items()
    ]
    ratios = [
        [
            f"{of} / {against}",
            *(report.ratio(found[of], found[against], work) for work in NAMES),
            "" if goal is None else f"{1 / goal:.2f}",
        ]
        for of, against, goal in RATIOS
    ]
    return [
        *report.heading(f"GPU time of a step, {args.shape}"),
        f"Milliseconds of all kernels. Median of {args.rounds} rounds (lowest to highest); decode is of "
        f"{STEPS} steps each.",
        "",
        *report.table(["mode", *NAMES], rows),
        *report.table(["ratio", *NAMES, "to reach at most"], ratios),
    ]


def main() -> None:
    """Load, measure, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=models.SHAPES, default="design8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", type=Path, help="folder that keeps checkpoints")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    with tempfile.TemporaryDirectory() as scratch:
        model = models.make_model(args.shape, args.models or Path(scratch))
        arguments = ("-m", "benchmarks.step_table", "--shape", args.shape, "--model", str(model))
        jobs = {
            mode.name: in_turn.Job((*arguments, "--child", mode.name), ENVIRONMENT | mode.environment)
            for mode in modes(Path(scratch) / "plugins", [])
        }
        found = in_turn.run(jobs, Path(scratch), args.rounds)
    report.write(args.out, f"steps-{args.shape}", lines(args, found), found)


if __name__ == "__main__":
    main()
