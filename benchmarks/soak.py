"""Thousands of random requests on one engine, and among them a canary whose bits must never change (F39).

    OMP_WAIT_POLICY=passive python -m benchmarks.soak [--requests 3000] [--seed 0]

A tiny random model on a cache too small for its traffic: prompts share prefixes and come again, requests are
aborted, preempted for want of blocks and by force, the cache is emptied under way.  Every 25th request is
the canary; other requests that come again are compared with their first answer too.

Exit code 0 only if nothing differs, every logprob is finite, and each of these paths was really taken.
"""

import argparse
import math
import random
import struct
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import report
from tests.harness import device
from tests.harness.compare import Result, first_difference
from tests.harness.engine import Ask, Engine, result_of
from vllm_invariant.demo.checkpoint import make_checkpoint

CANARY_EVERY = 25
VOCABULARY = 2000
IN_FLIGHT = 10  # requests waiting or running
BLOCK = 320
OPTIONS: dict[str, Any] = {
    "max_model_len": 4 * BLOCK,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 44,
}

# Each must have been seen by the end; otherwise the run proves nothing.
PATHS = (
    "canaries",
    "canaries that hit",
    "canaries from scratch",
    "canaries preempted",
    "requests that hit",
    "requests that came again",
    "aborted",
    "preempted by force",
    "preempted for want of blocks",
    "blocks evicted from the prefix cache",
    "times the cache was emptied",
    "steps of prefill and decode at once",
    "tokens replayed",
)


class Traffic:
    """A random, reproducible stream of requests."""

    def __init__(self, seed: int) -> None:
        self.source = random.Random(seed)
        self.prefixes = [self._tokens(length) for length in (64, 130, 320, 330, 500)]
        self.canary = Ask(self._tokens(390), max_tokens=24)
        self.sent: list[Ask] = []

    def _tokens(self, length: int) -> tuple[int, ...]:
        return tuple(self.source.randrange(1, VOCABULARY) for _ in range(length))

    def next(self) -> Ask:
        """The canary, an earlier request once more, one behind a shared prefix, or a new one."""
        number = len(self.sent)
        kind = self.source.random()
        if number % CANARY_EVERY == 0 or number % (4 * CANARY_EVERY) == 3:  # the latter may hit the former
            ask = self.canary
        elif kind < 0.1:
            ask = self.source.choice(self.sent[-12:])
        else:
            prefix = self.prefixes[number // 40 % len(self.prefixes)] if kind < 0.4 else ()
            length = min(int(self.source.lognormvariate(5.0, 1.0)) + 1, 1000 - len(prefix))
            tokens = 1 + int(self.source.expovariate(1 / 14))
            ask = Ask(prefix + self._tokens(length), min(tokens, 120))
            if kind > 0.7:
                ask = replace(ask, temperature=0.8, seed=number)
        self.sent.append(ask)
        return ask


@dataclass
class Flight:
    """A request under way.  ``abort_at``: the engine step before which its client leaves."""

    ask: Ask
    id: str
    abort_at: float = math.inf
    forced: int = 0


class Soak:
    """Runs `Traffic` through one engine and judges every answer."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.traffic = engine, Traffic(seed)
        self.source = random.Random(seed + 1)
        self.flights: dict[str, Flight] = {}
        self.first: dict[Ask, Result] = {}
        self.counts: Counter[str] = Counter()
        self.differing: list[str] = []
        self.step = 0
        pool = engine.scheduler.kv_cache_manager.block_pool
        self._evict, pool._maybe_evict_cached_block = pool._maybe_evict_cached_block, self._evicted

    def _evicted(self, block: Any) -> bool:
        evicted = self._evict(block)
        self.counts["blocks evicted from the prefix cache"] += evicted
        return evicted

    def run(self, requests: int) -> None:
        """Send ``requests`` requests and wait for the last."""
        started, shown = time.monotonic(), 0
        while len(self.traffic.sent) < requests or self.flights:
            most = IN_FLIGHT if self.first else 1  # the first canary is alone
            while len(self.flights) < most and len(self.traffic.sent) < requests:
                self._send()
            if self.first:
                self._disturb()
            for output in self.engine.llm.llm_engine.step():
                self._finish(self.flights.pop(output.request_id), output)
            self._look()
            if len(self.traffic.sent) >= shown + 100 or not self.flights:
                shown = len(self.traffic.sent)
                print(f"{time.monotonic() - started:5.0f} s, {shown} sent: {self.summary()}", flush=True)

    def summary(self) -> str:
        """Counters, one line."""
        return ", ".join(f"{n} {name}" for name, n in sorted(self.counts.items()))

    def _send(self) -> None:
        ask = self.traffic.next()
        request_id = self.engine.add(ask)
        flight = Flight(ask, request_id)
        if ask != self.traffic.canary and self.source.random() < 0.05:
            flight.abort_at = self.step + self.source.randrange(1, 16)
        self.flights[request_id.split("-")[0]] = flight

    def _disturb(self) -> None:
        for number in [n for n, f in self.flights.items() if f.abort_at <= self.step]:
            flight = self.flights.pop(number)
            self.engine.llm.llm_engine.abort_request([flight.id], internal=True)
            self.counts["aborted"] += 1
        chance, running = self.source.random(), self.engine.scheduler.running
        if chance < 0.003:
            self._forced(list(running))
            self.engine.preempt(None, forget=True)
            self.counts["times the cache was emptied"] += 1
        elif chance < 0.02 and running:
            request = self.source.choice(running)
            self._forced([request])
            self.engine.preempt(request)

    def _forced(self, requests: list[Any]) -> None:
        by_id = {flight.id: flight for flight in self.flights.values()}
        for request in requests:
            if request.request_id in by_id:
                by_id[request.request_id].forced += 1
                self.counts["preempted by force"] += 1

    def _look(self) -> None:
        """Take what the recorder saw of the last step."""
        self.step += 1
        record = self.engine.record
        self.counts["steps"] += len(record.steps)
        self.counts["steps of prefill and decode at once"] += record.mixed_steps()
        record.steps.clear()
        self.counts["tokens replayed"] = self.engine.scheduler.counters.replayed_tokens

    def _finish(self, flight: Flight, output: Any) -> None:
        result, canary = result_of(output), flight.ask == self.traffic.canary
        preempted = self.engine.record.preemptions.pop(flight.id, 0)
        self.counts["finished"] += 1
        self.counts["requests that hit"] += result.cached > 0
        self.counts["preempted for want of blocks"] += max(preempted - flight.forced, 0)
        if canary:
            self.counts["canaries"] += 1
            self.counts["canaries that hit"] += result.cached > 0
            self.counts["canaries from scratch"] += result.cached == 0
            self.counts["canaries preempted"] += preempted > 0
        self._judge(flight.ask, result, "a canary" if canary else "a request that came again")

    def _judge(self, ask: Ask, result: Result, what: str) -> None:
        values = [v for packed in result.logprobs for v in struct.unpack(f"<{len(packed) // 4}f", packed)]
        if not values or not all(map(math.isfinite, values)):
            self.differing.append(f"{what}, sent {len(self.traffic.sent)}: a logprob is not finite")
        before = self.first.setdefault(ask, result)
        if before is result:
            return
        self.counts["requests that came again"] += ask != self.traffic.canary
        apart = first_difference(before, result)
        if apart is not None:
            self.differing.append(f"{what}, sent {len(self.traffic.sent)}: {apart}")
            print(f"DIFFERS: {self.differing[-1]}", flush=True)


def main() -> None:
    """Soak, judge, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    args = parser.parse_args()
    device.activate()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(make_checkpoint(Path(folder) / "tiny"), OPTIONS)
        assert engine.block == BLOCK
        soak = Soak(engine, args.seed)
        soak.run(args.requests)
        engine.close()
    missing = [path for path in PATHS if not soak.counts[path]]
    lines = report.heading(f"{args.requests} random requests, a canary every {CANARY_EVERY}")
    lines += [f"{len(soak.differing)} answers differ. {time.monotonic() - started:.0f} s.", ""]
    lines += [f"- {each}" for each in soak.differing] + [f"- never seen: {path}" for path in missing]
    lines += report.table(["what", "count"], [[k, f"{n:,}"] for k, n in sorted(soak.counts.items())])
    report.write(args.out, "soak", lines, {"counts": soak.counts, "differing": soak.differing})
    sys.exit(1 if soak.differing or missing else 0)


if __name__ == "__main__":
    main()
