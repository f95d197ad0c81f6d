"""A cold prompt saves its reusable state inside its one step.  The CPU's chunk kernel cannot."""

import pytest

from tests.gpu import GPU
from tests.harness.compare import assert_same
from tests.harness.engine import Ask, Engines, asks
from tests.harness.prompts import prompt

pytestmark = [pytest.mark.engine, *GPU]


def test_a_cold_prompt_saves_its_tail_without_a_stop(engines: Engines) -> None:
    """Alone, and in steps with cached rows; with hits afterwards."""
    b = engines.block
    requests = asks([prompt(n, seed=80 + n) for n in (2 * b + 63, 2 * b + 100, 3 * b + 1, 3 * b - 1)])
    fillers = asks([prompt(n, seed=90) for n in (5, 70)], max_tokens=30)
    expected, beside = engines.solo(requests), engines.solo(fillers)
    engine = engines.get(max_num_batched_tokens=4096)
    for request, want in zip(requests, expected, strict=True):
        length = len(request.prompt)
        cold = engine.run([request])
        assert cold.record.chunk_ends(cold.ids[0]) == [length]
        warm = engine.run([request])
        assert warm.results[0].cached == (length - 1) // 64 * 64
        assert_same([want, want], cold.results + warm.results, f"{length} tokens, cold and warm")
    engine.reset()
    joining = [Ask(r.prompt, r.max_tokens, at=4 + i) for i, r in enumerate(requests)]
    cold = engine.run(fillers + joining)
    assert cold.record.mixed_steps(cold.ids[0]) > 0
    warm = engine.run(requests)
    assert [r.cached for r in warm.results] == [(len(r.prompt) - 1) // 64 * 64 for r in requests]
    assert_same(beside + expected + expected, cold.results + warm.results, "saved in mixed steps")
