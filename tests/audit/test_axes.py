"""An axis says so when it did not come about.  A scripted server takes vLLM's place."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from tests.demo.answers import answer
from vllm_invariant.demo import axes
from vllm_invariant.demo.prompts import Prompt, PromptSet

PROMPTS = PromptSet(
    needles=tuple(Prompt((1, 2, i), 6) for i in range(3)),
    primer=Prompt((1, 2, 9), 1),
    strangers=tuple(Prompt((50 + i,), 8) for i in range(6)),
)


class Script:
    """What the server does with each request, and a clock that moves when one is sent.

    Attributes:
        cached: hit tokens of a request after another one since the cache was emptied.
        cold_hits: hit tokens of the first request after that.
        stay: whether a request's answer takes long enough to overlap with later ones.
        brief: whether a request for few tokens is answered at once all the same.

    """

    def __init__(self, cached=0, cold_hits=0, stay=True, brief=False):
        self.cached, self.cold_hits, self.stay, self.brief = cached, cold_hits, stay, brief
        self.now, self.warm, self.sent = 0.0, False, []


class ScriptedFlight:
    def __init__(self, script, prompt):
        script.now += 1
        script.sent.append(prompt)
        self.script, self.prompt, self.sent_at = script, prompt, script.now
        self.cached = script.cached if script.warm else script.cold_hits
        script.warm = True
        self.arrivals = []
        self.stay = script.stay and not (script.brief and prompt.max_tokens <= 3)
        if not self.stay:
            self._finish()

    def _finish(self):
        self.script.now += 1
        self.arrivals = self.arrivals or [self.script.now]
        self.script.now += 1
        self.arrivals.append(self.script.now)

    async def reach(self, count):
        if self.stay and len(self.arrivals) < count:
            self.script.now += 1
            self.arrivals.append(self.script.now)

    async def answer(self):
        if self.stay:
            self._finish()
        return answer(cached=self.cached, sent=self.sent_at, first=self.arrivals[0], last=self.arrivals[-1])


class ScriptedLine:
    def __init__(self, script):
        self.script = script

    def send(self, prompt):
        return ScriptedFlight(self.script, prompt)

    async def ask(self, prompt):
        return await self.send(prompt).answer()

    async def forget(self):
        self.script.warm = False

    @asynccontextmanager
    async def company(self, prompts):
        flights = [self.send(prompt) for prompt in prompts]
        for flight in flights:
            await flight.reach(1)
        yield flights


def outcome(ask, **script):
    ticks = []
    result = asyncio.run(ask(ScriptedLine(Script(**script)), PROMPTS, lambda: ticks.append(1)))
    assert len(result.answers) == len(ticks) == len(PROMPTS.needles)
    return result


def test_a_cold_reference_counts_and_a_warm_one_does_not():
    assert outcome(axes.alone, cached=64).void is None
    assert "3 cold requests hit" in outcome(axes.alone, cold_hits=64).void


def test_a_batch_must_be_under_way_at_once():
    assert outcome(axes.batch).void is None
    assert "not all under way" in outcome(axes.batch, stay=False).void


def test_company_must_come_and_go():
    seen = outcome(axes.company, brief=True)
    assert seen.void is None and not seen.others
    for unseen in (outcome(axes.company, stay=False), outcome(axes.company, stay=True)):
        assert "nobody came and went during 3" in unseen.void
        assert [i for i, _ in unseen.others] == sorted([0, 1, 2] * (axes.VISIT_TRIES - 1))


def test_a_cut_needs_others_in_every_step_of_the_prefill():
    assert outcome(axes.cut).void is None
    assert "whole budget" in outcome(axes.cut, stay=False).void


@pytest.mark.parametrize("ask", [axes.shared_hit, axes.own_hit, axes.hit_in_batch])
def test_hits_must_be_hits(ask):
    assert outcome(ask, cached=64).void is None
    assert "did not hit" in outcome(ask, cached=0).void


def test_a_request_that_warms_the_cache_generates_one_token():
    script = Script(cached=64)
    asyncio.run(axes.own_hit(ScriptedLine(script), PROMPTS, lambda: None))
    needles = PROMPTS.needles
    assert script.sent == [p for n in needles for p in (replace(n, max_tokens=1), n)]
