"""Ranks that would compute with different things are told apart, by the name of what differs."""

import contextlib
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from vllm_invariant import agreement
from vllm_invariant.arithmetic import CHUNK, RECURRENT
from vllm_invariant.ops import launch, moe_launch

SAME = {"torch": "2.11", "device": "H200"}


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The facts of this process."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    for name in agreement.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return agreement.facts(CHUNK)


def test_equal_ranks() -> None:
    assert agreement.difference([SAME]) is None
    assert agreement.difference([SAME, dict(SAME)]) is None


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ([{**SAME, "torch": "2.10"}], "torch: 2.11 on rank 0, 2.10 on rank 1"),
        ([{**SAME, "device": "H100"}, SAME], "device: H200 on rank 0 and 2, H100 on rank 1"),
        ([{"torch": "2.11"}], "device: H200 on rank 0, unknown on rank 1"),
        ([{**SAME, "more": "x"}], "more: unknown on rank 0, x on rank 1"),
    ],
)
def test_a_difference_is_named(others: list[dict[str, str]], said: str) -> None:
    assert agreement.difference([SAME, *others]) == said


def changed_table(patch: pytest.MonkeyPatch) -> None:
    key = next(iter(launch.TABLE))
    row = launch.TABLE[key] | {"cumsum": launch.Launch(warps=8)}
    patch.setattr(launch, "TABLE", launch.TABLE | {key: row})


def changed_experts(patch: pytest.MonkeyPatch) -> None:
    key = next(iter(moe_launch.TABLE))
    patch.setattr(moe_launch, "TABLE", moe_launch.TABLE | {key: moe_launch.TABLE[key][1:]})


CHANGES = {
    "torch": lambda patch: patch.setattr(torch, "__version__", "0"),
    "vllm_invariant": lambda patch: patch.setattr(agreement.vllm_invariant, "__version__", "0"),
    "launch table": changed_table,
    "launch table of the experts": changed_experts,
    **{
        f"environment variable {name}": lambda patch, name=name: patch.setenv(name, "another")
        for name in agreement.VARIABLES
    },
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_shows_in_its_fact_alone(
    name: str, mine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    CHANGES[name](monkeypatch)
    other = agreement.facts(CHUNK)
    assert {fact for fact in mine if mine[fact] != other[fact]} == {name}


def test_the_recurrence_is_told_by_its_library(
    mine: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = tmp_path / "library.so"
    monkeypatch.setattr(agreement.recurrent_cuda, "LIBRARY", library)
    monkeypatch.setattr(agreement.recurrent_cuda, "is_available", library.exists)
    seen = {agreement.facts(RECURRENT)["compiled recurrence"]}
    for content in (b"one", b"two"):
        library.write_bytes(content)
        seen.add(agreement.facts(RECURRENT)["compiled recurrence"])
    assert len(seen) == 3 and mine["compiled recurrence"] == "not used"


def test_a_fake_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer does not follow the rank that asks."""
    ranks = [SAME, {**SAME, "torch": "2.10"}]
    monkeypatch.setattr(dist, "get_world_size", lambda group: len(group))

    def all_gather_object(found: list[object], mine: object, group: list[object]) -> None:
        assert mine in group
        found[:] = group

    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    agreement.check(SAME, [SAME, SAME])
    messages = set()
    for rank in ranks:
        with pytest.raises(ValueError) as error:
            agreement.check(rank, ranks)
        messages.add(str(error.value))
    (message,) = messages
    assert "torch: 2.11 on rank 0, 2.10 on rank 1" in message and "; use the same on every rank" in message


def rank_of_two(rank: int, meeting: str, planted: bool) -> None:
    """One of two processes over gloo, which meet in a file; with ``planted`` they differ.

    Tensors are made on another device meanwhile, as while a model is built on a GPU.
    """
    store = dist.FileStore(meeting, 2)
    dist.init_process_group("gloo", store=store, world_size=2, rank=rank)
    mine = {**SAME, "launch table": f"{rank if planted else 0}"}
    differs = pytest.raises(ValueError, match=re.escape("launch table: 0 on rank 0, 1 on rank 1"))
    with torch.device("meta"), differs if planted else contextlib.nullcontext():
        agreement.check(mine, dist.group.WORLD)
    # Who ends first takes the connection along, and the other may not have read all of it.
    store.set(f"rank {rank} is done", "")
    store.wait([f"rank {1 - rank} is done"])


@pytest.mark.parametrize("planted", [False, True], ids=["same", "planted"])
def test_two_processes(planted: bool, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(rank_of_two, args=(str(tmp_path / "meeting"), planted), nprocs=2)
