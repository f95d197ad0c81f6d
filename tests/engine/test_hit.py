"""Axis hit (F01, F10, F19, F20): cold against warm, at both granularities of the prefix cache."""

import random

import pytest

from tests.harness import device
from tests.harness.compare import assert_same
from tests.harness.engine import Ask, Engine, Engines, Run, asks
from tests.harness.prompts import prompt

pytestmark = pytest.mark.engine


@pytest.fixture(params=["grid", "block"])
def options(request: pytest.FixtureRequest, engines: Engines) -> dict[str, int]:
    """Hits land on the 64-token grid (the default), or on whole blocks only."""
    return {} if request.param == "grid" else {"prefix_match_unit": engines.block}


def _longest_hit(engine: Engine, length: int) -> int:
    """The last token of a prompt is always computed; everything before it may be cached."""
    return (length - 1) // engine.unit * engine.unit


def _assert_hits(engine: Engine, run: Run, requests: list[Ask]) -> None:
    hits = [run.record.hit(request_id) for request_id in run.ids]
    assert hits == [_longest_hit(engine, len(r.prompt)) for r in requests]
    assert [result.cached for result in run.results] == hits
    assert any(hits)


def test_cold_then_hit_alone_then_hit_among_others(engines: Engines, options: dict[str, int]) -> None:
    """F01: prompts around one, two and three blocks."""
    b = engines.block
    lengths = (b - 1, b + 1, b + 37, 2 * b - 7, 2 * b + 63, 3 * b + 5)
    requests = asks([prompt(length, seed=10) for length in lengths])
    fillers = asks([prompt(length, seed=11) for length in (7, 200)])
    expected = engines.solo(requests + fillers)
    engine = engines.get(**options)
    assert engine.unit == (options.get("prefix_match_unit") or 64)
    cold = engine.run(requests)
    assert all(result.cached == 0 for result in cold.results)
    assert_same(expected[:6], cold.results, "cold, together")
    for request, want in zip(requests, expected, strict=False):
        run = engine.run([request])
        _assert_hits(engine, run, [request]) if len(request.prompt) > engine.unit else None
        assert_same([want], run.results, f"hit alone, {len(request.prompt)} tokens")
    run = engine.run(requests + fillers)
    assert run.record.shared_prefills() == 8
    assert [run.record.hit(i) for i in run.ids[:6]] == [_longest_hit(engine, n) for n in lengths]
    assert_same(expected, run.results, "hit among eight")


def test_hits_that_leave_one_or_two_tokens(engines: Engines, options: dict[str, int]) -> None:
    """F10: k blocks are cached; 1, 2, 64 and 65 tokens remain; alone and beside seven decodes."""
    b = engines.block
    base = prompt(3 * b + 65, seed=12)
    lengths = [k * b + rest for k in (1, 2, 3) for rest in (1, 2, 64, 65)]
    requests = asks([base[:length] for length in lengths], max_tokens=4)
    companions = asks([prompt(length, seed=13) for length in range(3, 10)], max_tokens=40)
    expected = engines.solo(requests)
    beside = engines.solo(companions)
    engine = engines.get(**options)
    assert_same(expected[-1:], engine.run(requests[-1:]).results, "the run that fills the cache")

    engine.reset()
    remainders = 0
    for k in (1, 2, 3):
        # A sibling leaves its state at k blocks behind; a prompt of exactly k blocks would leave
        # that of the step before, because its own last token is never taken from the cache.
        engine.run(asks([base[: k * b] + prompt(40, seed=16)], max_tokens=1))
        for request, want in zip(requests[4 * k - 4 : 4 * k], expected[4 * k - 4 : 4 * k], strict=True):
            run = engine.run([request])
            assert run.results[0].cached >= k * b
            remainders += run.record.one_token_remainders()
            assert_same([want], run.results, f"{len(request.prompt)} tokens alone")
    assert remainders >= 3, "no prompt was left with one token"

    joining = [Ask(r.prompt, r.max_tokens, at=8 + i) for i, r in enumerate(requests)]
    run = engine.run(companions + joining)
    _assert_hits(engine, Run(run.results[7:], run.ids[7:], run.record), joining)
    assert run.record.mixed_steps(run.ids[0]) >= len(joining) // 2
    assert_same(beside + expected, run.results, "beside seven decodes")


def test_cold_and_warm_runs_in_turn(engines: Engines, options: dict[str, int]) -> None:
    """F19: cold, reset, cold, warm, warm, warm beside five others; cold-cold apart from cold-warm."""
    b = engines.block
    requests = asks([prompt(n, seed=14) for n in (b + 10, 2 * b + 63, 3 * b + 64)])
    fillers = asks([prompt(n, seed=15) for n in (2, 30, 64, 100, 400)])
    expected = engines.solo(requests + fillers)
    engine = engines.get(**options)
    first = engine.alone(requests)
    second = engine.alone(requests)
    assert all(result.cached == 0 for result in first + second)
    assert_same(first, second, "cold against cold")
    engine.run(requests)
    for turn in ("warm", "warm again"):
        run = engine.run(requests)
        _assert_hits(engine, run, requests)
        assert_same(first, run.results, f"cold against {turn}")
    run = engine.run(requests + fillers)
    assert all(result.cached > 0 for result in run.results[:3])
    assert_same(first + expected[3:], run.results, "cold against warm beside five others")
    assert_same(expected[:3], first, "cold against SOLO")


def test_shared_prefixes_in_any_order(engines: Engines) -> None:
    """F20: five prefixes of 2.5 blocks, private ends of one block; hit lengths differ, bits do not.

    At several batch sizes, and with states kept at the ends of prompts (stock's default) or at every block.
    """
    b = engines.block
    prefixes = [prompt(5 * b // 2, seed=20 + i) for i in range(5)]
    requests = asks(
        [prefixes[i] + prompt(b, seed=100 + 10 * i + j) for j in range(3) for i in range(5)], max_tokens=4
    )
    expected = engines.solo(requests)
    hits: set[tuple[int, ...]] = set()
    every_block = {"prefix_cache_retention_interval": b}
    for options, orders in (
        ({"max_num_seqs": 1}, (1,)),
        ({"max_num_seqs": 4}, (2, 3)),
        ({"max_num_seqs": 16, **every_block}, (4, 5)),
    ):
        engine = engines.get(**options)
        for order in orders:
            indices = list(range(len(requests)))
            random.Random(order).shuffle(indices)
            run = engine.run([requests[i] for i in indices])
            assert_same([expected[i] for i in indices], run.results, f"{options}, order {order}")
            by_request = dict(zip(indices, [result.cached for result in run.results], strict=True))
            hits.add(tuple(by_request[i] for i in range(len(requests))))
    assert len(hits) > 1, "void: every run had the same hits"
    assert any(any(lengths) for lengths in hits)


@pytest.mark.skipif(
    device.NAME == "cuda", reason="prompts save states without a stop there; no copy of a copy was found"
)
def test_a_hit_on_a_copy_made_in_the_same_step(engines: Engines) -> None:
    """Several requests hit inside a block at once, and one of them the copy another just got."""
    b = engines.block
    head = prompt(7 * b, seed=16)
    lengths = (2 * b - 1, 2 * b, 2 * b + 1, 6 * b + 127, 6 * b + 128)
    requests = asks([head[: n - 17] + prompt(17, seed=100 + n) for n in lengths])
    expected = engines.solo(requests)
    run = engines.get(max_num_batched_tokens=2048).run(requests)
    chains = [
        copy
        for step in run.record.steps
        for copy in step.copies
        if copy.src_block_id in {other.dst_block_id for other in step.copies}
    ]
    assert chains, "void: no copy built on another"
    assert_same(expected, run.results, "hits on copies")
