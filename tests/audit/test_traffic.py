"""The client reads a stream exactly, and complains of what is missing."""

import asyncio
import time

import pytest

from tests.audit.fake import Behaviour, Fake, answer_of, serving
from vllm_invariant.audit.failure import AuditFailed
from vllm_invariant.audit.prompts import Prompt
from vllm_invariant.audit.traffic import Address, Line, token_name

PROMPT = Prompt(tuple(range(5, 75)), 6)


def on(behaviour: Behaviour, go, **address):
    """Run ``go(line, fake)`` on a line to a fake server."""

    async def run(url: str, fake: Fake):
        async with Line(Address(url, "fake", **address)) as line:
            return await go(line, fake)

    with serving(behaviour) as (url, fake):
        return asyncio.run(run(url, fake))


def test_a_stream_is_read_whole():
    async def go(line, fake):
        return await line.ask(PROMPT), await line.ask(PROMPT)

    cold, warm = on(Behaviour(), go)
    expected = answer_of(list(PROMPT.tokens), 6, 20, fault=False)
    for answer in (cold, warm):
        assert answer.tokens == tuple(token for token, _ in expected)
        assert answer.logprobs == tuple(row for _, row in expected)
        assert answer.sent < answer.first < answer.last
    assert (cold.cached, warm.cached) == (0, 64)


def test_the_request_is_greedy_and_asks_for_bits():
    async def go(line, fake):
        await line.ask(PROMPT)
        return fake.bodies

    (body,) = on(Behaviour(), go)
    assert body["prompt"] == list(PROMPT.tokens)
    assert (body["temperature"], body["max_tokens"], body["logprobs"]) == (0.0, 6, 20)
    assert body["ignore_eos"] and body["return_tokens_as_token_ids"] and body["return_token_ids"]


def test_forgetting_keeps_requests_from_hitting_earlier_ones():
    async def go(line, fake):
        await line.ask(PROMPT)
        apart = await line.send(PROMPT, apart=True).answer()
        line.forget()
        return [apart.cached, (await line.ask(PROMPT)).cached, (await line.ask(PROMPT)).cached]

    assert on(Behaviour(), go) == [0, 0, 64]


def test_tokens_can_be_waited_for():
    async def go(line, fake):
        flight = line.send(PROMPT)
        await flight.reach(2)
        early = len(flight.arrivals), flight.done
        await flight.reach(100)
        return early, flight.done, len(flight.arrivals)

    assert on(Behaviour(pace=0.05), go) == ((2, False), True, 6)


def test_hanging_up_ends_the_request_on_the_server():
    async def go(line, fake):
        flight = line.send(Prompt(PROMPT.tokens, 400))
        await flight.reach(1)
        await flight.hang_up()
        deadline = time.monotonic() + 5
        while fake.running and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return flight.done, fake.running

    assert on(Behaviour(), go) == (True, 0)


def test_company_lasts_as_long_as_its_block():
    async def go(line, fake):
        async with line.company([Prompt(PROMPT.tokens, 400)] * 2) as others:
            assert all(other.arrivals and not other.done for other in others)
        return [other.done for other in others]

    assert on(Behaviour(), go) == [True, True]


def test_the_error_of_a_companion_is_not_lost():
    async def go(line, fake):
        async with line.company([Prompt(PROMPT.tokens, 400)] * 2) as others:
            while not all(other.done for other in others):
                await asyncio.sleep(0.02)

    with pytest.raises(AuditFailed, match="broke off"):
        on(Behaviour(cut_after=3, cut_from=0), go)


def test_waiting_for_a_token_raises_the_requests_error():
    async def go(line, fake):
        await line.send(PROMPT).reach(5)

    with pytest.raises(AuditFailed, match="cut after 3 of 6 tokens"):
        on(Behaviour(end_early=3), go)


def test_retries_are_counted_and_no_part_of_the_latency():
    async def go(line, fake):
        answer = await line.ask(PROMPT)
        return line.retries, answer.first - answer.sent

    retries, waited = on(Behaviour(refusals=[(503, {"Retry-After": "0.5"})] * 2), go)
    assert retries == 2 and waited < 0.5


def test_the_cache_is_emptied_where_that_can_be_done():
    async def go(line, fake):
        await line.ask(PROMPT)
        return await line.reset(), (await line.ask(PROMPT)).cached

    assert on(Behaviour(), go) == (True, 0)
    assert on(Behaviour(dev=False), go) == (False, 64)


def test_tokens_are_named_by_id_or_by_text():
    assert token_name("token_id:17") == 17
    assert token_name(" token") == " token"
