# In a vLLM branch: tests/utils.py, beside RemoteOpenAIServer.
"""Streaming requests to a server, through the ``openai`` client."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any

import httpx
from openai import AsyncOpenAI

from vllm_invariant.demo.answers import Answer
from vllm_invariant.demo.prompts import Prompt
from vllm_invariant.demo.server import MODEL, TOP_LOGPROBS

REQUEST_LIMIT = 120.0  # seconds
RESET_LIMIT = 20.0
TOKEN_ID = "token_id:"


def listed_logprobs(choice: Any) -> list[dict[int, float]]:
    """The logprobs of one streamed chunk, one dict a token, by token id.

    Args:
        choice: a completion choice whose tokens are written as ``token_id:<id>``.

    """
    rows = []
    listed = choice.logprobs
    for name, value, top in zip(listed.tokens, listed.token_logprobs, listed.top_logprobs, strict=True):
        rows.append(
            {int(key.removeprefix(TOKEN_ID)): logprob for key, logprob in {**top, name: value}.items()}
        )
    return rows


class Flight:
    """One request on its way.  Tokens can be waited for while they stream in."""

    def __init__(self, client: AsyncOpenAI, prompt: Prompt) -> None:
        self.arrivals: list[float] = []
        self.sent = time.monotonic()
        self._arrived = asyncio.Event()
        self._task = asyncio.create_task(self._stream(client, prompt))

    async def _stream(self, client: AsyncOpenAI, prompt: Prompt) -> Answer:
        tokens: list[int] = []
        logprobs: list[dict[int, float]] = []
        cached = 0
        try:
            stream = await client.completions.create(
                model=MODEL,
                prompt=list(prompt.tokens),
                max_tokens=prompt.max_tokens,
                temperature=0.0,
                logprobs=TOP_LOGPROBS,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True},
            )
            async with stream:
                async for chunk in stream:
                    for choice in chunk.choices:
                        ids: list[int] = getattr(choice, "token_ids", None) or []
                        tokens += ids
                        logprobs += listed_logprobs(choice) if ids else []
                        self.arrivals += [time.monotonic()] * len(ids)
                        self._arrived.set()
                    if chunk.usage is not None:
                        details = chunk.usage.prompt_tokens_details
                        cached = (details.cached_tokens if details else None) or 0
        finally:
            self._arrived.set()
        if not len(tokens) == len(logprobs) == prompt.max_tokens:
            raise RuntimeError(
                f"asked for {prompt.max_tokens} tokens, got {len(tokens)}, and logprobs of {len(logprobs)}"
            )
        if any(len(row) < TOP_LOGPROBS for row in logprobs):
            raise RuntimeError(f"asked for {TOP_LOGPROBS} logprobs a token, got fewer")
        return Answer(
            tokens=tuple(tokens),
            logprobs=tuple(logprobs),
            cached=cached,
            sent=self.sent,
            first=self.arrivals[0],
            last=self.arrivals[-1],
        )

    async def reach(self, count: int) -> None:
        """Wait until ``count`` tokens have come, or the request has ended.  Its error is raised here."""
        while len(self.arrivals) < count and not self._task.done():
            self._arrived.clear()
            await self._arrived.wait()
        if self._task.done():
            self._task.result()

    async def answer(self) -> Answer:
        """Wait for the whole answer."""
        return await self._task

    async def hang_up(self) -> None:
        """Close the connection; the server aborts the request."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class Line:
    """A line to one server, on which requests are sent."""

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=REQUEST_LIMIT)
        self._openai = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=REQUEST_LIMIT)

    async def __aenter__(self) -> "Line":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._openai.close()
        await self._http.aclose()

    def send(self, prompt: Prompt) -> Flight:
        """Send a request and return at once."""
        return Flight(self._openai, prompt)

    async def ask(self, prompt: Prompt) -> Answer:
        """Send a request and wait for its answer."""
        return await self.send(prompt).answer()

    @asynccontextmanager
    async def company(self, prompts: list[Prompt]) -> AsyncIterator[list[Flight]]:
        """Requests that are being answered for as long as the block runs, then hang up."""
        flights = [self.send(prompt) for prompt in prompts]
        try:
            for flight in flights:
                await flight.reach(1)
            yield flights
        finally:
            for flight in flights:
                await flight.hang_up()

    async def forget(self) -> None:
        """Empty the prefix cache.

        Raises:
            RuntimeError: if blocks are still held after `RESET_LIMIT` seconds.

        """
        deadline = time.monotonic() + RESET_LIMIT
        while time.monotonic() < deadline:
            response = await self._http.post("/reset_prefix_cache")
            response.raise_for_status()
            if response.json()["success"]:
                return
            await asyncio.sleep(0.05)  # a request that hung up gives its blocks back a step later
        raise RuntimeError(f"the prefix cache could not be emptied within {RESET_LIMIT:.0f} s")
