"""The soak's traffic is reproducible and fits its engine; its judge sees what it must see."""

import struct
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import soak
from tests.harness.compare import Result


def sent(seed: int, count: int = 500) -> list[Any]:
    traffic = soak.Traffic(seed)
    return [traffic.next() for _ in range(count)]


def test_a_seed_gives_the_same_traffic():
    assert sent(0) == sent(0) != sent(1)


def test_the_canary_comes_every_so_often_and_never_changes():
    asks = sent(0)
    canary = asks[0]
    assert all(asks[i] == canary for i in range(0, 500, soak.CANARY_EVERY))
    assert asks.count(canary) < 40


def test_every_request_fits():
    asks = sent(0, 3000)
    assert max(len(ask.prompt) + ask.max_tokens for ask in asks) <= soak.OPTIONS["max_model_len"]
    assert min(len(ask.prompt) for ask in asks) > 0
    assert max(len(ask.prompt) for ask in asks) > 2 * soak.BLOCK


@pytest.fixture
def judge() -> soak.Soak:
    """A soak whose engine never runs."""
    pool = SimpleNamespace(_maybe_evict_cached_block=lambda block: True)
    manager = SimpleNamespace(block_pool=pool)
    return soak.Soak(SimpleNamespace(scheduler=SimpleNamespace(kv_cache_manager=manager)), 0)


def result(*logprobs: float) -> Result:
    packed = tuple(struct.pack("<f", value) for value in logprobs)
    return Result(tokens=(7,) * len(packed), ids=((7,),) * len(packed), logprobs=packed)


def test_a_changed_answer_is_seen(judge):
    ask = judge.traffic.canary
    judge._judge(ask, result(-1.0, -2.0), "a canary")
    judge._judge(ask, result(-1.0, -2.0), "a canary")
    assert not judge.differing
    judge._judge(ask, result(-1.0, -2.0000002), "a canary")
    assert len(judge.differing) == 1 and "position 1" in judge.differing[0]


@pytest.mark.parametrize("values", [(float("-inf"),), ()])
def test_a_logprob_that_is_no_number_is_seen(judge, values):
    judge._judge(judge.traffic.canary, result(*values), "a canary")
    assert "not finite" in judge.differing[0]


def test_evictions_are_counted(judge):
    assert judge._evicted(object())
    assert judge.counts["blocks evicted from the prefix cache"] == 1
