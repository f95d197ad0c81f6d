"""Each planted fault is found, and the trace names where it is.

On a GPU and on a CPU the same rule guards other kernels, so some faults exist once for each.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import CPU, GPU
from tests.harness import device
from tests.harness.faults import planted
from tests.harness.prompts import prompt
from vllm_invariant.demo.checkpoint import Shape, make_checkpoint
from vllm_invariant.trace.plan import FIRST, Ask, path_not_taken, second_way
from vllm_invariant.trace.record import KEYS_AND_VALUES
from vllm_invariant.trace.run import Trace, look, trace
from vllm_invariant.trace.worker import Worker

pytestmark = pytest.mark.engine

OPTIONS = ["--max-model-len", "2048", "--max-num-seqs", "16", "--max-num-batched-tokens", "512"]
ASK, FEW = Ask(tuple(prompt(130, seed=90)), 6), Ask(tuple(prompt(5, seed=98)), 30)
# One that decodes, and one whose prefill joins a step in which the traced request decodes.
COMPANY = (Ask(tuple(prompt(63, seed=91)), 8), Ask(tuple(prompt(150, seed=92)), 2, at=3))


@dataclass(frozen=True)
class Case:
    """One fault, and how it is found.

    Attributes:
        fault: its name, or None for stock vLLM without the flag.
        where: (layer, operation) pairs the trace may name.
        on: the only device it exists on, if there is one.
        tensor: what the tensor's name starts with.
        ask: the traced request.
        way: arguments of `second_way`.
        axis: on which the audit sees it.
        wide: it needs as many heads as a released model has, and more layers.
        tries: other prompts to try, since the fault moves few bits.
        server: options of the audited server, which the audit's own chances need.
        tokens: of each audited answer.

    """

    fault: str | None
    where: tuple[tuple[str, str], ...]
    on: str | None = None
    tensor: tuple[str, ...] = ("output",)
    ask: Ask = ASK
    way: Mapping[str, Any] = field(default_factory=lambda: {"company": COMPANY})
    axis: str = "company"
    wide: bool = False
    tries: int = 1
    server: tuple[str, ...] = ()
    tokens: int = 16

    @property
    def marked(self) -> Any:
        """As a parameter of a test."""
        marks = {None: (), "cpu": CPU, "cuda": GPU}[self.on]
        return pytest.param(self, id=self.fault or "stock", marks=marks)


RECURRENCE = (("layers.0", "linear_attn.recurrence"),)
NORM = (("layers.0", "linear_attn.norm"),)
ANY_NORM = tuple((f"layers.{i}", "linear_attn.norm") for i in range(8))
BATCH = {"company": [Ask(tuple(prompt(3 + 2 * i, seed=300 + i)), 40) for i in range(12)]}
STATE = (("layers.2", "linear_attn"),)
# Stock's CPU linears and attention follow the rows of the step.  On a GPU its matrix products may, and its
# recurrence and norm do in a mixed step: some part of the first layer.
BY_SHAPE = ("in_proj_qkvz", "in_proj_ba", "out_proj")
GDN = tuple(f"linear_attn.{name}" for name in BY_SHAPE)
REST = ("self_attn.qkv_proj", "self_attn.attn", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
BY_ROWS = tuple((f"layers.{i}", operation) for i in range(8) for operation in (*GDN, *REST))
# The step's output may round to the same bits while the state already does not.
OUTPUT_OR_STATE = ("output", "recurrent state after")
FIRST_GDN = tuple(("layers.0", f"linear_attn.{name}") for name in (*BY_SHAPE, "recurrence", "norm"))
CASES = [
    Case("packed decode off", RECURRENCE, "cuda", OUTPUT_OR_STATE),
    # One and two rows a program add up in another order; a rounded output shows it once in 100,000 values.
    Case("norm pin off", ANY_NORM, "cuda", ask=FEW, way=BATCH, axis="batch", wide=True, tries=20, tokens=96),
    Case("chunk kernel in mixed steps", RECURRENCE, "cpu"),
    Case("norm by rows", NORM, "cpu"),
    Case(
        "grid 32",
        RECURRENCE,
        ask=Ask(tuple(prompt(200, seed=94)), 2),
        way={"cut": 104},
        axis="cut",
        server=("--max-num-batched-tokens", "104"),  # a step's share is never whole blocks
    ),
    Case("state slot perturbed", STATE, tensor=("recurrent state",), way={"hit": True}, axis="hit"),
    Case(None, BY_ROWS if device.NAME == "cpu" else FIRST_GDN, tensor=OUTPUT_OR_STATE, axis="batch"),
]
# Traced as a conversation, whose second turn depends on the first one's answer.
DECODED = Case(
    "decode blocks published",
    (("layers.3", "self_attn.attn"),),
    tensor=(KEYS_AND_VALUES, "output"),  # of the block itself, or of the first row that read it
    axis="history",
)


def environment(case: Case, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Plant the case's fault in every process that is started from now on."""
    found = {} if case.fault is None else planted(folder / "fault", case.fault)
    for entry in filter(None, found.get("PYTHONPATH", "").split(os.pathsep)):
        patch.syspath_prepend(entry)  # a spawned process takes over this one's path
    for name, value in {**device.ENVIRONMENT, **found}.items():
        patch.setenv(name, value)
    if case.fault is None:
        patch.setenv("VLLM_BATCH_INVARIANT", "0")


def engine(case: Case, checkpoint: Path) -> tuple[str, list[str]]:
    """Checkpoint and options."""
    memory = 1 << 30 if case.wide else 256 << 20
    if case.wide:
        wide = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "num_hidden_layers": 8}
        checkpoint = make_checkpoint(checkpoint.parent / "wide", Shape(config=wide))
    options = [*OPTIONS, "--kv-cache-memory-bytes", str(memory)]
    if device.NAME == "cuda":
        options += ["--gpu-memory-utilization", str(device.OPTIONS["gpu_memory_utilization"])]
        if case.fault is None:
            options += ["--additional-config", json.dumps(device.STOCK_OPTIONS["additional_config"])]
    return str(checkpoint), options


def check(case: Case, found: Trace) -> None:
    """The trace names the place, and has the values that are apart."""
    difference = found.verdict.difference
    assert difference is not None, "no difference"
    named = (difference.layer.removeprefix("model."), difference.operation)
    assert named in case.where and difference.first.tensor.startswith(case.tensor), difference.first
    (a, _), (b, _) = found.values
    assert (a != b).any()
    assert path_not_taken(found.way, found.first, found.second) is None


@pytest.mark.parametrize("case", [case.marked for case in CASES])
def test_the_trace_names_it(
    case: Case, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The right layer, operation and tensor."""
    environment(case, tmp_path, monkeypatch)
    model, options = engine(case, checkpoint)
    if "cut" in case.way:
        check(case, trace(model, options, case.ask, second_way(case.ask, **case.way), tmp_path))
        return
    with Worker(tmp_path / "log", model, options, {}) as worker:
        for i in range(case.tries):
            ask = replace(case.ask, prompt=(*case.ask.prompt[:-1], case.ask.prompt[-1] + i))
            found = look(worker, worker, ask, second_way(ask, **case.way))
            if not found.verdict.same:
                break
    check(case, found)


def test_the_trace_names_decoded_keys_and_values(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time a conversation's second turn is sent, its hit holds what decode made."""
    case = DECODED
    environment(case, tmp_path, monkeypatch)
    first = Ask(tuple(prompt(280, seed=57)), 160)
    model, options = engine(case, checkpoint)
    with Worker(tmp_path / "log", model, options, {}) as worker:
        answer = worker.run(first, FIRST).tokens
        second = Ask((*first.prompt, *answer, *prompt(30, seed=58)), 4)
        found = look(worker, worker, second, second_way(second, after=[first], hit=True))
        assert found.second.cached > 320
        check(case, found)


@pytest.mark.parametrize("case", [case.marked for case in (*CASES, DECODED)])
def test_the_audit_finds_it(
    case: Case, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server with the fault, audited from outside on one axis."""
    environment(case, tmp_path, monkeypatch)
    report = tmp_path / "report.json"
    model, options = engine(case, checkpoint)
    words = ["audit", model, "--axis", case.axis, "--tokens", str(case.tokens), "--json", str(report)]
    words += [*options, *case.server, "--enforce-eager"]
    ended = subprocess.run(
        [sys.executable, "-c", "from vllm_invariant.cli import app; app()", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 1, ended.stdout[-4000:]
    rows = [row for row in json.loads(report.read_text())["rows"] if row["axis"].startswith(case.axis)]
    assert any(row["state"] == "different" for row in rows), ended.stdout[-4000:]
