"""Each rule turned off alone: the test that guards it then sees other bits.

Every test here first sees its guard hold in the very engine in which it turns the rule off.
"""

from dataclasses import replace

import pytest
import torch

from tests.harness import device
from tests.harness.compare import assert_same, differing
from tests.harness.engine import Ask, Engine, Engines, asks
from tests.harness.prompts import prompt, prompts

pytestmark = pytest.mark.engine

CUT = asks([prompt(n, seed=8) for n in (257, 513, 1000)], max_tokens=6)


def _set_arithmetic(patch: pytest.MonkeyPatch, engine: Engine, **changes: object) -> None:
    patch.setattr(engine.scheduler, "arithmetic", replace(engine.scheduler.arithmetic, **changes))


def test_chunk_ends_off_the_grid(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Axis cut, with a 16-token grid in place of 64."""
    expected = engines.solo(CUT)
    engine = engines.get(enable_prefix_caching=False, max_num_batched_tokens=100, max_num_seqs=4)
    assert_same(expected, engine.alone(CUT))
    _set_arithmetic(monkeypatch, engine, grid=16)
    results = []
    for request in CUT:
        run = engine.run([request])
        assert run.record.chunk_ends(run.ids[0])[0] == 96
        results += run.results
    assert differing(expected, results)


def test_a_one_token_remainder_taken_for_a_decode(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Axis cut (F10), with stock's rows: what has one token and a state is a decode."""
    from vllm_invariant import backend

    requests = asks(prompts((65, 129, 257), seed=80))
    expected = engines.solo(requests)
    engine = engines.get(enable_prefix_caching=False, max_num_batched_tokens=64, max_num_seqs=1)
    assert_same(expected, engine.alone(requests))
    monkeypatch.setattr(backend, "prefill_remainders", lambda prefilling, _: torch.zeros_like(prefilling))
    run = engine.run(requests)
    assert run.record.one_token_remainders() == 3
    assert differing(expected, run.results)


@pytest.mark.parametrize("rule", list(device.BATCH_RULES))
def test_rules_of_this_device(engines: Engines, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Axis batch, with one of the device's own rules off."""
    requests = asks(prompts((63, 130, 40, 511, 3, 300), seed=81))
    expected = engines.solo(requests)
    engine = engines.get(enable_prefix_caching=False)
    assert_same(expected, engine.run(requests).results)
    device.BATCH_RULES[rule](monkeypatch)
    run = engine.run(requests)
    assert run.record.shared_prefills() > 1
    assert differing(expected, run.results)


@pytest.mark.skipif(device.NAME != "cpu", reason="the GPU's cache layout does not overlay pages")
def test_narrow_block_copies(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Axis hit inside a block, with stock's copy of the state's share of the page only."""
    from vllm_invariant import block_copy

    request = asks([prompt(engines.block - 1, seed=82)])
    expected = engines.solo(request)
    engine = engines.get()
    engine.run(request)
    assert_same(expected, engine.run(request).results, "hit")
    monkeypatch.setattr(block_copy, "widest_first", list)
    run = engine.run(request)
    assert run.results[0].cached > 0
    assert any(step.copies for step in run.record.steps), "nothing was copied"
    assert differing(expected, run.results)


def test_hits_off_the_grid(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Axis hit (F06), with states kept, and hit, every 16 tokens."""
    from vllm_invariant import preflight

    b = engines.block
    shared = prompt(2 * b + 48, seed=83)
    first = asks([shared + prompt(5, seed=84)])
    second = asks([shared + prompt(100, seed=85)])
    expected = engines.solo(second)
    engine = engines.get()
    engine.run(first)
    assert_same(expected, engine.run(second).results, "hits on the grid")
    monkeypatch.setattr(preflight, "RULES", ())
    monkeypatch.setattr(preflight, "check_blocks", lambda *_, **__: None)
    with engines.fresh(prefix_match_unit=16) as engine:
        _set_arithmetic(monkeypatch, engine, grid=16)
        engine.run(first)
        run = engine.run(second)
        assert run.results[0].cached == 2 * b + 48
        assert differing(expected, run.results)


def test_a_bfloat16_state(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Axis cut, with states kept in bfloat16: rounded at every chunk end, where the device does that."""
    from vllm_invariant import layer, preflight

    monkeypatch.setattr(preflight, "RULES", ())
    monkeypatch.setattr(
        layer.InvariantQwenGatedDeltaNetAttention, "__init__", layer.QwenGatedDeltaNetAttention.__init__
    )
    options = {"mamba_ssm_cache_dtype": "bfloat16", "enable_prefix_caching": False, "max_num_seqs": 1}
    with engines.fresh(**options, max_num_batched_tokens=4096) as engine:
        assert engine.layer("0.linear_attn").kv_cache[1].dtype == torch.bfloat16
        whole = engine.alone(CUT)
        assert_same(whole, engine.alone(CUT), "the same cuts twice")
    with engines.fresh(**options, max_num_batched_tokens=128) as engine:
        assert bool(differing(whole, engine.alone(CUT))) == device.ROUNDS_A_NARROW_STATE_AT_CUTS
    assert differing(engines.solo(CUT), whole), "the state was not narrow"


@pytest.mark.parametrize("dense", [False, True], ids=["default", "every-block"])
def test_decoded_tokens_published(engines: Engines, dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation, with blocks that decode filled published like any other.

    Stock keeps states only at the ends of prompts unless told to keep one at every block.  Then turn 2
    goes on from a decoded state; by default its repetition finds decoded keys and values.
    """
    b = engines.block
    first = asks([prompt(b - 40, seed=57)], max_tokens=b // 2)
    answer = engines.solo(first)[0]
    second = asks([list(first[0].prompt + answer.tokens) + prompt(30, seed=58)])
    expected = engines.solo(second)
    engine = engines.get(prefix_cache_retention_interval=b if dense else 0)
    engine.run(first)
    assert_same(expected, engine.run(second).results, "turn 2")
    assert_same(expected, engine.run(second).results, "turn 2 once more")
    engine.reset()
    coordinator = engine.scheduler.kv_cache_manager.coordinator
    monkeypatch.setattr(coordinator, "cache_blocks", engine.scheduler._stock_publish)
    engine.run(first)
    turns = [engine.run(second).results[0] for _ in range(2)]
    assert (turns[0].cached > b - 40) == dense
    assert turns[1].cached > b
    assert differing(expected * 2, turns).keys() >= ({0, 1} if dense else {1})


def test_generated_tokens_rebuilt_by_prefill(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preemption, with the generated tokens given to the chunk path like a prompt."""
    request = [Ask(tuple(prompt(129, seed=50)), max_tokens=40)]
    expected = engines.solo(request)
    engine = engines.get(enable_prefix_caching=False, max_num_seqs=8, max_num_batched_tokens=512)

    def preempt(step: int) -> None:
        if step == 20:
            assert engine.llm.reset_prefix_cache(reset_running_requests=True)

    run = engine.run(request, preempt)
    assert run.record.preemptions[run.ids[0]] == 1
    assert_same(expected, run.results)
    _set_arithmetic(monkeypatch, engine, decode_equals_prefill=True)
    run = engine.run(request, preempt)
    assert run.record.preemptions[run.ids[0]] == 1
    assert differing(expected, run.results)
