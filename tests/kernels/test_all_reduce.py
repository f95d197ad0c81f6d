"""The all-reduce of two ranks: one algorithm, and a row's sum the same in a message of any length.

Two numbers have one sum whatever the order, so with two ranks bits alone do not tell algorithms apart.
That is why each test also says which kernel ran: stock's custom one of one stage, and never NCCL.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.gpu import TWO_GPUS
from tests.tolerance import assert_bitwise
from vllm_invariant.audit.server import free_port

pytestmark = list(TWO_GPUS)

RANKS, MOST = 2, 4096
# Stock's buffer holds 8 MiB: 4096 rows of 1024 in one piece, 2048 rows of 2048.
COUNTS = (1, 2, 3, 7, 8, 16, 31, 33, 64, 127, 129, 256, 511, 513, 1024, 2047, 2048, 2049, 4095, MOST)
HIDDEN = (1024, 2048)


def _join(rank: int, port: int) -> Any:
    """Set up this process as a worker of two does; returns stock's coordinator of the ranks."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.determinism.batch_invariant import init_batch_invariance

    torch.cuda.set_device(rank)
    init_batch_invariance()
    with set_current_vllm_config(VllmConfig()):
        address = f"tcp://127.0.0.1:{port}"
        parallel_state.init_distributed_environment(RANKS, rank, address, rank, "nccl")
        parallel_state.initialize_model_parallel(RANKS)
    return parallel_state.get_tp_group()


def _messages(hidden: int) -> list[torch.Tensor]:
    """The (MOST, hidden) message of each rank, the same on every rank."""
    made = [torch.randn(MOST, hidden, generator=torch.Generator().manual_seed(r)) for r in range(RANKS)]
    return [message.bfloat16().cuda() for message in made]


def _total(messages: list[torch.Tensor]) -> torch.Tensor:
    return sum(message.float() for message in messages).bfloat16()


def _kernels(work: Callable[[], Any]) -> set[str]:
    """Names of the kernels that ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    return {event.key for event in profile.key_averages()}


def _assert_one_stage(names: set[str]) -> None:
    sums = {name for name in names if "reduce" in name.lower() or "nccl" in name.lower()}
    assert sums and all("cross_device_reduce_1stage" in name for name in sums), names


def eager(rank: int, port: int) -> None:
    """Messages of every length, from the first row on and from the middle."""
    group = _join(rank, port)
    for hidden in HIDDEN:
        messages = _messages(hidden)
        mine, total = messages[rank], _total(messages)
        for count in COUNTS:
            for start in {0, (MOST - count) // 2}:
                got = group.all_reduce(mine[start : start + count].clone())
                assert_bitwise(got, total[start : start + count], f"{count} rows of {hidden} from {start}")
        lengths = [mine[:count].clone() for count in COUNTS]
        _assert_one_stage(_kernels(lambda lengths=lengths: [group.all_reduce(each) for each in lengths]))


def replayed(rank: int, port: int) -> None:
    """The same from CUDA graphs, one a length, whose messages change between replays."""
    from vllm.distributed.parallel_state import graph_capture

    group = _join(rank, port)
    for hidden in HIDDEN:
        messages = _messages(hidden)
        mine, total = messages[rank], _total(messages)
        graphs = []
        with graph_capture(device=torch.device("cuda", rank)) as context:
            for count in COUNTS:
                message = torch.zeros(count, hidden, dtype=torch.bfloat16, device="cuda")
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=context.stream):
                    out = group.all_reduce(message)
                graphs.append((graph, message, out))
        for start in (0, MOST // 2):
            for graph, message, out in graphs:
                rows = slice(min(start, MOST - len(message)), None)
                message.copy_(mine[rows][: len(message)])
                graph.replay()
                torch.cuda.synchronize()
                assert_bitwise(out, total[rows][: len(message)], f"{len(message)} rows of {hidden}, replayed")
        _assert_one_stage(_kernels(lambda graphs=graphs: [graph.replay() for graph, *_ in graphs]))


def refused(rank: int, port: int) -> None:
    """A worker whose custom all-reduce turned itself off says so, and so does one of an odd width."""
    from vllm_invariant import cuda

    group = _join(rank, port)
    for hidden in HIDDEN:
        cuda.check_all_reduce(group, hidden)
    with pytest.raises(ValueError, match="hidden size that is a multiple of 8"):
        cuda.check_all_reduce(group, 1020)
    custom = group.device_communicator.ca_comm
    custom.disabled = True
    with pytest.raises(ValueError, match=r"vLLM's custom all-reduce .*; use --tensor-parallel-size 1"):
        cuda.check_all_reduce(group, HIDDEN[0])
    out = group.all_reduce(torch.ones(8, HIDDEN[0], dtype=torch.bfloat16, device="cuda"))
    assert bool((out == RANKS).all())
    custom.disabled = False


@pytest.mark.parametrize("work", [eager, replayed, refused], ids=lambda work: work.__name__)
def test_two_ranks(work: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks do the work, each in a process of its own."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    torch.multiprocessing.spawn(work, args=(free_port(),), nprocs=RANKS)
