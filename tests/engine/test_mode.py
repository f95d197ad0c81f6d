"""Axes boot and mode: another process, empty caches, compiled, and a real server; the flag unset."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import device
from tests.harness.compare import assert_same
from tests.harness.engine import Ask, Engines, asks
from tests.harness.process import Child, Round, empty_caches, post, post_all, reset_cache, run_child
from tests.harness.prompts import prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow]

REQUESTS = asks([prompt(n, seed=90) for n in (1, 63, 65, 129, 300, 700)], max_tokens=12)


HITS = [(len(request.prompt) - 1) // 64 * 64 for request in REQUESTS]


def _assert_ours(child: Child, mode: str) -> None:
    assert child.facts["mode"] == mode
    assert child.facts["scheduler"].startswith("vllm_invariant.scheduler.Grid")
    assert child.facts["layer"].startswith("vllm_invariant.layer.")
    assert child.facts["gdn backend"] == "QWEN_GDN_ATTN"
    assert child.facts["attention"].endswith(device.ATTENTION[0])


def test_another_process_with_empty_caches(engines: Engines, checkpoint: Path, tmp_path: Path) -> None:
    """Axis boot: cold together, then hits together, have the bits of this process."""
    expected = engines.solo(REQUESTS)
    engines.close()
    rounds = [Round(REQUESTS), Round(REQUESTS, cold=False)]
    child = run_child(checkpoint, tmp_path, rounds, empty_caches(tmp_path / "caches"))
    _assert_ours(child, "NONE")
    cold, warm = child.rounds
    assert [r.cached for r in cold] == [0] * len(REQUESTS)
    assert [r.cached for r in warm] == HITS
    assert_same(expected, cold, "cold")
    assert_same(expected, warm, "warm")


def test_a_compiled_engine(engines: Engines, checkpoint: Path, tmp_path: Path) -> None:
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
        child = run_child(checkpoint, folder, rounds, empty_caches(folder / "caches"), enforce_eager=False)
        _assert_ours(child, device.COMPILED)
        boots.append(child.rounds)
    expected = [result for each in boots[0][: len(REQUESTS)] for result in each]
    together, warm = boots[0][len(REQUESTS) :]
    assert all(result.cached == 0 for result in expected + together)
    assert [r.cached for r in warm] == HITS
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
    needle = Ask(tuple(prompt(700, seed=91)), max_tokens=64)
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
    assert [reply.result.cached for reply in replies] == [640, *HITS]
    assert_same(expected, [reply.result for reply in replies], "among others, on hits")


def test_without_the_flag_everything_is_stock(checkpoint: Path, tmp_path: Path) -> None:
    """The plugin is loaded, returns at once, and leaves no trace in a running engine."""
    unset: dict[str, str | None] = {"VLLM_BATCH_INVARIANT": None}
    child = run_child(checkpoint, tmp_path, [Round(asks([prompt(70)], max_tokens=2))], unset)
    assert child.facts["scheduler"].startswith("vllm.v1.core.sched.")
    assert child.facts["layer"].startswith("vllm.model_executor.layers.mamba.gdn.")
    assert child.facts["gdn backend"] == "GDN_ATTN"
    assert child.facts["attention"].startswith("vllm.v1.attention.backends.")
    assert child.facts["attention"].endswith(device.ATTENTION[1])
    assert set(child.facts["plugin modules"]) <= {"vllm_invariant.plugin", "vllm_invariant.cpu_setup"}


def test_under_the_flag_stock_alone_refuses(checkpoint: Path, tmp_path: Path) -> None:
    """Kept out, the plugin changes nothing about stock's own refusal of GDN."""
    from vllm_invariant.demo.refusal import stock_refusal

    refusal = stock_refusal(checkpoint, tmp_path / "log")
    assert refusal is not None, (tmp_path / "log").read_text()[-2000:]
    assert "GDN_ATTN" in refusal
