"""What batch invariance costs a mixture-of-experts layer: router, experts and shared expert together.

    python -m benchmarks.moe_table [--shape qwen35-35b-a3b]

One layer of the shape is loaded by three processes and measured in one after the other: stock without the
flag, the flag with the launch stock fixes for it, and the flag with this package's launches.  Each first
computes the same tokens, which are checked against float32; then every count of tokens is timed, from graphs
that go through several sets of tokens, so that weights come from memory as they do in a model.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import graph_time, in_turn, models, report

TOKENS = (1, 8, 32, 64, 128, 256, 2048)
SETS = 8
MODES = {
    "stock": {"VLLM_BATCH_INVARIANT": "0"},
    "stock launch": {"VLLM_BATCH_INVARIANT": "1"},
    "invariant": {"VLLM_BATCH_INVARIANT": "1"},
}
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}


class Layer:
    """The mixture of experts of a served model's first layer."""

    def __init__(self, model: Path) -> None:
        from vllm import LLM

        from vllm_invariant.plugin import register

        register()  # at once, so that it need not be installed
        self.llm = LLM(
            str(model),
            max_model_len=4096,
            max_num_seqs=256,
            max_num_batched_tokens=2048,
            enable_prefix_caching=False,
            enforce_eager=True,
            kv_cache_memory_bytes=2 << 30,
            gpu_memory_utilization=0.1,
        )
        runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self.config, self.device = runner.vllm_config, runner.device
        self.block = runner.get_model().model.layers[0].mlp

    def tokens(self, count: int, seed: int) -> torch.Tensor:
        """(count, hidden) random tokens, the same in every mode."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(
            count, self.block.gate.input_size, generator=generator, device=self.device
        ).bfloat16()

    def run(self, part: Any, x: torch.Tensor) -> torch.Tensor:
        """A part of the layer, as in a step of the engine."""
        from vllm.forward_context import set_forward_context

        with torch.inference_mode(), set_forward_context(None, self.config):
            out = part(x)
        return out[0] if isinstance(out, tuple) else out

    def error(self) -> float:
        """Largest distance of an output from float32, in standard deviations of the outputs.

        Raises RuntimeError if the router left out an expert with a higher logit than one it chose.
        """
        x = self.tokens(64, seed=99)
        logits, router = self.run(self.block.gate, x), self.block.experts.router
        weights, ids = router.select_experts(x, logits)
        chosen = logits.gather(1, ids.long()).float().sort(descending=True).values
        if not torch.equal(chosen, logits.float().topk(ids.shape[1]).values):
            raise RuntimeError("the router's choice is not the top of its logits")
        exact = reference(self.block, x, weights, ids)
        return float((self.run(self.block, x).float() - exact).abs().max() / exact.std())

    def time(self, part: Any, count: int) -> float:
        """Microseconds of a part; the best of nine replays."""
        inputs = [self.tokens(count, seed) for seed in range(SETS)]
        self.run(part, inputs[1])
        kept: list[torch.Tensor] = []  # outputs of their own, as in a model
        return min(graph_time.replayed(lambda i: kept.append(self.run(part, inputs[i])), SETS, 9))


def reference(block: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The layer in float32, on experts that are given, because bfloat16 logits tie: (tokens, hidden)."""
    x32, experts = x.float(), block.experts.routed_experts
    out = torch.zeros_like(x32)
    for row in range(len(x)):
        for weight, e in zip(weights[row], ids[row].tolist(), strict=True):
            out[row] += weight * swiglu(x32[row], experts.w13_weight[e], experts.w2_weight[e])
    shared = block.shared_expert
    gate = torch.sigmoid(x32 @ shared.expert_gate.weight.float().T)
    return out + gate * swiglu(x32, shared.gate_up_proj.weight, shared.down_proj.weight)


def swiglu(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """One expert in float32."""
    gate, up = (x @ gate_up.float().T).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up) @ down.float().T


def child(mode: str, model: Path) -> None:
    """Load, wait for a line of input, measure one mode and print it."""
    layer = Layer(model)
    if mode == "stock launch":
        from vllm.model_executor.layers import linear
        from vllm.model_executor.layers.fused_moe import fused_moe

        fused_moe.get_default_config = fused_moe.get_default_config.__wrapped__
        linear.linear_batch_invariant = linear.linear_batch_invariant.__wrapped__
    parts = {
        "layer": layer.block,
        "router gate": layer.block.gate,
        "shared expert": layer.block.shared_expert,
    }

    def measured() -> dict[str, Any]:
        times = {name: {count: layer.time(part, count) for count in TOKENS} for name, part in parts.items()}
        return {"error": layer.error(), **times}

    in_turn.serve(measured)


def measure(model: Path, logs: Path) -> dict[str, Any]:
    """All modes: loaded together, measured alone."""
    arguments = ("-m", "benchmarks.moe_table", "--model", str(model), "--child")
    jobs = {mode: in_turn.Job((*arguments, mode), {**ENVIRONMENT, **MODES[mode]}) for mode in MODES}
    return {mode: answers[0] for mode, answers in in_turn.run(jobs, logs).items()}


def lines(shape: str, found: dict[str, Any]) -> list[str]:
    """The report."""
    rows = []
    for count in map(str, TOKENS):
        stock = found["stock"]["layer"][count]
        row = [f"{int(count):,}", f"{stock:.1f}"]
        for mode in ("stock launch", "invariant"):
            time = found[mode]["layer"][count]
            row += [f"{time:.1f}", f"{100 * (time / stock - 1):+.0f}%"]
        for part in ("router gate", "shared expert"):
            row += [f"{found['stock'][part][count]:.1f}", f"{found['invariant'][part][count]:.1f}"]
        rows.append(row)
    header = ["tokens", "stock, us", "stock launch, us", "cost", "invariant, us", "cost"]
    header += ["gate: stock", "invariant", "shared: stock", "invariant"]
    return [
        *report.heading(f"A mixture-of-experts layer, {shape}"),
        "Router, routed experts and shared expert of one layer, bfloat16. *stock*: no flag. *stock launch*:",
        "the flag, with the launches stock has for it. *invariant*: the flag, with this package's.",
        "The last four columns are the router's product and the shared expert by themselves.",
        "",
        *report.table(header, rows),
        "Largest distance from float32, in standard deviations of the outputs: "
        + ", ".join(f"{mode} {found[mode]['error']:.4f}" for mode in MODES)
        + ".",
    ]


def main() -> None:
    """Measure, check, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=models.FAMILIES, default="qwen35-35b-a3b")
    parser.add_argument("--models", type=Path, help="folder that keeps checkpoints")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    parser.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.model)
        return
    with tempfile.TemporaryDirectory() as scratch:
        layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
        model = models.make_model(args.shape, args.models or Path(scratch), **layers)
        found = measure(model, Path(scratch))
    if max(found[mode]["error"] for mode in MODES) > 0.1:
        raise SystemExit(f"an output is too far from float32: { {m: found[m]['error'] for m in MODES} }")
    report.write(args.out, f"moe-layer-{args.shape}", lines(args.shape, found), found)


if __name__ == "__main__":
    main()
