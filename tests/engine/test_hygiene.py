"""Memory left by earlier tenants (F29, F30, F31): nobody reads it, and nobody writes the filler block.

Cache memory is poisoned before anything runs, and each block again once it is nobody's.  The bits
asked for are those of an engine that ran each request alone, and was never poisoned.
"""

from dataclasses import replace

import pytest
import torch

from tests.harness.compare import assert_same
from tests.harness.engine import Ask, Engine, Engines, Run, asks
from tests.harness.memory import LARGE, NAN, Memory, Poisoner, apart
from tests.harness.prompts import prompt
from tests.harness.record import total_preemptions

pytestmark = pytest.mark.engine

BYTES = pytest.mark.parametrize("byte", [NAN, LARGE], ids=["nan", "large"])


def _small_pool(engines: Engines) -> Engine:
    """Six places, and blocks for about four of the requests below."""
    b = engines.block
    groups = len(engines.get().scheduler.kv_cache_config.kv_cache_groups)
    blocks = 1 + 6 * (groups + 1) + 5
    return engines.get(max_model_len=4 * b, num_gpu_blocks_override=blocks, max_num_seqs=6)


def _churn(b: int) -> list[Ask]:
    """Requests that outgrow the pool, prompts of few and of one token, and repetitions that hit."""
    large = asks([prompt(2 * b - 20, seed=51 + i) for i in range(5)], max_tokens=30)
    small = asks([prompt(n, seed=200) for n in (1, 65, 130, b + 1)], max_tokens=10, at=20)
    shared = large[0].prompt[: b + 64]
    late = [Ask(shared + tuple(prompt(30 + i, seed=201)), 12, at=60 + 9 * i) for i in range(3)]
    return large + small + late + [replace(large[4], at=100)]


def _assert_busy(run: Run) -> None:
    assert total_preemptions(run.record, run.ids) > 0, "void: nobody was preempted"
    hits = [tokens for step in run.record.steps for tokens in step.hits.values()]
    assert any(hits), "void: nobody hit the cache"
    assert run.record.mixed_steps() > 0, "void: no step held prefill and decode"


@BYTES
def test_a_poisoned_cache(engines: Engines, byte: int) -> None:
    """F30: all cache memory holds NaN, or large numbers, before the first request."""
    requests = _churn(engines.block)
    expected = engines.solo(requests)
    engine = _small_pool(engines)
    memory = Memory(engine)
    assert memory.fill(byte) > 1 << 20
    assert all(memory.holds(block, byte) for block in (0, 1, engine.scheduler.capacity))
    run = engine.run(requests)
    _assert_busy(run)
    assert_same(expected, run.results)


@BYTES
def test_freed_blocks_are_poisoned(engines: Engines, byte: int) -> None:
    """F31: what an owner frees is overwritten before the next step, or before its next owner's."""
    requests = _churn(engines.block)
    expected = engines.solo(requests)
    engine = _small_pool(engines)
    poisoner = Poisoner(engine, byte)
    with poisoner.watching():
        run = engine.run(requests, poisoner.sweep)
    _assert_busy(run)
    capacity = engine.scheduler.capacity
    assert poisoner.swept > capacity, "void: blocks were poisoned at the start only"
    assert poisoner.reused > capacity, "void: poisoned blocks were hardly used again"
    assert poisoner.evicted > 0, "void: nothing left the prefix cache for a new owner"
    assert_same(expected, run.results)


@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no-cache"])
def test_the_filler_block_is_never_written(engines: Engines, caching: bool) -> None:
    """F29: block 0 stands for skipped blocks and for padding; whatever it holds stays there."""
    requests = _churn(engines.block)
    expected = engines.solo(requests)
    engine = _small_pool(engines) if caching else engines.get(enable_prefix_caching=False)
    memory = Memory(engine)
    memory.poison([0], NAN)
    before, others = memory.fingerprint(0), [memory.fingerprint(b) for b in range(1, 9)]
    run = engine.run(requests)
    assert all(memory.fingerprint(b) != other for b, other in enumerate(others, 1)), "void: unused blocks"
    assert memory.fingerprint(0) == before, "the filler block was written"
    assert_same(expected, run.results)


def test_a_written_filler_block_is_seen(engines: Engines) -> None:
    """The fingerprint above sees one changed element of one layer."""
    memory = Memory(engines.get())
    for view in memory.views:
        before = memory.fingerprint(0)
        element = view[0].reshape(-1)[:1]
        view[0].select(0, 0).fill_(1.0 if element.item() != 1.0 else 2.0)
        assert memory.fingerprint(0) != before


def _read_slots_before_they_are_written(patch: pytest.MonkeyPatch) -> None:
    """Every prefill goes on from what its state slot holds, a prompt's first chunk included."""
    from vllm_invariant.backend import QwenGDNAttentionMetadataBuilder

    build = QwenGDNAttentionMetadataBuilder.build

    def planted(*args: object, **kwargs: object) -> object:
        metadata = build(*args, **kwargs)
        for name in ("has_initial_state", "prefill_has_initial_state"):
            flags = getattr(metadata, name, None)
            if flags is not None:
                setattr(metadata, name, torch.ones_like(flags))
        return metadata

    patch.setattr(QwenGDNAttentionMetadataBuilder, "build", planted)


@pytest.mark.parametrize("byte", [LARGE, 0], ids=["large", "zeros"])
def test_a_read_of_a_stale_slot_is_seen(engines: Engines, byte: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a planted read of slots nobody wrote; memory full of zeros, as at start, would hide it."""
    requests = asks([prompt(n, seed=202) for n in (70, 300)])
    expected = engines.solo(requests)
    engine = engines.get(enable_prefix_caching=False)
    memory = Memory(engine)
    memory.fill(byte)
    assert_same(expected, engine.run(requests).results, "nothing planted")
    memory.fill(byte)
    _read_slots_before_they_are_written(monkeypatch)
    assert bool(apart(engine, requests, expected)) == (byte != 0)
