"""Each planted fault is found, and the trace names where it is.

On a GPU and on a CPU the same rule guards other kernels, so some faults exist once for each.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness import device
from tests.harness.faults import planted
from tests.harness.prompts import prompt
from vllm_invariant.trace.plan import Ask, second_way
from vllm_invariant.trace.run import Trace, trace

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
        tensor: start of the tensor's name.
        ask: the traced request.
        way: arguments of `second_way`.
        on: the only device it exists on, if there is one.

    """

    fault: str | None
    where: tuple[tuple[str, str], ...]
    tensor: str
    ask: Ask
    way: dict[str, Any]
    on: str | None = None


def turns() -> tuple[Ask, Ask]:
    """Two turns whose shared tokens fill more than a block; the first one's answer is not known yet."""
    return Ask(tuple(prompt(300, seed=93)), 60), Ask(tuple(prompt(300, seed=93)), 6)


FIRST_GDN = (("layers.0", "linear_attn.recurrence"),)
COMPANY_WAY = {"company": COMPANY}
CASES = [
    Case("packed decode off", FIRST_GDN, "output", ASK, COMPANY_WAY, on="cuda"),
    Case("norm pin off", (("layers.0", "linear_attn.norm"),), "output", ASK, COMPANY_WAY, on="cuda"),
    Case("chunk kernel in mixed steps", FIRST_GDN, "output", ASK, COMPANY_WAY, on="cpu"),
    Case("norm by rows", (("layers.0", "linear_attn.norm"),), "output", ASK, COMPANY_WAY, on="cpu"),
    Case("grid 32", FIRST_GDN, "output", Ask(tuple(prompt(200, seed=94)), 2), {"cut": 104}),
    Case(
        "state slot perturbed",
        (("layers.2", "linear_attn"),),
        "recurrent state",
        ASK,
        {"hit": True},
    ),
]


def run(folder: Path, checkpoint: Path, case: Case, patch: pytest.MonkeyPatch) -> Trace:
    """The case's trace."""
    environment = {} if case.fault is None else planted(folder / "fault", case.fault)
    for entry in filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)):
        patch.syspath_prepend(entry)  # a spawned process takes over this one's path
    for name, value in {**device.ENVIRONMENT, **environment}.items():
        patch.setenv(name, value)
    if case.fault is None:
        patch.setenv("VLLM_BATCH_INVARIANT", "0")
    assert os.environ["VLLM_BATCH_INVARIANT"] == str(int(case.fault is not None))
    return trace(str(checkpoint), OPTIONS, case.ask, second_way(case.ask, **case.way), folder)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fault)
def test_the_trace_names_it(case: Case, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The right layer, operation and tensor, and the values that are apart."""
    if case.on not in (None, device.NAME):
        pytest.skip(f"a fault of {case.on} kernels")
    found = run(tmp_path, checkpoint, case, monkeypatch)
    difference = found.verdict.difference
    assert difference is not None
    assert any(
        difference.layer.endswith(layer) and difference.operation == operation
        for layer, operation in case.where
    ), (difference.layer, difference.operation, difference.first)
    assert difference.first.tensor.startswith(case.tensor)
    (a, _), (b, _) = found.values
    assert (a != b).any()
