"""Axes batch and company: a needle alone, and in batches of many sizes that others join and leave."""

import random

from tests.harness.compare import Result, assert_same
from tests.harness.engine import Ask, Engine
from tests.harness.prompts import prompt
from tests.v1.determinism.conftest import Build
from tests.v1.determinism.settings import Settings


def needles(settings: Settings) -> list[Ask]:
    """The shortest prompt, one that ends a token past the grid and is sampled, and the longest."""
    low, high = settings.min_prompt, settings.max_prompt
    middle = min(max((low + high) // 2 // 64 * 64 + 1, low), high)
    return [
        Ask(tuple(prompt(low, seed=1)), settings.max_tokens),
        Ask(tuple(prompt(middle, seed=2)), settings.max_tokens, temperature=0.8, seed=11),
        Ask(tuple(prompt(high, seed=3)), settings.max_tokens),
    ]


def companions(settings: Settings, count: int, source: random.Random) -> list[Ask]:
    """Unrelated requests; half of them arrive while the needle decodes."""
    requests = []
    for i in range(count):
        length = source.randint(settings.min_prompt, settings.max_prompt)
        at = source.randint(2, 1 + settings.max_tokens // 2) if i % 2 else 0
        tokens = source.randint(1, settings.max_tokens)
        requests.append(Ask(tuple(prompt(length, seed=source.randrange(100, 10**6))), tokens, at))
    return requests


def check(engine: Engine, settings: Settings, needle: Ask, expected: list[Result], trial: int) -> None:
    """The needle keeps its bits in one batch, in which prefills joined its decode steps."""
    source = random.Random(trial)
    size = settings.batch if trial == 0 else source.randint(max(2, settings.batch // 2), settings.batch)
    requests = companions(settings, size - 1, source)
    place = source.randrange(size)
    requests.insert(place, needle)
    run = engine.run(requests)
    assert run.record.mixed_steps(run.ids[place]) > 0, "no prefill joined a decode step of the needle"
    assert_same(expected, [run.results[place]], f"{size} requests, needle at {place}")


def test_v1_generation_is_deterministic_across_batch_sizes_with_needle(
    engine: Build, settings: Settings
) -> None:
    """Three needles, each in batches of different sizes at a random place."""
    built = engine(enable_prefix_caching=False)
    for needle in needles(settings):
        alone = built.run([needle])
        assert len(alone.record.steps) >= settings.max_tokens, "a step a token"
        assert_same(alone.results, built.run([needle]).results, "alone, again")
        for trial in range(settings.trials):
            check(built, settings, needle, alone.results, trial)
