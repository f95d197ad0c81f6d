# In a vLLM branch: tests/v1/determinism/utils.py.
"""Strangers who arrive at exponential intervals while something else is asked."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from vllm_invariant.audit.prompts import Prompt
from vllm_invariant.audit.traffic import Flight, Line, hang_up

MOST = 4  # under way at once; where more wait, none is served while a short answer lasts


@asynccontextmanager
async def poisson(
    line: Line, draw: random.Random, mean_gap: float, stranger: Callable[[], Prompt]
) -> AsyncIterator[list[Flight]]:
    """Send strangers for as long as the block runs, then hang up on those left.

    Args:
        line: to the server.
        draw: of the gaps.
        mean_gap: seconds between two arrivals, on average.
        stranger: gives each request.

    Yields:
        The strangers that have arrived so far.

    """
    flights: list[Flight] = []

    async def arrive() -> None:
        while True:
            await asyncio.sleep(draw.expovariate(1 / mean_gap))
            if sum(not flight.done for flight in flights) < MOST:
                flights.append(line.send(stranger(), apart=True))

    arrivals = asyncio.create_task(arrive())
    try:
        yield flights
    finally:
        arrivals.cancel()
        await asyncio.gather(arrivals, return_exceptions=True)
        await hang_up(flights)
