# In a vLLM branch: not needed (a tool for users).
"""An in-process engine that runs one way of a trace.  Only imported in a process of its own."""

import struct
from typing import Any

from vllm_invariant.options import engine_args
from vllm_invariant.trace.plan import Ask, Way
from vllm_invariant.trace.record import Run, Spot

# What a trace needs, unless the user says otherwise: modules that are run one by one, in the order of
# the model, in this process; room for a second engine; hits that can be asked for.
DEFAULTS: dict[str, Any] = {
    "enforce_eager": True,
    "async_scheduling": False,
    "enable_prefix_caching": True,
    "gpu_memory_utilization": 0.4,
}
LOGPROBS = 5
STEPS = 100_000  # after which a run is taken to be stuck


class TraceEngine:
    """One engine and the hooks on its model."""

    def __init__(self, model: str, arguments: list[str], options: dict[str, Any]) -> None:
        from vllm.v1.engine.llm_engine import LLMEngine

        from vllm_invariant.trace.capture import Capture

        args = engine_args(model, arguments, DEFAULTS, options)
        if not args.enforce_eager:
            raise ValueError("a trace needs --enforce-eager: compiled code has no modules to watch")
        self.engine = LLMEngine.from_engine_args(args)
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        runner = self.engine.model_executor.driver_worker.worker.model_runner
        self.capture = Capture(runner, self.scheduler)
        self._asked = 0

    def run(self, ask: Ask, way: Way, keep: Spot | None = None) -> Run:
        """Run the request one way, from an empty prefix cache.

        Args:
            ask: the traced request.
            way: how it runs.
            keep: a spot whose values to keep.

        Raises:
            RuntimeError: if the cache cannot be emptied or a request makes no progress.

        """
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache is still in use")
        for other in way.before:
            self._finish([self._add(other)], {})
        traced = self._add(ask, first=True)
        self.capture.start(traced, keep)
        outputs = self._finish([traced], dict(enumerate(way.company)))
        self.capture.stop()
        return self._result(outputs[traced], ask)

    def _finish(self, ids: list[str], later: dict[int, Ask]) -> dict[str, Any]:
        outputs: dict[str, Any] = {}
        names = {i.split("-")[0]: i for i in ids}
        for step in range(STEPS):
            for key in [key for key, other in later.items() if other.at <= step]:
                self._add(later.pop(key))
            if not later and not self.engine.has_unfinished_requests():
                return outputs
            for output in self.engine.step():
                if output.finished and output.request_id in names:
                    outputs[names[output.request_id]] = output
        raise RuntimeError("the request made no progress")

    def _add(self, ask: Ask, first: bool = False) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._asked += 1
        params = SamplingParams(
            temperature=0.0,
            max_tokens=ask.max_tokens,
            logprobs=LOGPROBS if first else None,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        name = str(self._asked)
        return self.engine.add_request(name, {"prompt_token_ids": list(ask.prompt)}, params)

    def _result(self, output: Any, ask: Ask) -> Run:
        answer = output.outputs[0]
        return Run(
            steps=self.capture.steps,
            prompt_len=len(ask.prompt),
            cached=output.num_cached_tokens or 0,
            tokens=tuple(answer.token_ids),
            logprobs=tuple(_bits(position) for position in answer.logprobs),
            kept=self.capture.kept,
            unseen=self.capture.unseen,
        )


def _bits(position: Any) -> bytes:
    return b"".join(struct.pack("<if", token, entry.logprob) for token, entry in position.items())
