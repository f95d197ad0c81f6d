"""Axis history: four-turn conversations, and prefixes of which only a part is left (F22)."""

import pytest

from tests.harness.compare import Result, assert_same
from tests.harness.engine import Ask, Engine, Engines, asks
from tests.harness.memory import NAN, Poisoner
from tests.harness.prompts import prompt

pytestmark = pytest.mark.engine

TURNS = 4


def _conversations(engines: Engines) -> list[tuple[list[Ask], list[Result]]]:
    """Two conversations: each turn's request, and what it gets alone.  Prompts hold all answers so far."""
    made = []
    for seed, start in ((240, engines.block - 40), (250, 200)):
        said, requests, answers = prompt(start, seed=seed), [], []
        for turn in range(TURNS):
            requests.append(Ask(tuple(said), max_tokens=50))
            answers += engines.solo(requests[-1:])
            said = said + list(answers[-1].tokens) + prompt(70, seed=seed + 1 + turn)
        made.append((requests, answers))
    return made


def _push_out(engine: Engine, turn: int) -> None:
    """Private prompts take blocks of the conversation, more of them each turn."""
    for i in range(turn + 1):
        engine.run(asks([prompt(2 * engine.block, seed=260 + 10 * turn + i)], max_tokens=2))


@pytest.mark.parametrize("cache", ["warm", "cold", "evicted"])
def test_a_conversation_of_four_turns(engines: Engines, cache: str) -> None:
    """Two conversations side by side; between their turns the cache is kept, emptied, or taken by others."""
    first, second = _conversations(engines)
    b = engines.block
    groups = len(engines.get().scheduler.kv_cache_config.kv_cache_groups)
    pool = {"num_gpu_blocks_override": 3 + 2 * (4 + 2 * groups)} if cache == "evicted" else {}
    engine = engines.get(max_model_len=4 * b, max_num_seqs=4, max_num_batched_tokens=512, **pool)
    hits = []
    for turn in range(TURNS):
        run = engine.run([first[0][turn], second[0][turn]])
        assert_same([first[1][turn], second[1][turn]], run.results, f"turn {turn + 1}, {cache}")
        hits.append([result.cached for result in run.results])
        if turn:
            earlier = [len(c[0][turn - 1].prompt) for c in (first, second)]
            assert all(h <= n for h, n in zip(hits[-1], earlier, strict=True)), "a decoded token was hit"
        if cache == "cold":
            engine.reset()
        elif cache == "evicted":
            _push_out(engine, turn)
    best = [[(len(c[0][t - 1].prompt) - 1) // 64 * 64 for c in (first, second)] for t in range(1, TURNS)]
    if cache == "warm":
        assert hits[1:] == best, "a turn did not hit what the turn before had prefilled"
    elif cache == "cold":
        assert not any(map(any, hits))
    else:
        assert hits[1:] != best, "void: nothing was evicted"
        assert any(map(any, hits)), "void: everything was evicted"


def _drop(engine: Engine, kind: str, beyond: int) -> int:
    """Take cached blocks of one kind that end after ``beyond`` tokens out of the prefix cache."""
    from vllm.v1.core.kv_cache_utils import get_group_id
    from vllm.v1.kv_cache_interface import MambaSpec

    pool = engine.scheduler.kv_cache_manager.block_pool
    groups = engine.scheduler.kv_cache_config.kv_cache_groups
    dropped = 0
    for block in pool.blocks:
        if block.block_hash is None or block.block_hash_num_tokens <= beyond:
            continue
        spec = groups[get_group_id(block.block_hash)].kv_cache_spec
        if isinstance(spec, MambaSpec) == (kind == "state"):
            dropped += pool._maybe_evict_cached_block(block)
    return dropped


@pytest.mark.parametrize("kind", ["state", "attention"])
def test_half_of_a_cached_prefix_is_lost(engines: Engines, kind: str) -> None:
    """F22: only states are dropped from the cache, or only keys and values; the hit gets shorter.

    Free memory holds NaN, so a request that believed it had a state where none is left would show.
    """
    b = engines.block
    requests = asks([prompt(3 * b + 70, seed=270)])
    expected = engines.solo(requests)
    # Every chunk ends a block, and every block keeps its state.
    engine = engines.get(max_num_batched_tokens=b, prefix_cache_retention_interval=b)
    hits = {}
    for left in (3 * b + 64, 3 * b, 2 * b, b, 0):
        engine.reset()
        assert engine.run(requests).results[0].cached == 0
        assert _drop(engine, kind, left) > 0 or left > 3 * b
        poisoner = Poisoner(engine, NAN)
        poisoner.sweep()
        with poisoner.watching():
            run = engine.run(requests, poisoner.sweep)
        hits[left] = run.results[0].cached
        assert_same(expected, run.results, f"{kind} beyond {left} tokens lost, {hits[left]} tokens hit")
    assert hits == {left: left for left in hits}
