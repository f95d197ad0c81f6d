"""The cache memory of an engine, by block: what fills, poisons and fingerprints it."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from tests.harness.compare import Result, differing
from tests.harness.engine import Ask, Engine

# Every byte of a poisoned block: as a bfloat16 or a float32 the one is a NaN, the other 3.4e38.
NAN, LARGE = 0xFF, 0x7F


class Memory:
    """All cache tensors of one engine, attention and state layers alike."""

    def __init__(self, engine: Engine) -> None:
        count = engine.scheduler.kv_cache_config.num_blocks
        layers = engine.runner.vllm_config.compilation_config.static_forward_context.values()
        tensors = [t for layer in layers for t in _tensors(getattr(layer, "kv_cache", None))]
        assert all(t.shape[0] % count == 0 for t in tensors)
        # A scheduler block is one or several of the kernel's.
        self.views = [t.unflatten(0, (count, -1)) for t in tensors]
        assert len({t.dtype for t in tensors}) > 1, "a hybrid keeps bfloat16 keys and float32 states"

    def fill(self, byte: int) -> int:
        """Write ``byte`` over all cache memory, page padding included; returns the bytes written."""
        storages = {v.untyped_storage().data_ptr(): v for v in self.views}
        written = 0
        for view in storages.values():
            raw = torch.empty(0, dtype=torch.uint8, device=view.device).set_(view.untyped_storage())
            raw.fill_(byte)
            written += raw.numel()
        return written

    def poison(self, blocks: Sequence[int], byte: int) -> None:
        """Write ``byte`` over some blocks, through the view of every layer."""
        for view in self.views if blocks else ():
            pattern = torch.full((view.element_size(),), byte, dtype=torch.uint8).view(view.dtype)
            view[list(blocks)] = pattern.to(view.device)

    def holds(self, block: int, byte: int) -> bool:
        """Whether every byte of a block is ``byte``."""
        return all(bool((_bytes(view[block]) == byte).all()) for view in self.views)

    def fingerprint(self, block: int) -> str:
        """Of a block's bytes, through the view of every layer."""
        digest = hashlib.sha256()
        for view in self.views:
            digest.update(_bytes(view[block]).numpy().tobytes())
        return digest.hexdigest()


def _tensors(cache: Any) -> Iterator[torch.Tensor]:
    if isinstance(cache, torch.Tensor):
        yield from [cache] if cache.numel() else []
    elif isinstance(cache, (list, tuple)):
        for part in cache:
            yield from _tensors(part)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().cpu().reshape(-1).view(torch.uint8)


class Poisoner:
    """Poisons what is nobody's: call `sweep` between steps, and use `watching` while requests run.

    Attributes:
        swept: blocks poisoned while they were free and not in the prefix cache.
        reused: of these, how many were handed out again, poison and all.
        evicted: blocks poisoned as they left the prefix cache for a new owner.

    """

    def __init__(self, engine: Engine, byte: int) -> None:
        self.memory, self.byte = Memory(engine), byte
        self.pool = engine.scheduler.kv_cache_manager.block_pool
        self.swept = self.reused = self.evicted = 0
        self._poisoned: set[int] = set()

    def sweep(self, step: int = 0) -> None:
        """Poison each free block that no prompt can hit."""
        free = self.pool.free_block_queue.get_all_free_blocks()
        fresh = [b.block_id for b in free if b.block_hash is None and b.block_id not in self._poisoned]
        self.memory.poison(fresh, self.byte)
        if fresh and not self.swept:
            assert self.memory.holds(fresh[0], self.byte) and self.memory.holds(fresh[-1], self.byte)
        self.swept += len(fresh)
        self._poisoned.update(fresh)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note, and complete, the poison of every block that is handed out."""
        stock = self.pool.get_new_blocks

        def get_new_blocks(count: int) -> list[Any]:
            blocks = stock(count)
            self._handed_out(block.block_id for block in blocks)
            return blocks

        with mock.patch.object(self.pool, "get_new_blocks", get_new_blocks):
            yield

    def _handed_out(self, ids: Iterable[int]) -> None:
        for block in ids:
            if block in self._poisoned:
                self._poisoned.remove(block)
                self.reused += 1
            else:
                self.memory.poison([block], self.byte)
                self.evicted += 1


def apart(engine: Engine, requests: Sequence[Ask], expected: Sequence[Result]) -> dict[int, str]:
    """Run requests; those that are not as expected, a logprob that is no number included."""
    try:
        return differing(expected, engine.run(requests).results)
    except ValueError as error:
        return {0: str(error)}
