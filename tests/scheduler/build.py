"""A real scheduler with a made-up model behind it, driven step by step.

Everything the scheduler touches is vLLM's: config, cache manager, block pool, hashes.  Only the model
runner is replaced, by one that samples a token from the request's prompt and position, so that two
requests with one prompt get one answer and a resumed request goes on with the tokens it had.
"""

import copy
import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 2000
MAX_LEN = 8192


@dataclass(frozen=True)
class Options:
    """Of one scheduler.

    Attributes:
        budget: ``max_num_batched_tokens``.
        seqs: ``max_num_seqs``.
        mode: mamba cache mode, "align" with prefix caching or "none" without.
        block: tokens in a block of every cache group.
        unit: tokens between prefix-cache hits.
        blocks: cache blocks, the null block included.
        policy: "fcfs" or "priority".
        long_prefill: ``long_prefill_token_threshold``, 0 for none.
        asynchronous: schedule one step ahead of the sampled tokens, as async scheduling does.
        stock: the plain stock scheduler, for tests that turn every rule off.
        arithmetic: name of the GDN arithmetic.

    """

    budget: int = 1024
    seqs: int = 8
    mode: str = "align"
    block: int = 320
    unit: int = 64
    blocks: int = 1000
    policy: str = "fcfs"
    long_prefill: int = 0
    asynchronous: bool = False
    stock: bool = False
    arithmetic: str = "chunk"


@functools.cache
def _engine_config(folder: Path) -> Any:
    """An engine config of a Qwen3.5-shaped model, made by vLLM; copied by every scheduler."""
    from transformers import Qwen3_5TextConfig
    from vllm.engine.arg_utils import EngineArgs

    from vllm_invariant.demo.checkpoint import TINY

    Qwen3_5TextConfig(
        **TINY, mamba_ssm_dtype="float32", architectures=["Qwen3_5ForCausalLM"]
    ).save_pretrained(folder)
    return EngineArgs(
        str(folder),
        skip_tokenizer_init=True,
        max_model_len=MAX_LEN,
        dtype="bfloat16",
        mamba_ssm_cache_dtype="float32",
        max_num_seqs=8,
        enable_chunked_prefill=True,
    ).create_engine_config()


def _member() -> Any:
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    from vllm_invariant import backend

    if backend.NAME not in MambaAttentionBackendEnum.__members__:
        MambaAttentionBackendEnum.register(backend.NAME, "vllm_invariant.backend.QwenGDNAttentionBackend")
    return MambaAttentionBackendEnum[backend.NAME]


def _cache_config(options: Options) -> Any:
    """Three groups of GDN states and one of attention, as the tiny checkpoint has."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

    state = MambaSpec(
        block_size=options.block if options.mode == "align" else MAX_LEN,
        shapes=((3, 1024), (4, 128, 128)),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_type=_member(),
        mamba_cache_mode=options.mode,
    )
    attention = FullAttentionSpec(
        block_size=options.block, num_kv_heads=2, head_size=128, dtype=torch.bfloat16
    )
    groups = [KVCacheGroupSpec([f"state.{i}"], state) for i in range(3)]
    return KVCacheConfig(
        num_blocks=options.blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[*groups, KVCacheGroupSpec(["attention"], attention)],
    )


def _vllm_config(folder: Path, options: Options) -> Any:
    config = copy.deepcopy(_engine_config(folder))
    config.additional_config = {"vllm_invariant": {"gdn_arithmetic": options.arithmetic}}
    cache, scheduler = config.cache_config, config.scheduler_config
    cache.block_size = options.block
    cache.mamba_block_size = options.block if options.mode == "align" else None
    cache.mamba_cache_mode = options.mode
    cache.enable_prefix_caching = options.mode == "align"
    cache.prefix_match_unit = options.unit if options.mode == "align" else None
    cache.num_gpu_blocks = options.blocks
    scheduler.max_num_batched_tokens = options.budget
    scheduler.max_num_scheduled_tokens = None
    scheduler.max_num_seqs = options.seqs
    scheduler.policy = options.policy
    scheduler.long_prefill_token_threshold = options.long_prefill
    scheduler.async_scheduling = options.asynchronous
    return config


@dataclass
class Step:
    """One engine step: by request id the token positions computed, and hits of admitted requests."""

    chunks: dict[str, tuple[int, int]] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)


class Driver:
    """A scheduler, its requests and what it did for them."""

    def __init__(self, folder: Path, options: Options | None = None, **fields: Any) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import (
            get_request_block_hasher,
            init_none_hash,
            resolve_kv_cache_block_sizes,
        )
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        from vllm_invariant.scheduler import grid_scheduler_class

        self.options = options or Options(**fields)
        config, cache = _vllm_config(folder, self.options), _cache_config(self.options)
        block, hash_block = resolve_kv_cache_block_sizes(cache, config)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(hash_block, sha256) if self.options.mode == "align" else None
        stock = AsyncScheduler if self.options.asynchronous else Scheduler
        chosen = stock if self.options.stock else grid_scheduler_class(stock)
        self.scheduler = chosen(
            config, cache, StructuredOutputManager(config), block_size=block, hash_block_size=hash_block
        )
        self.steps: list[Step] = []
        self.requests: dict[str, Any] = {}
        self._in_flight: list[Any] = []

    def add(self, name: str, prompt: Sequence[int], max_tokens: int = 4, priority: int = 0) -> Any:
        """Queue a request; returns stock's ``Request``."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True),
            pooling_params=None,
            arrival_time=float(len(self.requests)),
            priority=priority,
            block_hasher=self._hasher,
        )
        self.requests[name] = request
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        """What a client's disconnect does."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> Step:
        """Schedule one step and, at once or one step later, hand the sampled tokens back."""
        self.schedule()
        self.settle()
        return self.steps[-1]

    def schedule(self) -> tuple[Any, dict[str, tuple[int, int]]]:
        """Schedule one step; returns stock's output and the step's chunks."""
        output = self.scheduler.schedule()
        step = Step()
        for name, count in output.num_scheduled_tokens.items():
            end = self.requests[name].num_computed_tokens
            step.chunks[name] = (end - count, end)
        admitted = {new.req_id for new in output.scheduled_new_reqs}
        for name in admitted | set(output.scheduled_cached_reqs.resumed_req_ids):
            step.hits[name] = step.chunks[name][0]
        self.steps.append(step)
        self._in_flight.append((output, step))
        return output, step.chunks

    def settle(self) -> None:
        """Hand back the sampled tokens that are due."""
        while len(self._in_flight) > self.options.asynchronous:
            self._hand_back(*self._in_flight.pop(0))

    def _hand_back(self, output: Any, step: Step) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(step.chunks)
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=[self._sample(name, step.chunks[name][1]) for name in names],
            ),
        )

    def _sample(self, name: str, end: int) -> list[int]:
        """The token after position ``end``, unless the request already has one there."""
        request = self.requests[name]
        if request.is_finished() or end < request.num_tokens:
            return []
        seed = zlib.crc32(repr((request.prompt_token_ids, end)).encode())
        return [1 + seed % (VOCABULARY - 1)]

    def run(self, most: int = 2000, until: Sequence[str] | None = None) -> int:
        """Step until these requests (by default all) are finished.

        Returns:
            Steps taken.

        Raises:
            AssertionError: if they are not finished after ``most`` steps.

        """
        names = self.requests if until is None else until
        for taken in range(most + 1):
            if all(self.requests[name].is_finished() for name in names):
                return taken
            assert taken < most, f"not finished after {most} steps: {self.unfinished()}"
            self.step()
        raise AssertionError("unreachable")

    def unfinished(self) -> dict[str, tuple[int, int]]:
        """By unfinished request, tokens computed and tokens it has."""
        pending = {name: r for name, r in self.requests.items() if not r.is_finished()}
        return {name: (r.num_computed_tokens, r.num_tokens) for name, r in pending.items()}

    # --- what happened ------------------------------------------------------------------------

    def chunks(self, name: str) -> list[tuple[int, int]]:
        """(start, end) of everything computed for a request, in order."""
        return [step.chunks[name] for step in self.steps if name in step.chunks]

    def prefill_ends(self, name: str) -> list[int]:
        """Ends of the chunks that start within the prompt."""
        return [end for start, end in self.chunks(name) if start < self.requests[name].num_prompt_tokens]

    def hits(self, name: str) -> list[int]:
        """Tokens taken from the prefix cache at each admission."""
        return [step.hits[name] for step in self.steps if name in step.hits]

    def preempt_all(self) -> None:
        """Send every running request back to the queue and forget the prefix cache."""
        self.scheduler.reset_prefix_cache(reset_running_requests=True)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids; prompts of one seed are prefixes of each other."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (MAX_LEN,), generator=generator)[:length].tolist()
