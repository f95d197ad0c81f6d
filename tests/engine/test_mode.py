"""Axes boot and mode: another process, empty caches, compiled, and a real server; the flag unset."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_form import RECURRENT
from tests.harness import device
from tests.harness.compare import assert_same
from tests.harness.engine import SOLO, Ask, Engines, asks
from tests.harness.process import (
    Child,
    Round,
    decoding,
    empty_caches,
    metrics,
    post,
    post_all,
    reset_cache,
    run_child,
)
from tests.harness.prompts import prompt
from vllm_invariant.metrics import HELP

pytestmark = [pytest.mark.engine, pytest.mark.slow]

REQUESTS = asks([prompt(n, seed=90) for n in (1, 63, 65, 129, 300, 700)], max_tokens=12)


def hits(unit: int) -> list[int]:
    """Tokens taken from a cache of their own prompts that is hit every ``unit`` tokens."""
    return [(len(request.prompt) - 1) // unit * unit for request in REQUESTS]


# Options of an engine, and where its prefix cache is hit.
with_each_arithmetic = pytest.mark.parametrize(
    ("options", "unit"), [({}, 64), (RECURRENT, 16)], ids=["chunk", "recurrent"]
)


def _assert_ours(child: Child, mode: str) -> None:
    assert child.facts["mode"] == mode
    assert child.facts["scheduler"].startswith("vllm_invariant.scheduler.Grid")
    assert child.facts["layer"].startswith("vllm_invariant.layer.")
    assert child.facts["gdn backend"] == "QWEN_GDN_ATTN"
    assert child.facts["attention"].endswith(device.ATTENTION[0])
    assert child.facts["linears by rows"] == (device.NAME == "cuda")


@with_each_arithmetic
def test_another_process_with_empty_caches(
    engines: Engines, checkpoint: Path, tmp_path: Path, options: dict[str, Any], unit: int
) -> None:
    """Axis boot: cold together, then hits together, have the bits of this process."""
    expected = engines.get(**SOLO, **options).alone(REQUESTS)
    engines.close()
    rounds = [Round(REQUESTS), Round(REQUESTS, cold=False)]
    child = run_child(checkpoint, tmp_path, rounds, empty_caches(tmp_path / "caches"), **options)
    _assert_ours(child, "NONE")
    cold, warm = child.rounds
    assert [r.cached for r in cold] == [0] * len(REQUESTS)
    assert [r.cached for r in warm] == hits(unit)
    assert_same(expected, cold, "cold")
    assert_same(expected, warm, "warm")


@with_each_arithmetic
def test_a_compiled_engine(
    engines: Engines, checkpoint: Path, tmp_path: Path, options: dict[str, Any], unit: int
) -> None:
    """Compiled: alone, together and on hits agree, in one boot and in another with empty caches.

    torch.compile rounds in an order of its own, so a compiled engine is compared with itself.
    """
    engines.close()
    alone = [Round([request]) for request in REQUESTS]
    boots = []
    for name, rounds in (
        ("first", [*alone, Round(REQUESTS), Round(REQUESTS, cold=False)]),
        ("second", [Round(REQUESTS)]),
    ):
        folder = tmp_path / name
        folder.mkdir()
        caches = empty_caches(folder / "caches")
        child = run_child(checkpoint, folder, rounds, caches, enforce_eager=False, **options)
        _assert_ours(child, device.COMPILED)
        boots.append(child.rounds)
    expected = [result for each in boots[0][: len(REQUESTS)] for result in each]
    together, warm = boots[0][len(REQUESTS) :]
    assert all(result.cached == 0 for result in expected + together)
    assert [r.cached for r in warm] == hits(unit)
    assert_same(expected, together, "together")
    assert_same(expected, warm, "on hits")
    assert_same(expected, boots[1][0], "in another boot")


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real server, its engine in a process of its own."""
    from vllm_invariant.audit.server import running
    from vllm_invariant.demo.run import launch

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
        with running(launch(checkpoint), tmp_path_factory.mktemp("server") / "log") as started:
            yield started.url


def test_a_server_gives_the_bits_of_an_engine_in_process(engines: Engines, server: str) -> None:
    """Over HTTP: alone, among others, cold and on hits."""
    needle = Ask(tuple(prompt(700, seed=91)), max_tokens=160)
    expected = engines.solo([needle, *REQUESTS])
    reset_cache(server)
    assert_same(expected[:1], [post(server, needle).result], "alone, cold")

    reset_cache(server)
    replies = post_all(server, [needle, *REQUESTS], between=0.05)
    assert all(reply.result.cached == 0 for reply in replies)
    inside = [r for r in replies[1:] if r.sent > replies[0].sent and r.done < replies[0].done]
    assert inside, "void: no other request was served while the needle was"
    assert_same(expected, [reply.result for reply in replies], "among others, cold")

    replies = post_all(server, [needle, *REQUESTS])
    assert [reply.result.cached for reply in replies] == [640, *hits(64)]
    assert_same(expected, [reply.result for reply in replies], "among others, on hits")


def _costs(server: str) -> dict[str, float]:
    """The package's own counters."""
    found = metrics(server)
    return {name: found[f"vllm:invariant_{name}_total"] for name in HELP}


def test_a_server_shows_what_the_promise_costs(engines: Engines, server: str) -> None:
    """Each counter at /metrics moves when, and only when, what it counts was made to happen."""
    b = engines.block
    reset_cache(server)
    seen = [_costs(server)]

    def moved() -> dict[str, float]:
        seen.append(_costs(server))
        return {name: seen[-1][name] - seen[-2][name] for name in HELP if seen[-1][name] != seen[-2][name]}

    post(server, Ask(tuple(prompt(b - 20, seed=93)), max_tokens=15))
    assert moved() == {}
    post(server, Ask(tuple(prompt(b - 20, seed=94)), max_tokens=30))
    assert moved() == {"unpublished_decode_blocks": 1}, "the last token of a block was decoded"

    # One prompt leaves its keys and values at every block, its state at its end: of no use to a sibling.
    shared = prompt(b + 130, seed=95)
    for i, length in enumerate((200, 150)):
        reply = post(server, Ask(tuple(shared + prompt(length, seed=96)), max_tokens=2))
        assert reply.result.cached == 0
        assert moved() == ({} if i == 0 else {"floored_hit_tokens": b})

    needle = Ask(tuple(prompt(50, seed=97)), max_tokens=3500)  # ends when it is hung up on
    before = _generated(server)
    with decoding(server, needle, tokens=20):
        reset_cache(server, running=True)
        generated = _generated(server)
        while _generated(server) < generated + 20:  # replay is over: these are new
            time.sleep(0.05)
    cost = moved()
    # Blocks that decode filled: none, unless the machine was slow to ask.
    blocks = int(len(needle.prompt) + _generated(server) - before) // b
    assert 19 <= cost.pop("replayed_tokens") < needle.max_tokens
    assert cost.pop("unpublished_decode_blocks", 0) <= 2 * blocks, "each once, and once more by replay"
    assert cost == {}

    # 512 tokens are whole grid steps; a decode takes one of them, and what is left for the last of
    # several prompts is 63 tokens or fewer.
    with decoding(server, needle, tokens=20):
        post_all(server, [Ask(tuple(prompt(2000, seed=98 + i)), max_tokens=2) for i in range(4)])
    assert moved().get("grid_waits", 0) > 0


def _generated(server: str) -> float:
    return metrics(server)["vllm:generation_tokens_total"]


def test_a_client_that_leaves(engines: Engines, server: str) -> None:
    """Hung up on during its decode, and asked again: what it left in the cache is right."""
    needle = Ask(tuple(prompt(700, seed=92)), max_tokens=3000)
    again = Ask(needle.prompt, max_tokens=16)
    expected = engines.solo([again])
    reset_cache(server)
    before = _generated(server)
    with decoding(server, needle, tokens=5):
        pass
    assert _generated(server) - before < needle.max_tokens, "void: it ran to its end"
    reply = post(server, again)
    assert reply.result.cached == 640
    assert_same(expected, [reply.result])


def test_without_the_flag_everything_is_stock(checkpoint: Path, tmp_path: Path) -> None:
    """The plugin is loaded, returns at once, and leaves no trace in a running engine."""
    unset: dict[str, str | None] = {"VLLM_BATCH_INVARIANT": None}
    rounds = [Round(asks([prompt(70)], max_tokens=2))]
    child = run_child(checkpoint, tmp_path, rounds, unset, **device.STOCK_OPTIONS)
    assert child.facts["scheduler"].startswith("vllm.v1.core.sched.")
    assert child.facts["layer"].startswith("vllm.model_executor.layers.mamba.gdn.")
    assert child.facts["gdn backend"] == "GDN_ATTN"
    assert child.facts["attention"].startswith("vllm.v1.attention.backends.")
    assert child.facts["attention"].endswith(device.ATTENTION[1])
    assert not child.facts["linears by rows"]
    assert set(child.facts["plugin modules"]) <= {"vllm_invariant.plugin", "vllm_invariant.cpu_setup"}


def test_under_the_flag_stock_alone_refuses(checkpoint: Path, tmp_path: Path) -> None:
    """Kept out, the plugin changes nothing about stock's own refusal of GDN."""
    from vllm_invariant.demo.refusal import stock_refusal

    refusal = stock_refusal(checkpoint, tmp_path / "log")
    assert refusal is not None, (tmp_path / "log").read_text()[-2000:]
    assert "GDN_ATTN" in refusal
