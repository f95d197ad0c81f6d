"""A small server with OpenAI's API and vLLM's additions, whose behaviour a test chooses.

Its answers are a function of the prompt alone, unless a fault is planted.
"""

import asyncio
import hashlib
import json
import random
import struct
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

VOCABULARY = 2000


@dataclass(frozen=True)
class Seen:
    """What a request met: prompt length, hit tokens, other requests under way, and how many came before."""

    length: int
    cached: int
    running: int
    before: int


@dataclass
class Behaviour:
    """How the server behaves.  The defaults are those of an invariant vLLM server with a prefix cache.

    Attributes:
        pace: seconds between two tokens.
        burst: send all tokens in one chunk.
        serial: answer one request after the other.
        unit: hits land on multiples of it; None for no prefix cache.
        salted: keep requests of different salts apart.
        tell: say how many prompt tokens were cached.
        metrics: have a metrics page.
        dev: have vLLM's development endpoints.
        top: logprobs it gives at most; 0 for none at all.
        obey_top: give fewer logprobs than asked for rather than refuse.
        names: ``ids`` or ``text``, how tokens are named.
        fault: says of which requests the answer is changed.
        refusals: (status, headers) for the next completions; they are used up.
        refuse_always: the same for every completion.
        cut_after: break connections off after so many tokens, once the first ``cut_from`` are answered.
        end_early: let streams end properly, but without a finish reason, after so many tokens.
        started: start of its process.
        max_len: context.
        tokenizes: have a tokenizer.

    """

    pace: float = 0.01
    burst: bool = False
    serial: bool = False
    unit: int | None = 64
    salted: bool = True
    tell: bool = True
    metrics: bool = True
    dev: bool = True
    top: int = 20
    obey_top: bool = False
    names: str = "ids"
    fault: Callable[[Seen], bool] = lambda seen: False
    refusals: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    refuse_always: int | None = None
    cut_after: int | None = None
    cut_from: int = 1
    end_early: int | None = None
    started: float = 1000.0
    max_len: int = 2048
    tokenizes: bool = True
    mode: bool = False
    models: tuple[str, ...] = ("fake",)


class Fake:
    """The server.  ``completions`` counts the requests that were answered or begun."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.completions = self.running = self.wide = self.hits = self.resets = 0
        self.bodies: list[dict] = []
        self._cache: set[tuple[str, tuple[int, ...]]] = set()
        self._turn = asyncio.Lock()

    def app(self) -> Starlette:
        routes = [
            Route("/health", self.version),
            Route("/v1/models", self.models),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/metrics", self.metrics),
            Route("/reset_prefix_cache", self.reset, methods=["POST"]),
            Route("/server_info", self.info),
            Route("/version", self.version),
        ]
        return Starlette(routes=routes)

    async def models(self, request: Request) -> Response:
        b = self.behaviour
        return JSONResponse(
            {
                "object": "list",
                "data": [
                    {"id": m, "object": "model", "created": 0, "owned_by": "x", "max_model_len": b.max_len}
                    for m in b.models
                ],
            }
        )

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": "0.0"})

    async def tokenize(self, request: Request) -> Response:
        if not self.behaviour.tokenizes:
            return JSONResponse({"error": {"message": "no tokenizer"}}, 501)
        text = (await request.json())["prompt"]
        return JSONResponse({"tokens": [ord(c) % VOCABULARY for c in text]})

    async def metrics(self, request: Request) -> Response:
        b = self.behaviour
        if not b.metrics:
            return Response(status_code=404)
        lines = [
            "# TYPE process_start_time_seconds gauge",
            f"process_start_time_seconds {b.started}",
            "# TYPE vllm:cache_config_info gauge",
            f'vllm:cache_config_info{{block_size="64",prefix_match_unit="{b.unit}"}} 1.0',
            "# TYPE vllm:prefix_cache_hits counter",
            f"vllm:prefix_cache_hits_total {self.hits}",
            "# TYPE vllm:iteration_tokens_total histogram",
            f'vllm:iteration_tokens_total_bucket{{le="64.0"}} {self.completions}',
            f'vllm:iteration_tokens_total_bucket{{le="+Inf"}} {self.completions + self.wide}',
            f"vllm:iteration_tokens_total_count {self.completions + self.wide}",
            "vllm:iteration_tokens_total_sum 0",
        ]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def reset(self, request: Request) -> Response:
        if not self.behaviour.dev:
            return Response(status_code=404)
        self._cache.clear()
        self.resets += 1
        return JSONResponse({"success": True})

    async def info(self, request: Request) -> Response:
        if not self.behaviour.dev:
            return Response(status_code=404)
        config = {
            "model_config": {"enforce_eager": True},
            "compilation_config": {"cudagraph_mode": 0},
            "scheduler_config": {"max_num_batched_tokens": 128, "async_scheduling": self.behaviour.mode},
            "device_config": {"device": "none"},
        }
        return JSONResponse({"vllm_config": config, "vllm_env": {"VLLM_BATCH_INVARIANT": True}})

    async def complete(self, request: Request) -> Response:
        b, body = self.behaviour, await request.json()
        self.bodies.append(body)
        if b.refuse_always or b.refusals:
            status, headers = b.refusals.pop(0) if b.refusals else (b.refuse_always, {})
            return JSONResponse({"error": {"message": "try later"}}, status, headers)
        if body["model"] not in b.models:
            return JSONResponse({"error": {"message": f"no model {body['model']}"}}, 404)
        if body["logprobs"] > b.top and not b.obey_top:
            return JSONResponse({"error": {"message": f"at most {b.top} logprobs"}}, 400)
        return StreamingResponse(self._stream(body), media_type="text/event-stream")

    async def _stream(self, body: dict) -> AsyncIterator[str]:
        b = self.behaviour
        if b.serial:
            async with self._turn:
                async for line in self._answer(body):
                    yield line
        else:
            async for line in self._answer(body):
                yield line

    async def _answer(self, body: dict) -> AsyncIterator[str]:
        b, prompt = self.behaviour, body["prompt"]
        cached = self._hit(body.get("cache_salt", "") if b.salted else "", prompt)
        self.hits += cached
        self.wide += len(prompt) - cached > 64
        seen = Seen(len(prompt), cached, self.running, self.completions)
        self.completions += 1
        self.running += 1
        try:
            tokens = answer_of(prompt, body["max_tokens"], min(b.top, body["logprobs"]), b.fault(seen))
            step = len(tokens) if b.burst else 1
            for start in range(0, len(tokens), step):
                await asyncio.sleep(b.pace)
                if start == b.cut_after and seen.before >= b.cut_from:
                    raise ConnectionError("planted: the connection breaks off")
                if start == b.end_early:
                    return
                last = start + step >= len(tokens)
                yield f"data: {json.dumps(self._chunk(tokens[start : start + step], last))}\n\n"
            yield f"data: {json.dumps(self._usage(len(prompt), len(tokens), cached))}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            self.running -= 1

    def _hit(self, salt: str, prompt: list[int]) -> int:
        unit = self.behaviour.unit
        if unit is None:
            return 0
        ends = range(unit, len(prompt) + 1, unit)
        hit = max(
            (e for e in ends if e < len(prompt) and (salt, tuple(prompt[:e])) in self._cache), default=0
        )
        self._cache |= {(salt, tuple(prompt[:e])) for e in ends}
        return hit

    def _chunk(self, tokens: list[tuple[int, dict[int, float]]], last: bool) -> dict:
        def name(token: int) -> str:
            return f"token_id:{token}" if self.behaviour.names == "ids" else f"<{token}>"

        choice = {"index": 0, "text": "x" * len(tokens), "finish_reason": "length" if last else None}
        if self.behaviour.names == "ids":
            choice["token_ids"] = [token for token, _ in tokens]
        choice["logprobs"] = self.behaviour.top and {
            "tokens": [name(token) for token, _ in tokens],
            "token_logprobs": [row[token] for token, row in tokens],
            "top_logprobs": [{name(t): value for t, value in row.items()} for _, row in tokens],
            "text_offset": [0] * len(tokens),
        }
        choice["logprobs"] = choice["logprobs"] or None
        return {"id": "x", "object": "text_completion", "created": 0, "model": "fake", "choices": [choice]}

    def _usage(self, prompt: int, completion: int, cached: int) -> dict:
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        if self.behaviour.tell:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return {
            "id": "x",
            "object": "text_completion",
            "created": 0,
            "model": "fake",
            "choices": [],
            "usage": usage,
        }


def answer_of(prompt: list[int], count: int, top: int, fault: bool) -> list[tuple[int, dict[int, float]]]:
    """Tokens with their logprobs; with a fault one logprob of position 2 is the next float32."""
    draw = random.Random(hashlib.sha256(repr(prompt).encode()).digest())
    answer = []
    for position in range(count):
        ids = draw.sample(range(VOCABULARY), max(1, top))
        row = {t: as_float32(-draw.random() - i) for i, t in enumerate(ids)}
        if fault and position == 2:
            row[ids[-1]] = next_float32(row[ids[-1]])
        answer.append((ids[0], row))
    return answer


def as_float32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def next_float32(value: float) -> float:
    """The float32 whose bit pattern is one more."""
    return struct.unpack("<f", struct.pack("<I", struct.unpack("<I", struct.pack("<f", value))[0] + 1))[0]


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[tuple[str, Fake]]:
    """Serve in a thread.  Yields the address and the server."""
    fake = Fake(behaviour)
    config = uvicorn.Config(fake.app(), port=0, log_level="critical", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline and thread.is_alive(), "the fake server did not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", fake
    finally:
        server.should_exit = True
        thread.join(10)


def main() -> None:
    """Take the place of ``vllm serve``, of whose options it knows two."""
    behaviour = Behaviour(started=time.time(), mode="--async-scheduling" in sys.argv)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    uvicorn.run(Fake(behaviour).app(), port=port, log_level="critical", timeout_graceful_shutdown=1)


if __name__ == "__main__":
    main()
