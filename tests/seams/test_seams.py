"""The probes fit the installed vLLM, and say what is wrong where they do not."""

import importlib.util

import pytest

from vllm_invariant import seams
from vllm_invariant.seams import SEAMS, Seam

installed = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

SPLIT = next(s for s in SEAMS if s.symbol == "Scheduler._mamba_block_aligned_split")


@installed
@pytest.mark.parametrize("seam", SEAMS, ids=lambda s: f"{s.name}-{s.symbol}")
def test_fits_the_installed_vllm(seam):
    assert seams.probe(seam) is None


@installed
def test_nothing_has_moved():
    assert seams.moved() == []


@installed
@pytest.mark.parametrize(
    ("seam", "said"),
    [
        (
            Seam("S0", "vllm.v1.core.sched.planner", "Scheduler"),
            "S0: module vllm.v1.core.sched.planner is gone",
        ),
        (Seam("S0", "vanished.package", "anything"), "S0: module vanished.package is gone"),
        (Seam("S0", SPLIT.module, "Planner"), f"S0: {SPLIT.module}.Planner is gone"),
        (Seam("S0", SPLIT.module, "Scheduler._split"), f"S0: {SPLIT.module}.Scheduler._split is gone"),
        (Seam("S0", SPLIT.module, "_mamba_block_aligned_split"), "is gone"),
    ],
)
def test_says_what_is_gone(seam, said):
    assert said in (seams.probe(seam) or "")


@installed
@pytest.mark.parametrize(
    "args",
    [
        ("self", "request", "budget"),
        ("request", "num_new_tokens"),
        (*(SPLIT.args or ()), "one_more"),
    ],
)
def test_says_which_parameters_changed(args):
    problem = seams.probe(Seam("S0", SPLIT.module, SPLIT.symbol, args)) or ""
    assert problem.startswith(f"S0: {SPLIT.module}.{SPLIT.symbol} now takes")
    assert "'num_new_tokens'" in problem and repr(args) in problem


@installed
def test_a_prefix_of_the_parameters_is_enough():
    """Upstream may add parameters at the end."""
    assert SPLIT.args is not None
    assert seams.probe(Seam("S0", SPLIT.module, SPLIT.symbol, SPLIT.args[:2])) is None


@installed
def test_every_problem_is_reported(monkeypatch):
    gone = tuple(Seam(f"S{n}", "vanished.package", "anything") for n in (1, 2))
    monkeypatch.setattr(seams, "SEAMS", (*gone, SPLIT))
    assert [problem[:2] for problem in seams.moved()] == ["S1", "S2"]


def test_replace_wraps_once():
    class Owner:
        def ask(self) -> list[str]:
            return ["stock"]

    def wrap(stock):
        return lambda self: [*stock(self), "ours"]

    seams.replace(Owner, "ask", wrap)
    first = Owner.ask
    seams.replace(Owner, "ask", wrap)
    assert Owner.ask is first and Owner().ask() == ["stock", "ours"]
