"""Speed of the CUDA recurrence against stock's kernels, on one GPU, in one run.

First the kernel's own tests run; nothing is timed if one fails.  Then each row of the table is captured
into a CUDA graph of several launches over different slots and replayed; a time is the median over replays
of one launch, with the fastest and the slowest.

    python -m benchmarks.recurrent_table [--out FOLDER]

Stock's decode is its packed Triton kernel.  Stock's prefill is what its layer does to the same inputs:
its prologue (split, normalisation, gating) and the chunk kernels, launched as this package pins them; the
chunk kernels alone are timed too.
"""

import argparse
import importlib
import json
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks import graph_time, report
from vllm_invariant import cuda
from vllm_invariant.ops import recurrent_cuda

TESTS = "tests/kernels/test_recurrent_cuda.py"
KEY_HEADS, VALUE_HEADS, DIM = 16, 32, 128
SLOTS = 1024  # 2 GiB of states: what one launch touched is out of the cache before it comes again
DECODES = dict.fromkeys((1, 8, 32, 64, 128, 256), 1.0)
# (sequences, tokens of each) -> ratio to reach
PREFILLS = {(64, 4): 0.30, (1, 64): 0.60, (32, 256): 1.2, (8, 2048): 1.3, (1, 8192): 2.0}
REPLAYS = 9
HEAD_BYTES = DIM * DIM * 4


@dataclass
class Row:
    """One line of the table.  Times in microseconds, each a replay's mean over its launches."""

    work: str
    ours: list[float]
    stock: list[float]
    reach: float
    bytes_moved: int
    operations: int
    shapes: dict[str, float]
    alone: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return statistics.median(self.ours) / statistics.median(self.stock)


@dataclass
class Layer:
    """Random inputs after the convolution, and a pool of states."""

    tokens: int

    def __post_init__(self) -> None:
        draw = torch.Generator("cuda").manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw, device="cuda")

        self.mixed_qkv = normal(self.tokens, (2 * KEY_HEADS + VALUE_HEADS) * DIM).bfloat16()
        self.a = normal(self.tokens, VALUE_HEADS).bfloat16()
        self.b = normal(self.tokens, VALUE_HEADS).bfloat16()
        self.A_log = -torch.linspace(1.0, 8.0, VALUE_HEADS, device="cuda")
        self.dt_bias = 0.5 * normal(VALUE_HEADS)
        self.state = 0.1 * normal(SLOTS + 1, VALUE_HEADS, DIM, DIM)
        self.out = torch.empty(self.tokens, VALUE_HEADS, DIM, dtype=torch.bfloat16, device="cuda")

    def ours(self, tokens: int, slots: torch.Tensor, longest: int, **options) -> None:
        rows = [x[:tokens] for x in (self.mixed_qkv, self.a, self.b)]
        recurrent_cuda.recurrent_step(
            *rows, self.A_log, self.dt_bias, self.state, self.out[:tokens],
            slots=slots, max_query_len=longest, **options,
        )  # fmt: skip


Launch = Callable[[int], object]  # gets the number of the launch in its graph


def timed(launch: Launch, launches: int) -> list[float]:
    """Microseconds a launch, one figure a replay."""
    return graph_time.replayed(launch, launches, REPLAYS)


def each_shape(launch: Callable[[int, int], object], launches: int) -> dict[str, float]:
    """Median microseconds of every launch shape; ``launch`` gets the number in its graph and the shape."""
    return {
        name: statistics.median(graph_time.replayed(lambda i, shape=shape: launch(i, shape), launches, 3))
        for shape, name in enumerate(recurrent_cuda.shapes())
    }


def slot_sets(batch: int) -> list[torch.Tensor]:
    """Several disjoint draws of ``batch`` slots."""
    shuffled = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(batch)) + 1
    return list(shuffled.to(torch.int32).cuda().split(batch))[: max(1, min(64, SLOTS // batch))]


def decode(layer: Layer, batch: int) -> Row:
    """One token for each of ``batch`` sequences."""
    module = importlib.import_module(f"{cuda.FLA}.fused_recurrent")
    packed = module.fused_recurrent_gated_delta_rule_packed_decode
    sets = slot_sets(batch)
    out = layer.out[:batch].unsqueeze(1)
    inputs = [x[:batch] for x in (layer.mixed_qkv, layer.a, layer.b)]

    def stock(i: int) -> None:
        packed(*inputs, layer.A_log, layer.dt_bias, DIM**-0.5, layer.state, out, sets[i % len(sets)], True)

    launches = 64 if batch <= 8 else 16

    def ours(i: int, shape: int = -1) -> None:
        layer.ours(batch, sets[i % len(sets)], 1, shape=shape)

    return Row(
        f"decode, batch {batch}",
        timed(ours, launches),
        timed(stock, launches),
        DECODES[batch],
        2 * batch * VALUE_HEADS * HEAD_BYTES,
        4 * batch * VALUE_HEADS * DIM * DIM,
        each_shape(ours, launches),
    )


def chunk_of(layer: Layer, sequences: int, length: int) -> tuple[Launch, Launch]:
    """Stock's prologue and chunk kernels, and the chunk kernels alone."""
    chunk = importlib.import_module(f"{cuda.FLA}.chunk").chunk_gated_delta_rule
    prepare = importlib.import_module(f"{cuda.FLA}.fused_gdn_prefill_post_conv").fused_post_conv_prep
    tokens, chunks = sequences * length, -(-length // 64)
    indices = [[n, c] for n in range(sequences) for c in range(chunks)]
    options = {
        "initial_state": layer.state[1 : sequences + 1],
        "output_final_state": True,
        "cu_seqlens": torch.arange(0, tokens + 1, length, dtype=torch.int32, device="cuda"),
        "chunk_indices": torch.tensor(indices, dtype=torch.int32, device="cuda"),
        "chunk_offsets": torch.arange(0, sequences * chunks + 1, chunks, dtype=torch.int32, device="cuda"),
    }

    def prologue() -> list[torch.Tensor]:
        inputs = [x[:tokens] for x in (layer.mixed_qkv, layer.a, layer.b)]
        return [x[None] for x in prepare(*inputs, layer.A_log, layer.dt_bias, KEY_HEADS, DIM, DIM)]

    prepared = prologue()
    return lambda i: chunk(*prologue(), **options), lambda i: chunk(*prepared, **options)


def prefill(layer: Layer, sequences: int, length: int) -> Row:
    """All tokens of several sequences, each from a state of its own to its last state."""
    tokens = sequences * length
    cu_seqlens = torch.arange(0, tokens + 1, length, dtype=torch.int32, device="cuda")
    sets = slot_sets(sequences)
    launches = 8 if tokens <= 1024 else 2
    stock, alone = chunk_of(layer, sequences, length)
    name = "verification" if length < 64 else "prefill"

    def ours(i: int, shape: int = -1) -> None:
        layer.ours(tokens, sets[i % len(sets)], length, cu_seqlens=cu_seqlens, shape=shape)

    return Row(
        f"{name}, {sequences} x {length}",
        timed(ours, launches),
        timed(stock, launches),
        PREFILLS[sequences, length],
        2 * sequences * VALUE_HEADS * HEAD_BYTES,
        4 * tokens * VALUE_HEADS * DIM * DIM,
        each_shape(ours, launches),
        timed(alone, launches),
    )


def verification_keeping_states(layer: Layer) -> list[float]:
    """64 sequences of 4 tokens, each token's state written to a slot of its own."""
    rows, width = 64, 4
    slots = torch.arange(1, rows * width + 1, dtype=torch.int32, device="cuda").view(rows, width)
    cu_seqlens = torch.arange(0, rows * width + 1, width, dtype=torch.int32, device="cuda")
    accepted = torch.ones(rows, dtype=torch.int32, device="cuda")
    return timed(
        lambda i: layer.ours(rows * width, slots, width, cu_seqlens=cu_seqlens, num_accepted=accepted), 8
    )


def read_write_floor(layer: Layer, batch: int) -> list[float]:
    """Every byte of ``batch`` states read and written once, by torch's elementwise kernel."""
    sets = SLOTS // batch
    return timed(lambda i: layer.state[1 + i % sets * batch :][:batch].mul_(1.0), 16)


def highest_clock() -> float:
    """Hertz of the multiprocessors at most."""
    query = ["nvidia-smi", "--query-gpu=clocks.max.sm", "--format=csv,noheader,nounits", "--id=0"]
    return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout) * 1e6


def bounds(row: Row, floor_256: float, hertz: float) -> tuple[float, float]:
    """Microseconds that memory and fp32 issue need at least."""
    memory = floor_256 * row.bytes_moved / (2 * 256 * VALUE_HEADS * HEAD_BYTES)
    lanes = torch.cuda.get_device_properties(0).multi_processor_count * 128
    return memory, row.operations / (lanes * hertz) * 1e6


def render(rows: list[Row], keeping: list[float], floor: list[float]) -> list[str]:
    """The report."""
    show = report.median_and_spread
    floor_256, hertz = statistics.median(floor), highest_clock()
    body = []
    for row in rows:
        memory, issue = bounds(row, floor_256, hertz)
        bound = max(memory, issue)
        body.append([
            row.work, show(row.ours), show(row.stock), f"{row.ratio:.2f}", f"{row.reach:.2f}",
            "yes" if row.ratio <= row.reach else "no",
            show(row.alone) if row.alone else "",
            f"{statistics.median(row.ours) / statistics.median(row.alone):.2f}" if row.alone else "",
            f"{bound:.1f} ({'memory' if memory > issue else 'fp32'})",
            f"{statistics.median(row.ours) / bound:.2f}",
        ])  # fmt: skip
    largest = next(row for row in rows if row.work == "decode, batch 256")
    header = (
        "work", "ours, us", "stock, us", "ratio", "reach", "reached", "chunk kernels alone, us",
        "ratio to those", "bound, us", "ours / bound",
    )  # fmt: skip
    names = recurrent_cuda.shapes()
    by_shape = [[row.work, *(f"{row.shapes[name]:.1f}" for name in names)] for row in rows]
    return [
        *report.heading("Recurrent arithmetic: kernel times"),
        "16 key and 32 value heads of 128, bf16 inputs, fp32 state. Median of replays (fastest to slowest).",
        "Stock is its packed Triton decode, or its prologue and chunk kernels as this package pins them.",
        "The bound is the larger of the measured time to read and write the states once, and of four fp32",
        "instructions per state element and token at the highest clock.",
        "",
        *report.table(header, body),
        f"Reading and writing 256 states once takes {show(floor)} us: decode of batch 256 takes "
        f"{statistics.median(largest.ours) / floor_256:.3f} of it (reach 1.05).",
        "",
        f"Verification, 64 x 4, with every token's state kept: {show(keeping)} us. It writes four states a",
        f"sequence where the row above writes one; moving those bytes takes {floor_256 / 4 * 2.5:.1f} us.",
        "",
        "Microseconds of every launch shape in the library, which all give the same bits:",
        "",
        *report.table(("work", *names), by_shape),
    ]


def main() -> None:
    """Test, time, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    args = parser.parse_args()
    tests = report.passed_tests(TESTS)
    cuda.pin_launches(DIM, DIM, "bfloat16", untested=False)
    layer = Layer(max(n * length for n, length in PREFILLS))
    floor = read_write_floor(layer, 256)
    rows = [decode(layer, batch) for batch in DECODES] + [prefill(layer, *shape) for shape in PREFILLS]
    keeping = verification_keeping_states(layer)
    lines = [*render(rows, keeping, floor), f"Tests of the kernel, run just before: {tests}."]
    raw = {"rows": [asdict(row) for row in rows], "keeping": keeping, "floor_256": floor}
    report.write(args.out, "recurrent-table", lines, json.loads(json.dumps(raw)))


if __name__ == "__main__":
    main()
