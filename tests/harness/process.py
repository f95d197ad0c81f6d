"""Engines in other processes: fresh ones, compiled ones, stock ones, and a server."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.harness import device
from tests.harness.compare import Result
from tests.harness.engine import Ask
from vllm_invariant.audit import counters

ROOT = Path(__file__).parents[2]
LIMIT = 600.0  # seconds; a compiled engine on a busy machine

# As it was before an engine of this process changed it.
_CLEAN = dict(os.environ)

# Everything a kernel compiler keeps between two boots.
CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")


@dataclass(frozen=True)
class Round:
    """Requests that run together; rounds run one after another.  ``cold``: from an empty cache."""

    asks: Sequence[Ask]
    cold: bool = True


@dataclass(frozen=True)
class Child:
    """What another process saw.

    Attributes:
        facts: the engine's classes and modes.
        rounds: results, round by round.
        mixed: by round, the steps in which a prefill joined a decode of the round's first request.

    """

    facts: dict[str, Any]
    rounds: list[list[Result]]
    mixed: list[int]


def empty_caches(folder: Path) -> dict[str, str]:
    """Environment in which nothing is cached yet."""
    return {name: str(folder / name.lower()) for name in CACHES}


def run_module(
    *arguments: str, environment: Mapping[str, str | None] | None = None, text: str | None = None
) -> None:
    """Run ``python -m`` with these arguments from the tree's root, to its end.

    Args:
        arguments: module and its arguments.
        environment: changes to the environment; None unsets a variable.
        text: its standard input.

    Raises:
        AssertionError: if the process fails; the message ends with its last output.

    """
    merged: dict[str, str | None] = {**_CLEAN, **device.ENVIRONMENT, **(environment or {})}
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        input=text,
        cwd=ROOT,
        env={name: value for name, value in merged.items() if value is not None},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, f"the child failed:\n{done.stdout[-20_000:]}"


def run_child(
    model: Path,
    folder: Path,
    rounds: Sequence[Round],
    environment: Mapping[str, str | None] | None = None,
    **options: Any,
) -> Child:
    """Run rounds of requests in a fresh process.

    Args:
        model: checkpoint.
        folder: an empty folder for the answer.
        rounds: what to run.
        environment: changes to the environment; None unsets a variable.
        options: engine options.

    Raises:
        AssertionError: if the process fails; the message ends with its last output.

    """
    out = folder / "seen.json"
    job = {
        "model": str(model),
        "options": options,
        "out": str(out),
        "rounds": [
            {
                "cold": each.cold,
                "asks": [asdict(ask) for ask in each.asks],
            }
            for each in rounds
        ],
    }
    run_module("tests.harness.child", environment=environment, text=json.dumps(job))
    seen = json.loads(out.read_text())
    results = [[Result.from_json(r) for r in run] for run in seen["rounds"]]
    return Child(seen["facts"], results, seen["mixed"])


@dataclass(frozen=True)
class Reply:
    """A server's answer, with the seconds at which it was asked for and had."""

    result: Result
    sent: float
    done: float


# One for all threads: a client of its own per request is slow to make, and would send it late.
_client = httpx.Client(timeout=300, limits=httpx.Limits(max_connections=None))


def _body(request: Ask, **more: Any) -> dict[str, Any]:
    return {
        "model": "demo",
        "prompt": list(request.prompt),
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "seed": request.seed,
        "logprobs": 20,
        "ignore_eos": True,
        "return_tokens_as_token_ids": True,
        **more,
    }


def post(url: str, request: Ask) -> Reply:
    """Send one request to a server's completions API."""
    sent = time.monotonic()
    response = _client.post(f"{url}/v1/completions", json=_body(request))
    response.raise_for_status()
    body = response.json()
    logprobs = body["choices"][0]["logprobs"]
    result = Result.of(
        [_token(t) for t in logprobs["tokens"]],
        [{_token(t): value for t, value in position.items()} for position in logprobs["top_logprobs"]],
        (body["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
    )
    return Reply(result, sent, time.monotonic())


def post_all(url: str, requests: Sequence[Ask], between: float = 0.0) -> list[Reply]:
    """Send requests at once, or ``between`` seconds apart, each in a thread of its own."""
    with ThreadPoolExecutor(len(requests)) as pool:
        futures = []
        for request in requests:
            futures.append(pool.submit(post, url, request))
            time.sleep(between)
        return [future.result() for future in futures]


def reset_cache(url: str, *, running: bool = False) -> None:
    """Empty a server's prefix cache; ``running`` preempts all requests for it."""
    response = _client.post(f"{url}/reset_prefix_cache", params={"reset_running_requests": running})
    response.raise_for_status()
    assert response.json()["success"], "the prefix cache is in use"


def metrics(url: str) -> dict[str, float]:
    """A server's metrics by name, summed over their labels."""
    response = _client.get(f"{url}/metrics")
    response.raise_for_status()
    return counters.totals(response.text)


@contextmanager
def decoding(url: str, request: Ask, tokens: int) -> Iterator[None]:
    """While a stream runs, once some of its tokens have come; at the end it is hung up on.

    The server has noticed when this returns.  A request that is much too long to end by itself
    needs no luck to be still running when others come.
    """
    with _client.stream("POST", f"{url}/v1/completions", json=_body(request, stream=True)) as reply:
        reply.raise_for_status()
        lines = (line for line in reply.iter_lines() if line.startswith("data: "))
        for _ in range(tokens):
            assert next(lines) != "data: [DONE]", "it had finished already"
        yield
        assert metrics(url)["vllm:num_requests_running"], "void: it had finished"
    while metrics(url)["vllm:num_requests_running"]:
        time.sleep(0.1)


def _token(text: str) -> int:
    return int(text.removeprefix("token_id:"))
