# In a vLLM branch: not needed (a test sets the options itself).
"""Asks a server what it is: model, sizes, mode, and how to get prompts its model can read."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import httpx
from openai import BadRequestError

from vllm_invariant.audit.corpus import corpus
from vllm_invariant.audit.counters import Counters
from vllm_invariant.audit.failure import AuditFailed, FewerLogprobs
from vllm_invariant.audit.geometry import Facts, Geometry, Sizes
from vllm_invariant.audit.prompts import SAFE_IDS, Prompt
from vllm_invariant.audit.traffic import Address, Line

TEXT = 30_000  # tokens of text that prompts are cut from
UNKNOWN_LENGTH = 2048  # context of a server that does not tell
TOP_LOGPROBS = (20, 5, 1)  # the most a server gives out of these is asked for


@dataclass(frozen=True)
class Survey:
    """What an audit needs to know before it asks.

    Attributes:
        address: of the server, with the model's name and the number of logprobs it gives.
        text: token ids of English text; empty if the server does not tokenize.

    """

    address: Address
    facts: Facts
    geometry: Geometry
    text: list[int]


async def survey(address: Address, sizes: Sizes) -> Survey:
    """Ask a server what it is.

    Args:
        address: of the server; an empty model stands for the only one it serves.
        sizes: given by hand.

    Raises:
        AuditFailed: if it cannot be reached, or does not serve the model.

    """
    async with Line(address) as line:
        served = await line.models()
        address = replace(address, model=_choose([m.id for m in served], address.model))
        max_len = next((getattr(m, "max_model_len", None) for m in served if m.id == address.model), None)
        counters = await line.counters() or Counters()
        config = await _json(line.http, "/server_info", config_format="json")
        version = await _json(line.http, "/version")
        text = await _text(line.http, address.model)
    return Survey(
        address=await _with_logprobs(address),
        facts=_facts(address.model, counters, config, version),
        geometry=_geometry(max_len or UNKNOWN_LENGTH, sizes, counters, config),
        text=text,
    )


def _choose(served: list[str], wanted: str) -> str:
    if wanted in served or (len(served) == 1 and not wanted):
        return wanted or served[0]
    names = ", ".join(served) or "nothing"
    raise AuditFailed(f"the server serves {names}; " + (f"not {wanted}" if wanted else "choose by --model"))


async def _json(http: httpx.AsyncClient, path: str, **query: str) -> Mapping[str, Any]:
    """An optional page of vLLM's; empty where it is missing or broken."""
    try:
        response = await http.get(path, params=query)
        found = response.json() if response.status_code == 200 else {}
    except (httpx.HTTPError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


async def _text(http: httpx.AsyncClient, model: str) -> list[int]:
    tokens: list[int] = []
    for text in corpus():
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        try:
            response = await http.post("/tokenize", json=body)
            tokens += response.json()["tokens"] if response.status_code == 200 else []
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return []
        if not tokens or len(tokens) > TEXT:
            break
    return tokens[:TEXT]


async def _with_logprobs(address: Address) -> Address:
    """Find out how many logprobs the server gives.

    Raises:
        AuditFailed: what it answered to the most modest request.

    """
    for top in TOP_LOGPROBS:
        found = replace(address, top=top)
        async with Line(found) as line:
            try:
                await line.ask(Prompt(tuple(SAFE_IDS[:3]), 1))
            except AuditFailed as error:
                too_many = isinstance(error, FewerLogprobs) or isinstance(error.__cause__, BadRequestError)
                if not too_many or top == TOP_LOGPROBS[-1]:
                    raise
            else:
                return found
    raise AssertionError("unreachable")


def _geometry(max_len: int, sizes: Sizes, counters: Counters, config: Mapping[str, Any]) -> Geometry:
    cache = counters.cache
    block = sizes.block or _number(cache.get("block_size"))
    scheduler = config.get("vllm_config", {}).get("scheduler_config", {})
    told = scheduler.get("max_num_scheduled_tokens") or scheduler.get("max_num_batched_tokens")
    found = Geometry(
        max_len=max_len,
        block=block,
        unit=_number(cache.get("prefix_match_unit")) or block,
        budget=sizes.budget or told,
    )
    return replace(found, grid=sizes.grid) if sizes.grid else found


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def _facts(model: str, counters: Counters, config: Mapping[str, Any], version: Mapping[str, Any]) -> Facts:
    facts = Facts(model=model, version=version.get("version"), started=counters.started)
    if not (vllm := config.get("vllm_config")):
        return facts
    mode = {
        "eager": vllm.get("model_config", {}).get("enforce_eager"),
        "cudagraph mode": vllm.get("compilation_config", {}).get("cudagraph_mode"),
        "async scheduling": vllm.get("scheduler_config", {}).get("async_scheduling"),
    }
    names = (
        vllm.get("device_config", {}).get("device"),
        config.get("system_env", {}).get("nvidia_gpu_models"),
    )
    return replace(
        facts,
        flag=config.get("vllm_env", {}).get("VLLM_BATCH_INVARIANT"),
        device=", ".join(str(name) for name in names if name) or None,
        mode={name: str(value) for name, value in mode.items()},
    )
