# In a vLLM branch: tests/utils.py, beside RemoteOpenAIServer.
"""Streaming requests to a server, through the ``openai`` client."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAIError

from vllm_invariant.audit.answers import Answer, Token
from vllm_invariant.audit.counters import Counters, read_counters
from vllm_invariant.audit.failure import AuditFailed, FewerLogprobs, failed
from vllm_invariant.audit.prompts import Prompt

RETRIES = 4  # of a request the server is too busy for; the client waits as long as it is told to
RESET_LIMIT = 20.0  # seconds
TOKEN_ID = "token_id:"


@dataclass(frozen=True)
class Address:
    """Whom to ask.

    Attributes:
        url: the server's root, without ``/v1``.
        model: the name requests use.
        key: its API key.
        timeout: seconds one answer may take, tries that were refused included.
        top: logprobs asked for a token.

    """

    url: str
    model: str = ""
    key: str = "none"
    timeout: float = 300.0
    top: int = 20


def token_name(listed: str) -> Token:
    """The token a server listed as ``token_id:<id>``, or as its text if it does not tell ids."""
    return int(listed.removeprefix(TOKEN_ID)) if listed.startswith(TOKEN_ID) else listed


def listed_logprobs(choice: Any) -> list[dict[Token, float]]:
    """The logprobs of one streamed chunk, one dict a token, its own among them.

    Args:
        choice: a completion choice.

    """
    listed = choice.logprobs
    rows = zip(listed.tokens, listed.token_logprobs, listed.top_logprobs, strict=True)
    return [
        {token_name(key): logprob for key, logprob in {**top, name: value}.items()}
        for name, value, top in rows
    ]


class Flight:
    """One request on its way.  Tokens can be waited for while they stream in."""

    def __init__(self, client: AsyncOpenAI, address: Address, prompt: Prompt, salt: str) -> None:
        self.arrivals: list[float] = []
        self.sent = time.monotonic()
        self.retries = 0
        self._client, self._address, self._prompt, self._salt = client, address, prompt, salt
        self._tokens: list[Token] = []
        self._logprobs: list[dict[Token, float]] = []
        self._cached: int | None = None
        self._end: str | None = None
        self._arrived = asyncio.Event()
        self._task = asyncio.create_task(self._fly())

    async def _fly(self) -> Answer:
        try:
            async with asyncio.timeout(self._address.timeout):
                await self._stream()
            self._check()
        except (OpenAIError, httpx.HTTPError, TimeoutError, ValueError, TypeError, AttributeError) as error:
            raise failed(error, self._address.url, RETRIES) from error
        finally:
            self._arrived.set()
        return Answer(
            tokens=tuple(self._tokens),
            logprobs=tuple(self._logprobs),
            cached=self._cached,
            sent=self.sent,
            first=self.arrivals[0],
            last=self.arrivals[-1],
        )

    async def _stream(self) -> None:
        response = await self._client.completions.with_raw_response.create(
            model=self._address.model,
            prompt=list(self._prompt.tokens),
            max_tokens=self._prompt.max_tokens,
            temperature=0.0,
            logprobs=self._address.top,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={
                "ignore_eos": True,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
                "cache_salt": self._salt,
            },
        )
        if response.retries_taken:
            self.retries = response.retries_taken
            self.sent = time.monotonic()  # it was not under way while it was refused
        async with response.parse() as stream:
            async for chunk in stream:
                for choice in chunk.choices:
                    self._take(choice)
                if chunk.usage is not None:
                    details = chunk.usage.prompt_tokens_details
                    self._cached = details.cached_tokens if details else None

    def _take(self, choice: Any) -> None:
        ids: list[Token] = getattr(choice, "token_ids", None) or []
        if choice.logprobs is None and (ids or choice.text):
            raise AuditFailed("the server sent no logprobs, without which bits cannot be compared")
        rows = listed_logprobs(choice) if choice.logprobs is not None else []
        self._logprobs += rows
        self._tokens += ids or [token_name(name) for name in (choice.logprobs.tokens if rows else ())]
        self.arrivals += [time.monotonic()] * len(rows)
        self._end = choice.finish_reason or self._end
        self._arrived.set()

    def _check(self) -> None:
        """Raise `AuditFailed` if the answer is not whole."""
        got, asked, top = len(self._tokens), self._prompt.max_tokens, self._address.top
        if self._end is None:
            raise AuditFailed(f"the stream was cut after {got} of {asked} tokens")
        # A server that does not know ignore_eos may stop early; that is an answer like any other.
        if not got or got != len(self._logprobs) or (got != asked and self._end != "stop"):
            raise AuditFailed(
                f"asked for {asked} tokens, got {got}, and logprobs of {len(self._logprobs)} "
                f"(finish reason {self._end})"
            )
        if any(len(row) < top for row in self._logprobs):
            raise FewerLogprobs(f"asked for {top} logprobs a token, got fewer")

    @property
    def done(self) -> bool:
        """Whether the answer has come, or the request has failed."""
        return self._task.done()

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

    def drop(self) -> None:
        """Hang up without waiting for anything; nobody is told of an error."""
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._task.cancel()

    async def hang_up(self) -> None:
        """Close the connection; the server aborts the request.  The error of one that failed is raised."""
        self._task.cancel()
        (end,) = await asyncio.gather(self._task, return_exceptions=True)
        if isinstance(end, Exception):
            raise end


class Line:
    """A line to one server, on which requests are sent."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.flights: list[Flight] = []
        limits = httpx.Limits(max_connections=None)
        headers = {"Authorization": f"Bearer {address.key}"}
        self.http = httpx.AsyncClient(base_url=address.url, headers=headers, timeout=60, limits=limits)
        self._openai = AsyncOpenAI(
            base_url=f"{address.url}/v1",
            api_key=address.key,
            max_retries=RETRIES,
            timeout=address.timeout,
            # It takes httpx's client too; its annotation leaves that out.
            http_client=httpx.AsyncClient(limits=limits),  # type: ignore[arg-type]
        )
        self.forget()

    async def __aenter__(self) -> "Line":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for flight in self.flights:
            flight.drop()
        await self._openai.close()
        await self.http.aclose()

    @property
    def retries(self) -> int:
        """Requests sent again because the server refused them for the moment."""
        return sum(flight.retries for flight in self.flights)

    async def models(self) -> list[Any]:
        """What the server serves."""
        try:
            await self.http.get("/v1/models")  # a server that is down is found without a retry
            return (await self._openai.models.list()).data
        except (OpenAIError, httpx.HTTPError, httpx.InvalidURL) as error:
            raise failed(error, self.address.url, RETRIES) from error

    def forget(self) -> None:
        """Let no later request hit what an earlier one left in the prefix cache.

        The cache is not emptied: requests get another salt, which is part of the cache's keys.
        """
        self._salt = uuid.uuid4().hex

    def send(self, prompt: Prompt, *, apart: bool = False) -> Flight:
        """Send a request and return at once.  ``apart``: under a salt of its own."""
        salt = uuid.uuid4().hex if apart else self._salt
        flight = Flight(self._openai, self.address, prompt, salt)
        self.flights.append(flight)
        return flight

    async def ask(self, prompt: Prompt) -> Answer:
        """Send a request and wait for its answer."""
        return await self.send(prompt).answer()

    @asynccontextmanager
    async def company(self, prompts: list[Prompt]) -> AsyncIterator[list[Flight]]:
        """Requests that are being answered for as long as the block runs, then hang up."""
        flights = [self.send(prompt, apart=True) for prompt in prompts]
        try:
            for flight in flights:
                await flight.reach(1)
            yield flights
        finally:
            await hang_up(flights)

    async def counters(self) -> Counters | None:
        """The server's own counters, or None if it shows none."""
        return await read_counters(self.http)

    async def reset(self) -> bool:
        """Empty the prefix cache through vLLM's development endpoint.

        Returns:
            Whether it was emptied: False if there is no such endpoint, or others hold its blocks.

        """
        deadline = time.monotonic() + RESET_LIMIT
        while time.monotonic() < deadline:
            response = await self.http.post("/reset_prefix_cache")
            if response.status_code != 200:
                return False
            if response.json()["success"]:
                return True
            await asyncio.sleep(0.05)  # a request that hung up gives its blocks back a step later
        return False


async def hang_up(flights: list[Flight]) -> None:
    """Hang all up, and raise the error of the first that failed."""
    ends = await asyncio.gather(*(flight.hang_up() for flight in flights), return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end
