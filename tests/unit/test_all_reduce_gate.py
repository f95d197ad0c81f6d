"""Where stock's custom all-reduce would not take every message, the worker does not start.

Stock's own gate is asked, on an object that never saw a GPU.
"""

from types import SimpleNamespace as Fake
from typing import Any

import pytest

pytest.importorskip("vllm.distributed", reason="vLLM is not installed")

from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

from vllm_invariant import cuda


def group(**changes: Any) -> Fake:
    """Two ranks whose custom all-reduce is in the state that it has on two GPUs under the flag."""
    custom = CustomAllreduce.__new__(CustomAllreduce)
    state = {"disabled": False, "world_size": 2, "fully_connected": True, "batch_invariant": True}
    vars(custom).update(state | {"max_size": 8 << 20, "_ptr": 0} | changes)
    return Fake(world_size=2, device_communicator=Fake(ca_comm=custom))


@pytest.mark.parametrize("hidden", [8, 1024, 2048])
def test_it_takes_every_message(hidden: int) -> None:
    cuda.check_all_reduce(group(), hidden)
    cuda.check_all_reduce(group(fully_connected=False), hidden)


@pytest.mark.parametrize(
    ("ranks", "hidden"),
    [
        (group(disabled=True), 1024),
        (group(batch_invariant=False), 1024),  # then a long message goes to NCCL
        (group(), 1020),  # then an odd number of tokens does
        (Fake(world_size=2, device_communicator=Fake(ca_comm=None)), 1024),
        (Fake(world_size=2, device_communicator=None), 1024),
    ],
    ids=["off", "by-size", "odd-width", "none", "no-communicator"],
)
def test_otherwise_it_is_refused(ranks: Fake, hidden: int) -> None:
    with pytest.raises(ValueError, match=r"VLLM_BATCH_INVARIANT=1: --tensor-parallel-size 2 .*; use "):
        cuda.check_all_reduce(ranks, hidden)
