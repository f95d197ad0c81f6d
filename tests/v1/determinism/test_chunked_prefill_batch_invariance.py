"""Axis cut (F05): a prompt in one step, and cut by budgets of all sizes, by company, and by cache blocks."""

import pytest

from tests.harness import device
from tests.harness.compare import Result, assert_same
from tests.harness.engine import Ask, Engine, Run, asks
from tests.harness.prompts import prompt, prompts
from tests.harness.score import budget
from tests.v1.determinism.conftest import Build
from tests.v1.determinism.settings import Settings

PROMPTS = prompts((200, 513, 1000, 1024), seed=5)
BUDGETS = {"cpu": (64, 100, 192), "cuda": (64, 96, 100, 128, 130, 192, 1024)}[device.NAME]
TOKENS = 6


def check_cuts(run: Run, requests: list[Ask], ids: list[str], grid: int) -> int:
    """Every chunk but a prompt's last ends on the grid.  Returns the number of cuts."""
    cuts = 0
    for request, request_id in zip(requests, ids, strict=True):
        *inner, last = run.record.chunk_ends(request_id)
        assert last == len(request.prompt)
        assert all(end % grid == 0 for end in inner), f"chunk ends {inner} of {last}"
        cuts += len(inner)
    return cuts


def uncut(engine: Engine, requests: list[Ask]) -> list[Result]:
    """Each request alone, its prompt in one step."""
    results = []
    for request in requests:
        run = engine.run([request])
        assert run.record.chunk_ends(run.ids[0]) == [len(request.prompt)]
        results += run.results
    return results


@pytest.mark.parametrize("decodes", [0, 3])
def test_any_budget_gives_the_bits_of_one_step(engine: Build, settings: Settings, decodes: int) -> None:
    """Budgets from one grid step up, with and without others that decode meanwhile and take from it."""
    built = engine(enable_prefix_caching=False)
    requests = asks(PROMPTS, TOKENS)
    expected = uncut(built, requests)
    others = [Ask(tuple(prompt(20 + i, seed=77)), 60) for i in range(decodes)]
    for tokens in BUDGETS:
        tokens += decodes  # otherwise the smallest budget never fits a grid step beside them
        late = [Ask(r.prompt, r.max_tokens, at=4) for r in requests] if others else requests
        with budget(built, tokens):
            run = built.run([*others, *late])
        ids = run.ids[decodes:]
        assert check_cuts(run, requests, ids, settings.arithmetic.grid) > 0, (
            f"a budget of {tokens} cut nothing"
        )
        if others:
            assert run.record.mixed_steps(run.ids[0]) > 0, "nobody decoded beside a prefill"
        assert_same(expected, run.results[decodes:], f"budget {tokens}, {decodes} decodes")


def test_cuts_at_cache_blocks(engine: Build, settings: Settings) -> None:
    """With prefix caching every prompt is also cut at its blocks, whatever the budget."""
    requests = asks(PROMPTS, TOKENS)
    expected = uncut(engine(enable_prefix_caching=False), requests)
    built = engine(enable_prefix_caching=True)
    for tokens in (96, 500, 2048):
        built.reset()
        with budget(built, tokens):
            run = built.run(requests)
        assert check_cuts(run, requests, run.ids, settings.arithmetic.grid) > 0
        assert all(run.record.hit(i) == 0 for i in run.ids), "cold"
        assert_same(expected, run.results, f"prefix caching, budget {tokens}")
