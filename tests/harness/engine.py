"""In-process engines on a tiny checkpoint, driven step by step."""

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from tests.harness import device
from tests.harness.compare import Result
from tests.harness.record import Recorder

DEFAULTS: dict[str, Any] = {
    "max_model_len": 4096,
    "max_num_batched_tokens": 1024,
    "max_num_seqs": 16,
    "enable_prefix_caching": True,
    "enforce_eager": True,
    "max_logprobs": 20,
    "seed": 0,
}

# One request at a time, no cache, every prompt in one step: what all other runs are compared with.
SOLO: dict[str, Any] = {"enable_prefix_caching": False, "max_num_batched_tokens": 4096, "max_num_seqs": 1}


@dataclass(frozen=True)
class Ask:
    """One request.  ``at`` is the engine step before which it is added.

    ``priority`` is for engines that schedule by it, the lowest first.
    """

    prompt: tuple[int, ...]
    max_tokens: int = 8
    at: int = 0
    temperature: float = 0.0
    seed: int | None = None
    priority: int = 0


@dataclass
class Run:
    """Finished requests, in the order asked, and what the scheduler did for them."""

    results: list[Result]
    ids: list[str]
    record: Recorder


def asks(prompts: Sequence[Sequence[int]], max_tokens: int = 8, at: int = 0) -> list[Ask]:
    """The same request for each prompt."""
    return [Ask(tuple(p), max_tokens, at) for p in prompts]


class Engine:
    """One `vllm.LLM` and a `Recorder` on its scheduler.  Under the flag only if that is set already."""

    def __init__(self, model: Path, options: dict[str, Any]) -> None:
        from vllm import LLM

        self.options = options
        self.llm = LLM(str(model), **{**DEFAULTS, **device.OPTIONS, **options})
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.record = Recorder(self.scheduler)
        self._asked = 0

    @property
    def block(self) -> int:
        """Tokens of a scheduler block."""
        return self.scheduler.block_size

    @property
    def unit(self) -> int:
        """Tokens between positions a prefix-cache hit can land on."""
        return self.scheduler.hash_block_size

    def on_ranks(self, look: Callable[[Any], Any]) -> list[Any]:
        """What ``look`` says of each rank's worker, in that rank's process: an importable function."""
        return self.llm.collective_rpc(look)

    @property
    def runner(self) -> Any:
        """The model runner in this process, where there is one rank."""
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    def layer(self, name: str) -> Any:
        """A module of the model, by its dotted name below the decoder layers."""
        return self.runner.get_model().get_submodule(f"model.layers.{name}")

    def reset(self) -> None:
        """Forget the prefix cache."""
        assert self.llm.reset_prefix_cache(), "the prefix cache is still in use"

    def run(self, requests: Sequence[Ask], during: Callable[[int], None] | None = None) -> Run:
        """Run requests to the end, calling ``during(step)`` before each engine step.

        Raises:
            AssertionError: if the engine makes no progress for 20,000 steps.

        """
        self.record.clear()
        engine = self.llm.llm_engine
        pending = sorted(range(len(requests)), key=lambda i: requests[i].at)
        ids: dict[int, str] = {}
        done: dict[str, Any] = {}
        for step in range(20_000):
            while pending and requests[pending[0]].at <= step:
                i = pending.pop(0)
                ids[i] = self.add(requests[i])
            if not pending and not engine.has_unfinished_requests():
                break
            if during is not None:
                during(step)
            for output in engine.step():
                done[output.request_id] = output
        else:
            raise AssertionError(f"{len(requests) - len(done)} requests never finished")
        results = [result_of(done[str(self._number(ids[i]))]) for i in range(len(requests))]
        return Run(results, [ids[i] for i in range(len(requests))], self.record)

    def alone(self, requests: Sequence[Ask], *, keep_cache: bool = False) -> list[Result]:
        """Each request alone; from an empty cache unless told otherwise."""
        results = []
        for request in requests:
            if not keep_cache:
                self.reset()
            results += self.run([request]).results
        return results

    def start_and_abort(self, request: Ask, steps: int) -> None:
        """Run a request for some engine steps, then abort it."""
        request_id = self.add(request)
        for _ in range(steps):
            self.llm.llm_engine.step()
        assert request_id in self.scheduler.requests, "it had finished already"
        self.llm.llm_engine.abort_request([request_id], internal=True)
        while self.llm.llm_engine.has_unfinished_requests():
            self.llm.llm_engine.step()

    @contextmanager
    def at_execution(self, number: int, act: Callable[[], None], *, when: str) -> Iterator[list[int]]:
        """Call ``act`` "before" or "after" the ``number``-th execution.

        The step was scheduled, and its result was not taken yet.  Yields the tokens that step computes,
        once it has come.
        """
        executor, count = self.core.model_executor, itertools.count(1)
        stock, acted = executor.execute_model, []

        def execute_model(output: Any, *args: Any, **kwargs: Any) -> Any:
            due = next(count) == number
            if due and when == "before":
                act()
            result = stock(output, *args, **kwargs)
            if due and when == "after":
                act()
            if due:
                acted.append(output.total_num_scheduled_tokens)
            return result

        with mock.patch.object(executor, "execute_model", execute_model):
            yield acted

    def _number(self, request_id: str) -> str:
        return request_id.split("-")[0]

    def add(self, request: Ask) -> str:
        """Queue a request; returns the engine's id of it."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=request.temperature,
            seed=request.seed,
            max_tokens=request.max_tokens,
            logprobs=20,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        return self.llm.llm_engine.add_request(
            self.number(), {"prompt_token_ids": list(request.prompt)}, params, priority=request.priority
        )

    def number(self) -> str:
        """A request's name, new each time."""
        self._asked += 1
        return str(self._asked)

    def preempt(self, request: Any, *, forget: bool = False) -> None:
        """Send a running request back to the queue, as pressure on the cache would.

        ``forget`` sends back every running request and empties the prefix cache.
        """
        scheduler = self.scheduler
        if forget:
            assert self.llm.reset_prefix_cache(reset_running_requests=True)
            return
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)  # it may come back at once

    def close(self) -> None:
        """Free the model, the cache and the process groups."""
        # Shutting down walks the thawed heap three times; once, at the end, is enough.
        with mock.patch.object(gc, "unfreeze"):
            self.llm.llm_engine.engine_core.shutdown()
        del self.llm, self.core, self.scheduler, self.record
        gc.unfreeze()
        gc.collect()


def result_of(output: Any) -> Result:
    """A finished request of vLLM's, as `compare` wants it."""
    completion = output.outputs[0]
    return Result.of(
        completion.token_ids,
        [{token: entry.logprob for token, entry in position.items()} for position in completion.logprobs],
        output.num_cached_tokens or 0,
    )


class Engines:
    """At most one live engine in the process.  Asking for another model or other options closes it."""

    # Process groups outlive nobody: a second engine would be built on those of the first.
    _holder: ClassVar["Engines | None"] = None

    def __init__(self, model: Path) -> None:
        self.model = model
        self.built = 0
        self._live: Engine | None = None
        self._block = 0
        self._solo: dict[Ask, Result] = {}

    def get(self, **options: Any) -> Engine:
        """An engine with these options and an empty prefix cache."""
        device.activate()
        if Engines._holder not in (self, None):
            Engines._holder.close()
        Engines._holder = self
        if self._live is None or self._live.options != options:
            self.close()
            # vLLM walks the whole heap eight times an engine.  What is alive now is mostly modules;
            # frozen, it is walked no more, and an engine takes two seconds in place of six.
            gc.freeze()
            self._live = Engine(self.model, options)
            self.built += 1
        self._live.reset()
        return self._live

    @property
    def block(self) -> int:
        """Tokens of the block a default engine settles on.  Never assumed."""
        if not self._block:
            self._block = self.get().block
        return self._block

    def config(self, **options: Any) -> Any:
        """The checked engine config alone: everything that is refused before a model is loaded."""
        device.activate()
        from vllm.engine.arg_utils import EngineArgs

        return EngineArgs(str(self.model), **{**DEFAULTS, **device.OPTIONS, **options}).create_engine_config()

    @contextmanager
    def fresh(self, **options: Any) -> Iterator[Engine]:
        """An engine nobody else gets to see, for tests that turn a rule off in it."""
        self.close()
        try:
            yield self.get(**options)
        finally:
            self.close()

    def solo(self, requests: Sequence[Ask]) -> list[Result]:
        """What each request gets alone, in one step, without a cache.  Computed once a session."""
        keys = [Ask(r.prompt, r.max_tokens, 0, r.temperature, r.seed) for r in requests]
        missing = [key for key in dict.fromkeys(keys) if key not in self._solo]
        if missing:
            engine = self.get(**SOLO)
            for key in missing:
                run = engine.run([key])
                assert run.record.chunk_ends(run.ids[0]) == [len(key.prompt)], "SOLO takes one step"
                self._solo[key] = run.results[0]
        return [self._solo[key] for key in keys]

    def close(self) -> None:
        """Close the live engine, if there is one."""
        if self._live is not None:
            self._live.close()
            self._live = None
