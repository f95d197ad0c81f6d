"""Axis form (F18): with the recurrent arithmetic a token has the same bits scored or generated.

And with it, once more, the axes that the grid of the chunk arithmetic gives: any cut, any hit, preemption
without replay, blocks that decode filled.
"""

import pytest

from tests.harness import device
from tests.harness.compare import Result, assert_same, differing
from tests.harness.engine import Ask, Engine, Engines, asks
from tests.harness.prompts import prompt
from tests.harness.score import budget, score

pytestmark = pytest.mark.engine

RECURRENT = {"additional_config": {"vllm_invariant": {"gdn_arithmetic": "recurrent"}}}
LENGTHS = (37, 64, 1, 300)
NEW = 24


@pytest.fixture(scope="module", params=device.ATTENTION_BACKENDS)
def options(request: pytest.FixtureRequest) -> dict[str, object]:
    """An engine of the recurrent arithmetic, on each attention backend of the device."""
    return {**RECURRENT, "attention_backend": request.param}


def requests() -> list[Ask]:
    return asks([prompt(n, seed=95) for n in LENGTHS], max_tokens=NEW)


def scored(engine: Engine, ask: Ask, answer: Result, **how: bool) -> tuple[Result, list[int]]:
    """The generated tokens of an answer as an engine scores them, and where it cut them."""
    seen = score(engine, ask.prompt + answer.tokens, **how)
    return seen.part(len(ask.prompt)), seen.chunk_ends


def assert_scored_in_one_step(engine: Engine) -> list[Result]:
    """Generated alone, and together with requests of other lengths; then scored in one prefill.

    Returns what each request generated.
    """
    expected = engine.alone(requests())
    assert_same(expected, engine.run(requests()).results, "together")
    for ask, answer in zip(requests(), expected, strict=True):
        result, ends = scored(engine, ask, answer)
        assert ends == [len(ask.prompt) + NEW]
        assert_same([answer], [result], f"scored, prompt of {len(ask.prompt)}")
    return expected


def test_scored_in_one_step(engines: Engines, options: dict[str, object]) -> None:
    """The first form: everything in one prefill."""
    assert_scored_in_one_step(engines.get(**options, enable_prefix_caching=False))


def test_scored_in_any_cuts(engines: Engines, options: dict[str, object]) -> None:
    """Down to one token a step; cuts off the grid of the chunk arithmetic and off every block."""
    engine = engines.get(**options, enable_prefix_caching=False)
    expected = engine.alone(requests())
    for ask, answer in zip(requests(), expected, strict=True):
        for tokens in (1, 5, 63, 100) if len(ask.prompt) < 64 else (33, 100):
            with budget(engine, tokens):
                result, ends = scored(engine, ask, answer)
            assert ends[0] == min(tokens, len(ask.prompt) + NEW)
            assert_same([answer], [result], f"prompt of {len(ask.prompt)}, {tokens} a step")


@pytest.mark.parametrize("caching", [False, True], ids=["no-cache", "cache"])
def test_preemption_needs_no_replay(engines: Engines, options: dict[str, object], caching: bool) -> None:
    """Generated tokens come back in one prefill, twice, and the request goes on with the bits it had."""
    asked = [Ask(tuple(prompt(129, seed=50)), max_tokens=40), *requests()[:2]]
    engine = engines.get(**options, **({} if caching else {"enable_prefix_caching": False}))
    expected = engine.alone(asked)
    due = [8, 31]
    engine.reset()

    def preempt(step: int) -> None:
        running = [r for r in engine.scheduler.running if len(r.prompt_token_ids) == 129]
        if due and running and running[0].num_output_tokens >= due[0]:
            due.pop(0)
            assert engine.llm.reset_prefix_cache(reset_running_requests=True)

    run = engine.run(asked, preempt)
    assert run.record.preemptions[run.ids[0]] == 2
    chunks = [step.chunks[run.ids[0]] for step in run.record.steps if run.ids[0] in step.chunks]
    longest = max(end - max(start, 129) for start, end in chunks)
    assert longest >= 31 - 16, "generated tokens came back one by one"
    assert_same(expected, run.results)
    result, _ = scored(engine, asked[0], run.results[0])
    assert_same(expected[:1], [result], "scored")


def test_cuts_hits_and_company(engines: Engines, options: dict[str, object]) -> None:
    """Axes cut, hit, batch and company in one engine: nothing lies on a 64-token grid."""
    engine = engines.get(**options)
    b = engine.block
    assert engine.unit < 64
    base = prompt(b + 150, seed=98)
    asked = asks([base[:n] for n in (65, 100, b + 1, b + 150)] + [prompt(9, seed=99)], max_tokens=8)
    expected = engine.alone(asked)
    for tokens in (17, 101):
        engine.reset()
        with budget(engine, tokens):
            run = engine.run([Ask(a.prompt, a.max_tokens, at=3 * i) for i, a in enumerate(asked)])
        assert run.record.mixed_steps() > 0
        ends = {end for i in run.ids for end in run.record.chunk_ends(i)[:-1]}
        assert any(end % 64 for end in ends), "every cut was on the grid"
        assert_same(expected, run.results, f"{tokens} tokens a step, joining")
    run = engine.run(asked)
    hits = [result.cached for result in run.results]
    assert any(hit % 64 for hit in hits), f"hits {hits} are all on the grid"
    assert_same(expected, run.results, "on hits, together")
    for ask, want, hit in zip(asked, expected, hits, strict=True):
        assert_same([want], engine.run([ask]).results, f"on a hit of {hit}")


@pytest.mark.parametrize("rule", list(device.FORM_RULES))
def test_a_rule_turned_off_is_seen(engines: Engines, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines.get(**RECURRENT, attention_backend=device.ATTENTION_BACKENDS[0])
    expected = engine.alone(requests())

    def scores() -> list[Result]:
        return [scored(engine, ask, answer)[0] for ask, answer in zip(requests(), expected, strict=True)]

    assert_same(expected, scores())
    device.FORM_RULES[rule](monkeypatch)
    assert differing(expected, scores())


def test_decoded_blocks_are_hit_by_the_next_turn(engines: Engines, options: dict[str, object]) -> None:
    """A conversation: turn 2 goes on from a state that decode left, and is scored from there as well."""
    b = engines.get(**options).block
    first = asks([prompt(b - 10, seed=96)], max_tokens=30)
    cold = engines.get(**options)
    answer = cold.alone(first)[0]
    second = asks([list(first[0].prompt + answer.tokens) + prompt(30, seed=97)])
    expected = cold.alone(second)
    all_scores = score(cold, second[0].prompt + expected[0].tokens)

    engine = engines.get(**options, prefix_cache_retention_interval=b)
    assert_same([answer], engine.run(first).results, "turn 1")
    run = engine.run(second)
    assert run.results[0].cached == b > len(first[0].prompt), "no block that decode filled was hit"
    assert_same(expected, run.results, "turn 2")
    seen = score(engine, second[0].prompt + expected[0].tokens, read_cache=True)
    assert seen.hit >= b
    assert_same([all_scores.part(seen.hit + 1)], [seen.part(seen.hit + 1)], "scored after a hit")
    assert_same(expected, [seen.part(len(second[0].prompt))], "generated, then scored after a hit")


def test_the_chunk_arithmetic_is_seen(engines: Engines) -> None:
    """Scored and generated tokens differ there: the comparison of this file can fail."""
    engine = engines.get()
    expected = engine.alone(requests())
    results = [scored(engine, ask, answer)[0] for ask, answer in zip(requests(), expected, strict=True)]
    assert differing(expected, results)
