"""The client reads a stream exactly, and complains of what is missing.  A stand-in server answers."""

import asyncio
import json

import httpx
import pytest
from openai import AsyncOpenAI

from vllm_invariant.demo.prompts import Prompt
from vllm_invariant.demo.server import TOP_LOGPROBS
from vllm_invariant.demo.traffic import Flight, Line

PROMPT = Prompt((5, 6, 7), 3)


def chunk(ids, *, top=TOP_LOGPROBS, value=-0.5):
    """One streamed chunk.  Each token is listed with ``top`` logprobs, its own among them."""
    listed = [{f"token_id:{t + i}": value - i for i in range(top)} for t in ids]
    logprobs = {
        "tokens": [f"token_id:{t}" for t in ids],
        "token_logprobs": [value] * len(ids),
        "top_logprobs": listed,
        "text_offset": [0] * len(ids),
    }
    choice = {"index": 0, "text": "", "token_ids": ids, "logprobs": logprobs, "finish_reason": None}
    return {"id": "x", "object": "text_completion", "created": 0, "model": "demo", "choices": [choice]}


def usage(cached):
    return {
        **chunk([]),
        "choices": [],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": cached},
        },
    }


def client_of(chunks, requests=None):
    def respond(request: httpx.Request) -> httpx.Response:
        if requests is not None:
            requests.append(json.loads(request.content))
        lines = [f"data: {json.dumps(c)}\n\n" for c in chunks] + ["data: [DONE]\n\n"]
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content="".join(lines))

    transport = httpx.MockTransport(respond)
    return AsyncOpenAI(
        base_url="http://127.0.0.1/v1", api_key="none", http_client=httpx.AsyncClient(transport=transport)
    )


def fly(chunks, requests=None):
    async def go():
        return await Flight(client_of(chunks, requests), PROMPT).answer()

    return asyncio.run(go())


def test_a_stream_is_read_whole():
    answer = fly([chunk([11]), chunk([12, 13], value=-0.25), usage(64)])
    assert answer.tokens == (11, 12, 13)
    assert answer.cached == 64
    assert [row[t] for row, t in zip(answer.logprobs, answer.tokens, strict=True)] == [-0.5, -0.25, -0.25]
    assert answer.logprobs[0] == {11 + i: -0.5 - i for i in range(TOP_LOGPROBS)}
    assert answer.sent <= answer.first <= answer.last


def test_the_request_is_greedy_and_asks_for_bits():
    requests = []
    fly([chunk([1, 2, 3]), usage(0)], requests)
    (request,) = requests
    assert request["prompt"] == [5, 6, 7]
    assert (request["temperature"], request["max_tokens"]) == (0.0, 3)
    assert request["logprobs"] == TOP_LOGPROBS
    assert request["ignore_eos"] and request["return_tokens_as_token_ids"] and request["return_token_ids"]


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([chunk([11, 12])], "asked for 3 tokens, got 2"),
        ([chunk([11, 12, 13], top=5)], "got fewer"),
        ([], "got 0"),
    ],
)
def test_a_short_answer_is_an_error(chunks, message):
    with pytest.raises(RuntimeError, match=message):
        fly([*chunks, usage(0)])


def test_waiting_for_a_token_raises_the_requests_error():
    async def go():
        await Flight(client_of([chunk([11])]), PROMPT).reach(2)

    with pytest.raises(RuntimeError, match="got 1"):
        asyncio.run(go())


def line_that_answers(answers):
    """A line whose server answers resets with ``answers`` in turn."""
    line = Line("http://127.0.0.1")
    replies = iter(answers)
    line._http = httpx.AsyncClient(
        base_url="http://127.0.0.1",
        transport=httpx.MockTransport(lambda _: httpx.Response(200, json={"success": next(replies)})),
    )
    return line


def test_the_cache_is_emptied_once_its_blocks_are_free():
    replies = iter([False, False, True])

    async def go():
        async with line_that_answers(replies) as line:
            await line.forget()

    asyncio.run(go())
    assert next(replies, None) is None


def test_a_cache_that_stays_full_is_an_error(monkeypatch):
    monkeypatch.setattr("vllm_invariant.demo.traffic.RESET_LIMIT", 0.1)

    async def go():
        async with line_that_answers(iter(lambda: False, True)) as line:
            await line.forget()

    with pytest.raises(RuntimeError, match="could not be emptied"):
        asyncio.run(go())
