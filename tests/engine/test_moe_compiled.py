"""Axis mode for a mixture of experts: a compiled engine, alone, together and on hits."""

from pathlib import Path

import pytest

from tests.harness import device, moe
from tests.harness.compare import assert_same
from tests.harness.engine import asks
from tests.harness.process import Round, empty_caches, run_child
from tests.harness.prompts import prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_a_compiled_engine_agrees_with_itself(tmp_path: Path) -> None:
    """The experts stay one operator; routers and the shared expert are compiled."""
    requests = asks([prompt(n, seed=95) for n in (1, 63, 65, 129, 300)], max_tokens=6)
    rounds = [*(Round([request]) for request in requests), Round(requests), Round(requests, cold=False)]
    model = moe.make(tmp_path, "moe")
    child = run_child(model, tmp_path, rounds, empty_caches(tmp_path / "caches"), enforce_eager=False)
    assert child.facts["mode"] == device.COMPILED
    alone = [result for each in child.rounds[: len(requests)] for result in each]
    together, warm = child.rounds[len(requests) :]
    assert all(result.cached == 0 for result in together)
    assert [result.cached for result in warm] == [0, 0, 64, 128, 256]
    assert_same(alone, together, "together")
    assert_same(alone, warm, "on hits")
