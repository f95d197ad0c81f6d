"""Each planted fault is found, and the trace names where it is.

On a GPU and on a CPU the same rule guards other kernels, so some faults exist once for each.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import CPU, GPU
from tests.harness import device
from tests.harness.faults import planted
from tests.harness.prompts import prompt
from vllm_invariant.trace.plan import FIRST, Ask, path_not_taken, second_way
from vllm_invariant.trace.record import KEYS_AND_VALUES
from vllm_invariant.trace.run import Trace, look, trace
from vllm_invariant.trace.worker import Worker

pytestmark = pytest.mark.engine

OPTIONS = ["--max-model-len", "2048", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(256 << 20)]
ASK = Ask(tuple(prompt(130, seed=90)), 6)
# One that decodes, and one whose prefill joins a step in which the traced request decodes.
COMPANY = (Ask(tuple(prompt(63, seed=91)), 8), Ask(tuple(prompt(150, seed=92)), 2, at=3))


@dataclass(frozen=True)
class Case:
    """One fault, and how it is traced.

    Attributes:
        fault: its name, or None for stock vLLM without the flag.
        where: ends of (layer, operation) the trace may name.
        tensor: start of the tensor's name, or several.
        ask: the traced request.
        way: arguments of `second_way`.
        on: the only device it exists on, if there is one.

    """

    fault: str | None
    where: tuple[tuple[str, str], ...]
    tensor: str | tuple[str, ...]
    ask: Ask
    way: dict[str, Any]
    on: str | None = None


LINEARS = (
    "linear_attn.in_proj_qkvz linear_attn.in_proj_ba linear_attn.out_proj self_attn.qkv_proj self_attn.o_proj"
)
CPU_OPERATIONS = (*LINEARS.split(), "self_attn.attn", "mlp.gate_up_proj", "mlp.down_proj")
FIRST_GDN = (("layers.0", "linear_attn.recurrence"),)
COMPANY_WAY = {"company": COMPANY}
# Stock's CPU linears and attention follow the rows of the step; its GPU kernels differ in a mixed step.
STOCK = {
    "cpu": tuple((f"layers.{i}", operation) for i in range(8) for operation in CPU_OPERATIONS),
    "cuda": FIRST_GDN,
}
CASES = [
    Case("packed decode off", FIRST_GDN, ("output", "recurrent state after"), ASK, COMPANY_WAY, on="cuda"),
    Case("norm pin off", (("layers.0", "linear_attn.norm"),), "output", ASK, COMPANY_WAY, on="cuda"),
    Case("chunk kernel in mixed steps", FIRST_GDN, "output", ASK, COMPANY_WAY, on="cpu"),
    Case("norm by rows", (("layers.0", "linear_attn.norm"),), "output", ASK, COMPANY_WAY, on="cpu"),
    Case("grid 32", FIRST_GDN, "output", Ask(tuple(prompt(200, seed=94)), 2), {"cut": 104}),
    Case("state slot perturbed", (("layers.2", "linear_attn"),), "recurrent state", ASK, {"hit": True}),
    Case(None, STOCK[device.NAME], "output", ASK, COMPANY_WAY),
]
MARKS: dict[str | None, Any] = {None: (), "cpu": CPU, "cuda": GPU}
DECODED = Case("decode blocks published", (("layers.3", "self_attn.attn"),), KEYS_AND_VALUES, ASK, {})


def environment(case: Case, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Plant the case's fault in every process that is started from now on."""
    found = {} if case.fault is None else planted(folder / "fault", case.fault)
    for entry in filter(None, found.get("PYTHONPATH", "").split(os.pathsep)):
        patch.syspath_prepend(entry)  # a spawned process takes over this one's path
    for name, value in {**device.ENVIRONMENT, **found}.items():
        patch.setenv(name, value)
    if case.fault is None:
        patch.setenv("VLLM_BATCH_INVARIANT", "0")


def check(case: Case, found: Trace) -> None:
    """The trace names the place, and has the values that are apart."""
    difference = found.verdict.difference
    assert difference is not None, "no difference"
    named = (difference.layer.removeprefix("model."), difference.operation)
    assert named in case.where and difference.first.tensor.startswith(case.tensor), difference.first
    (a, _), (b, _) = found.values
    assert (a != b).any()
    assert path_not_taken(found.way, found.first, found.second) is None


@pytest.mark.parametrize("case", [pytest.param(c, id=c.fault or "stock", marks=MARKS[c.on]) for c in CASES])
def test_the_trace_names_it(
    case: Case, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The right layer, operation and tensor."""
    environment(case, tmp_path, monkeypatch)
    check(case, trace(str(checkpoint), OPTIONS, case.ask, second_way(case.ask, **case.way), tmp_path))


def test_the_trace_names_decoded_keys_and_values(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time a conversation's second turn is sent, its hit holds what decode made."""
    case = DECODED
    environment(case, tmp_path, monkeypatch)
    first = Ask(tuple(prompt(280, seed=57)), 160)
    with Worker(tmp_path / "log", str(checkpoint), OPTIONS, {}) as engine:
        answer = engine.run(first, FIRST).tokens
        second = Ask((*first.prompt, *answer, *prompt(30, seed=58)), 4)
        found = look(engine, engine, second, second_way(second, after=[first], hit=True))
        assert found.second.cached > 320
        check(case, found)
