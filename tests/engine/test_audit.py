"""What the prefix cache holds (F17): each published state is, byte for byte, what its tokens leave behind."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from tests.harness.compare import assert_same
from tests.harness.engine import SOLO, Ask, Engine, Engines, asks
from tests.harness.prompts import prompt

pytestmark = pytest.mark.engine

States = dict[str, list[torch.Tensor]]  # by layer: convolution and recurrent state of one slot


def _states(engine: Engine, group: int, slot: int) -> States:
    names = engine.scheduler.kv_cache_config.kv_cache_groups[group].layer_names
    layers = engine.runner.vllm_config.compilation_config.static_forward_context
    return {name: [part[slot].cpu().clone() for part in layers[name].kv_cache] for name in names}


def _state_groups(engine: Engine) -> list[int]:
    from vllm.v1.kv_cache_interface import MambaSpec

    groups = engine.scheduler.kv_cache_config.kv_cache_groups
    return [i for i, group in enumerate(groups) if isinstance(group.kv_cache_spec, MambaSpec)]


class Published:
    """By key of the prefix cache, the tokens it stands for."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.pool = engine.scheduler.kv_cache_manager.block_pool
        self.tokens: dict[Any, tuple[int, ...]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what each key is inserted for."""
        coordinator = self.engine.scheduler.kv_cache_manager.coordinator
        publish, insert, current = coordinator.cache_blocks, self.pool._insert_block_hash, []

        def cache_blocks(request: Any, num_computed_tokens: int) -> None:
            current.append(tuple(request.all_token_ids))
            publish(request, num_computed_tokens)
            current.pop()

        def insert_hash(key: Any, block: Any, num_tokens: int | None) -> None:
            if current and num_tokens is not None:
                self.tokens[key] = current[-1][:num_tokens]
            insert(key, block, num_tokens)

        with (
            mock.patch.object(coordinator, "cache_blocks", cache_blocks),
            mock.patch.object(self.pool, "_insert_block_hash", insert_hash),
        ):
            yield

    def states(self) -> Iterator[tuple[tuple[int, ...], States]]:
        """Each state in the cache now, with its tokens."""
        from vllm.v1.core.kv_cache_utils import get_group_id

        groups = _state_groups(self.engine)
        for block in self.pool.blocks:
            key = block.block_hash
            if key is not None and get_group_id(key) in groups:
                yield self.tokens[key], _states(self.engine, get_group_id(key), block.block_id)


def _expected(engines: Engines, tokens: tuple[int, ...]) -> States:
    """STATE(tokens): what a request of just these tokens leaves in its slot, alone and in one step."""
    engine = engines.get(**SOLO)
    run = engine.run([Ask(tokens, max_tokens=1)])
    slots = run.record.steps[0].blocks[run.ids[0]]
    states: States = {}
    for group in _state_groups(engine):
        states |= _states(engine, group, slots[group][0])
    return states


def _apart(want: States, have: States) -> list[str]:
    return [
        name
        for name, parts in have.items()
        if not all(torch.equal(_raw(a), _raw(b)) for a, b in zip(want[name], parts, strict=True))
    ]


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dense", [False, True], ids=["default", "every-block"])
def test_every_published_state(engines: Engines, dense: bool) -> None:
    """Two unrelated prompts share a budget of little more than a block; then others share their beginnings.

    In several orders of arrival.  Afterwards every state in the cache is compared with one made alone.
    """
    b = engines.block
    first = asks([prompt(13 * b // 10, seed=280), prompt(17 * b // 10, seed=281)], max_tokens=70)
    second = [
        Ask(request.prompt[: b + 20] + tuple(prompt(n, seed=282)), max_tokens=4)
        for request in first
        for n in (3, 150)
    ]
    expected = engines.solo(first + second)
    engine = engines.get(max_num_batched_tokens=b + 100, prefix_cache_retention_interval=b if dense else 0)
    published = Published(engine)
    found: list[tuple[tuple[int, ...], States]] = []
    with published.watching():
        for order in range(4):
            engine.reset()
            requests = _shuffled(first, second, order)
            run = engine.run(requests)
            indices = [(first + second).index(Ask(r.prompt, r.max_tokens)) for r in requests]
            assert_same([expected[i] for i in indices], run.results, f"order {order}")
            found += published.states()
    ends = {len(tokens) for tokens, _ in found}
    assert {b, b + 64} & ends and all(end % 64 == 0 for end in ends), f"states end at {sorted(ends)}"
    wanted = {tokens: _expected(engines, tokens) for tokens in {tokens for tokens, _ in found}}
    assert len(wanted) >= 6, f"void: only {len(wanted)} states were published"
    for tokens, states in found:
        assert not _apart(wanted[tokens], states), f"the state after {len(tokens)} tokens"
    tokens, states = found[0]
    next(iter(states.values()))[1].view(-1)[5] += 1e-3
    assert _apart(wanted[tokens], states), "the audit does not see a changed state"


def _shuffled(first: list[Ask], second: list[Ask], order: int) -> list[Ask]:
    """The two prompts at once, in either order; those that share their beginnings at any later step."""
    source = random.Random(order)
    pair = source.sample(first, len(first))
    return pair + [Ask(r.prompt, r.max_tokens, at=source.randrange(1, 40)) for r in second]
