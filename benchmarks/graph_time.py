"""Time of a GPU launch, replayed from a CUDA graph so that the host's share does not count."""

from collections.abc import Callable

import torch


def replayed(launch: Callable[[int], object], launches: int, replays: int) -> list[float]:
    """Microseconds a launch, one figure a replay; a first replay is not counted.

    Args:
        launch: called with its number in the graph, and once before, which compiles.
        launches: in the graph.
        replays: figures to take.

    """
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            launch(i)
    times = []
    for _ in range(replays + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    return times[1:]
