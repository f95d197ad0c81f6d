"""Requests to a live server: targets that are compared, and background that arrives meanwhile."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI, OpenAIError

from vllm_invariant.audit.traffic import listed_logprobs

PROMPT_CLASSES = (116, 321, 1059)
TARGET_GENERATIONS = (16, 64, 128)
BACKGROUND_GENERATIONS = (1, 64)  # shortest and longest
TOP_LOGPROBS = 20


@dataclass(frozen=True)
class Request:
    """What is asked.

    Attributes:
        prompt: token ids.
        max_tokens: tokens to generate; the end-of-text token does not stop them.
        seed: of sampling at temperature 1, or None for greedy decoding.
        compared: ask for logprobs too.

    """

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None = None
    compared: bool = False


@dataclass
class Reply:
    """What came back, and when, in seconds of one monotonic clock.

    Attributes:
        name: the request's own id; part of the server's id for it.
        tokens: generated token ids.
        logprobs: for each token, the listed logprobs by token id, the token's own among them.
        error: why there are none.

    """

    name: str
    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    error: str | None = None


async def ask(client: AsyncOpenAI, model: str, name: str, request: Request) -> Reply:
    """Stream one answer.  A failure is part of the reply."""
    reply = Reply(name, request, sent=time.monotonic())
    try:
        stream = await client.completions.create(
            model=model,
            prompt=list(request.prompt),
            max_tokens=request.max_tokens,
            temperature=0.0 if request.seed is None else 1.0,
            seed=request.seed,
            logprobs=TOP_LOGPROBS if request.compared else None,
            stream=True,
            extra_headers={"X-Request-Id": name},
            extra_body={"ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True},
        )
        async with stream:
            async for chunk in stream:
                for choice in chunk.choices:
                    _take(reply, choice)
    except OpenAIError as error:
        reply.error = repr(error)
    if reply.error is None and len(reply.tokens) != request.max_tokens:
        reply.error = f"{len(reply.tokens)} of {request.max_tokens} tokens"
    return reply


def _take(reply: Reply, choice: Any) -> None:
    ids = getattr(choice, "token_ids", None) or []
    if not ids:
        return
    reply.last = time.monotonic()
    reply.first = reply.first or reply.last
    reply.tokens += ids
    if reply.request.compared:
        reply.logprobs += listed_logprobs(choice)


def target_kinds(vocabulary: int, sampled: bool) -> list[Request]:
    """The distinct targets: each prompt class and generation, greedy and, if ``sampled``, with a seed."""
    source = random.Random(1)
    kinds = []
    for length in PROMPT_CLASSES:
        for generation in TARGET_GENERATIONS:
            for seed in (None, 17 * length + generation) if sampled else (None,):
                prompt = tuple(source.randrange(1, vocabulary) for _ in range(length))
                kinds.append(Request(prompt, generation, seed, compared=True))
    return kinds


def background(count: int, vocabulary: int) -> list[Request]:
    """Unrelated requests of the three prompt classes, in random order."""
    source = random.Random(2)
    requests = []
    for i in range(count):
        prompt = tuple(
            source.randrange(1, vocabulary) for _ in range(PROMPT_CLASSES[i % len(PROMPT_CLASSES)])
        )
        requests.append(Request(prompt, source.randint(*BACKGROUND_GENERATIONS)))
    source.shuffle(requests)
    return requests


async def poisson(
    client: AsyncOpenAI,
    model: str,
    requests: Sequence[tuple[str, Request]],
    rate: float,
    cap: asyncio.Semaphore,
    done: Callable[[Reply], None],
) -> list[Reply]:
    """Send named requests at exponential intervals, as many at a time as ``cap`` allows.

    Args:
        client, model: the server.
        requests: name and request, in order of arrival.
        rate: arrivals a second.
        cap: shared by all traffic.
        done: called with each reply.

    """
    source = random.Random(len(requests))
    tasks = []

    async def one(name: str, request: Request) -> Reply:
        async with cap:
            reply = await ask(client, model, name, request)
        done(reply)
        return reply

    for name, request in requests:
        await asyncio.sleep(source.expovariate(rate))
        tasks.append(asyncio.create_task(one(name, request)))
    return list(await asyncio.gather(*tasks))
