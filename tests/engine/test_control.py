"""Controls: the checks of this suite can fail.  Weights make history matter, and states are used."""

import pytest
import torch

from tests.harness.compare import assert_same, differing
from tests.harness.engine import Engines, asks
from tests.harness.prompts import prompt

pytestmark = pytest.mark.engine


def test_an_early_token_still_counts_a_thousand_tokens_later(engines: Engines) -> None:
    """Changing token 3 of 1,000 changes the last position's logprobs."""
    original = prompt(1000)
    changed = [*original[:3], original[3] % 1000 + 1, *original[4:]]
    assert changed != original
    a, b = engines.solo(asks([original, changed], max_tokens=1))
    assert a.logprobs[-1] != b.logprobs[-1]


def test_noise_in_one_cached_state_changes_a_hit(engines: Engines) -> None:
    """One GDN layer's state of one cached block is disturbed; the hit that starts from it differs."""
    engine = engines.get()
    request = asks([prompt(engine.block + 1)])
    cold = engine.run(request).results
    warm = engine.run(request)
    assert warm.record.hit(warm.ids[0]) == engine.block
    assert_same(cold, warm.results, "warm")

    layer = engine.layer("0.linear_attn")
    group = next(
        i
        for i, g in enumerate(engine.runner.kv_cache_config.kv_cache_groups)
        if any(name.endswith("layers.0.linear_attn") for name in g.layer_names)
    )
    slot = warm.record.steps[0].blocks[warm.ids[0]][group][0]
    state = layer.kv_cache[1][slot]
    assert state.dtype == torch.float32
    assert state.abs().max() > 0, "this is not the block the hit starts from"
    state += 1e-3 * state.abs().mean()

    disturbed = engine.run(request)
    assert disturbed.record.hit(disturbed.ids[0]) == engine.block
    assert differing(cold, disturbed.results) == {0: differing(cold, disturbed.results)[0]}
    engine.reset()
    assert_same(cold, engine.run(request).results, "after a reset")
