"""Every axis again, for mixtures of experts of both model classes: what an expert computes at once is
the company's share of tokens, and it must not show."""

import random
from collections.abc import Iterator

import pytest

from tests.harness import device, moe
from tests.harness.axes import alone, assert_in_any_order, assert_joined
from tests.harness.compare import assert_same, differing
from tests.harness.engine import Ask, Engine, Engines, asks
from tests.harness.prompts import prompt, prompts
from tests.harness.score import budget

pytestmark = pytest.mark.engine

COMPANIONS = {"cpu": (0, 1, 7, 31, 32, 33, 63), "cuda": (0, 1, 7, 31, 32, 33, 63, 127, 255)}[device.NAME]
OPTIONS = {"max_num_seqs": max(COMPANIONS) + 1, "max_num_batched_tokens": 2048}

LENGTHS = (1, 2, 63, 64, 65, 129, 300, 511)


@pytest.fixture(scope="module", params=list(moe.FAMILIES))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One engine a model class."""
    builder = Engines(moe.make(tmp_path_factory.mktemp("moe"), request.param))
    built = builder.get(**OPTIONS)
    assert built.runner.model_config.architecture == moe.FAMILIES[request.param]
    yield built
    builder.close()


@pytest.fixture(autouse=True)
def _cold(engine: Engine) -> None:
    engine.reset()


def test_batch(engine: Engine) -> None:
    """Alone, all in one step, and in another order; every expert of every layer is used."""
    requests = asks(prompts(LENGTHS, seed=30), max_tokens=6)
    requests[3] = Ask(requests[3].prompt, 6, temperature=0.8, seed=5)
    with moe.routing() as seen:
        expected = alone(engine, requests)
    counts = sum(ids.flatten().long().bincount(minlength=8) for ids in seen)
    assert int(counts.min()) > 0, f"tokens of each expert: {counts.tolist()}"
    assert_in_any_order(engine, requests, expected)


def test_exact_ties(engine: Engine) -> None:
    """Two experts always have the same logit.  Where only one of them is chosen, a tie was broken."""
    requests = asks(prompts((300, 511), seed=31), max_tokens=4)
    with moe.routing() as seen:
        first = alone(engine, requests)
    chosen = [ids.lt(2).sum(-1) for ids in seen]
    assert sum(int(count.eq(1).sum()) for count in chosen) > 0, "void: no tie was at the last place"
    assert sum(int(count.eq(2).sum()) for count in chosen) > 0, "void: no tie inside"
    assert_same(first, engine.run(requests).results, "together")


def test_company(engine: Engine) -> None:
    """Prefills join and leave the decode steps of a request."""
    assert_joined(engine, seed=32)


@pytest.mark.parametrize("companions", COMPANIONS)
def test_needle(engine: Engine, companions: int) -> None:
    """One request at a random place among others that decode beside it."""
    needle = Ask(tuple(prompt(40, seed=34)), max_tokens=12)
    expected = alone(engine, [needle])
    source = random.Random(companions)
    others = [Ask(tuple(prompt(source.randint(1, 24), seed=100 + i)), 12) for i in range(companions)]
    place = source.randint(0, companions)
    run = engine.run([*others[:place], needle, *others[place:]])
    widest = max(len(step.chunks) for step in run.record.steps)
    assert widest == companions + 1, "not all were in one step"
    assert_same(expected, [run.results[place]], f"{companions} companions, needle at {place}")


def test_cut(engine: Engine) -> None:
    """Prefill chunks as small as the grid, and cut by decodes beside them."""
    requests = asks(prompts((65, 200, 513), seed=35), max_tokens=4)
    expected = alone(engine, requests)
    decoding = Ask(tuple(prompt(20, seed=36)), max_tokens=24)
    beside = alone(engine, [decoding])
    for tokens in (65, 130, 192):
        with budget(engine, tokens):
            run = engine.run([decoding, *(Ask(r.prompt, r.max_tokens, at=2) for r in requests)])
        ends = [run.record.chunk_ends(i) for i in run.ids[1:]]
        assert max(map(len, ends)) > 1
        assert all(end % 64 == 0 for each in ends for end in each[:-1])
        assert_same(beside + expected, run.results, f"budget {tokens}")
        engine.reset()


def test_hits_that_leave_one_two_or_64_tokens(engine: Engine) -> None:
    """A fully cached prompt but for its end, alone and beside seven decodes."""
    b = engine.block
    base = prompt(2 * b + 64, seed=37)
    requests = asks([base[: k * b + rest] for k in (1, 2) for rest in (1, 2, 64)], max_tokens=4)
    companions = asks([prompt(n, seed=38) for n in range(3, 10)], max_tokens=24)
    expected = alone(engine, requests)
    beside = alone(engine, companions)
    for k in (1, 2):  # a sibling leaves its state at k blocks behind
        engine.run(asks([base[: k * b] + prompt(40, seed=39)], max_tokens=1))
    remainders, hits = 0, []
    for request in requests:
        run = engine.run([request])
        remainders += run.record.one_token_remainders()
        hits += run.results
    assert [r.cached for r in hits] == [(len(r.prompt) - 1) // engine.unit * engine.unit for r in requests]
    assert remainders >= 2
    assert_same(expected, hits, "alone")
    run = engine.run([*companions, *(Ask(r.prompt, r.max_tokens, at=6 + i) for i, r in enumerate(requests))])
    assert run.record.mixed_steps(run.ids[0]) >= len(requests) // 2
    assert_same(beside + expected, run.results, "beside seven decodes")


def test_preemption(engine: Engine) -> None:
    """Generated tokens come back by decode, in another company than they were made in."""
    requests = asks(prompts((129, 300), seed=40), max_tokens=20)
    expected = alone(engine, requests)

    def preempt(step: int) -> None:
        if step == 10:
            assert engine.llm.reset_prefix_cache(reset_running_requests=True)

    late = Ask(tuple(prompt(200, seed=41)), 4, at=12)
    run = engine.run([*requests, late], preempt)
    assert [run.record.preemptions[i] for i in run.ids[:2]] == [1, 1]
    assert_same(expected, run.results[:2])


@pytest.mark.parametrize("rule", list(device.MOE_RULES))
def test_experts_that_follow_the_step(engine: Engine, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule broken: what an expert computes follows the step's tokens, and bits move."""
    requests = asks(prompts(LENGTHS, seed=30), max_tokens=6)
    expected = alone(engine, requests)
    assert_same(expected, engine.run(requests).results, "the rule on")
    engine.reset()
    device.MOE_RULES[rule](monkeypatch)
    expected = alone(engine, requests)
    assert differing(expected, engine.run(requests).results)
