"""A state machine over the real scheduler and cache manager, with a `Ledger` for a worker.

Whatever is added, aborted, preempted, reset or evicted, under whatever budget, pool and policy:
prefills are cut on the grid, every read finds what the same tokens by the same path left there,
prompts are prefilled and generated tokens decoded, everyone finishes, and the pool comes back.
"""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.scheduler.build import Driver, prompt
from tests.scheduler.ledger import Ledger
from vllm_invariant.history import HistoryMixin
from vllm_invariant.scheduler import GridSchedulerMixin

BLOCK = 128
KINDS = ["state", "state", "state", "attention"]
STEPS_OWED = 100_000  # of the default profile, over all machines of this file

LENGTHS = st.one_of(
    st.integers(1, 700),
    st.sampled_from([1, 63, 64, 65, 127, 128, 129, 192, 193, 255, 256, 257, 384, 385, 512, 640, 641]),
)


class Total:
    """What all machines of this file did together."""

    steps = hits = replays = preemptions = decodes = prefills = 0


def run_steps(driver: Driver, ledger: Ledger, count: int) -> None:
    for _ in range(count):
        output = driver.schedule()
        ledger.execute(*output)
        driver.settle()
        Total.steps += 1


def machine(build: Callable[..., Driver]) -> type[RuleBasedStateMachine]:
    """A state machine class over schedulers from ``build``."""

    class History(RuleBasedStateMachine):
        @initialize(
            budget=st.sampled_from([80, 100, 128, 130, 256, 300, 1024]),
            seqs=st.sampled_from([2, 4, 8, 16]),
            unit=st.sampled_from([64, BLOCK]),
            blocks=st.sampled_from([20, 24, 28, 32, 40, 64, 400]),
            policy=st.sampled_from(["fcfs", "priority"]),
            asynchronous=st.booleans(),
            mode=st.sampled_from(["align", "align", "align", "none"]),
            long_prefill=st.sampled_from([0, 0, 64, 200]),
        )
        def start(self, **options: Any) -> None:
            self.driver = build(block=BLOCK, **options)
            groups = self.driver.scheduler.kv_cache_config.kv_cache_groups
            blocks = [group.kv_cache_spec.block_size for group in groups]
            kinds = list(zip(KINDS, blocks, strict=True))
            self.ledger = Ledger(kinds, self.driver.requests, self.driver.scheduler.arithmetic)
            self.count = 0

        def _add(self, tokens: list[int], max_tokens: int, priority: int) -> None:
            self.count += 1
            self.driver.add(f"r{self.count}", tokens, max_tokens, priority)

        @rule(
            length=LENGTHS, seed=st.integers(0, 2), max_tokens=st.integers(1, 60), priority=st.integers(0, 2)
        )
        def add(self, length: int, seed: int, max_tokens: int, priority: int) -> None:
            """Prompts of one seed are prefixes of each other, or duplicates."""
            self._add(prompt(length, seed), max_tokens, priority)

        @rule(data=st.data(), more=st.integers(1, 150), max_tokens=st.integers(1, 60))
        def next_turn(self, data: st.DataObject, more: int, max_tokens: int) -> None:
            """A conversation goes on: a request's tokens so far, and some of the user's."""
            names = [n for n, r in self.driver.requests.items() if r.num_output_tokens and r.num_tokens < 600]
            if names:
                before = self.driver.requests[data.draw(st.sampled_from(names))]
                self._add(list(before.all_token_ids) + prompt(more, seed=9), max_tokens, 0)

        @rule(count=st.integers(1, 60))
        def step(self, count: int) -> None:
            run_steps(self.driver, self.ledger, count)

        @rule(data=st.data())
        def abort(self, data: st.DataObject) -> None:
            names = sorted(self.driver.unfinished())
            if names:
                self.driver.abort(data.draw(st.sampled_from(names)))

        @rule()
        def preempt_all(self) -> None:
            self.driver.preempt_all()

        @rule()
        def forget_cache(self) -> None:
            self.driver.scheduler.reset_prefix_cache()

        @invariant()
        def books_balance(self) -> None:
            if hasattr(self, "driver"):
                pool = self.driver.scheduler.kv_cache_manager.block_pool
                assert 0 <= pool.get_num_free_blocks() < pool.num_gpu_blocks

        def teardown(self) -> None:
            if not hasattr(self, "driver"):
                return
            # Each token at worst takes a step of its own, once more for each preemption.
            owed = sum(r.num_tokens + r.max_tokens for r in self.driver.requests.values())
            bound = 50 + 4 * owed
            for _ in range(bound):
                if not self.driver.unfinished():
                    break
                run_steps(self.driver, self.ledger, 1)
            assert not self.driver.unfinished(), f"waiting for ever: {self.driver.unfinished()}"
            run_steps(self.driver, self.ledger, 3)
            pool = self.driver.scheduler.kv_cache_manager.block_pool
            assert self.driver.scheduler.reset_prefix_cache()
            assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks are missing"
            Total.hits += self.ledger.hits
            Total.replays += self.ledger.replays
            Total.decodes += self.ledger.decodes
            Total.prefills += self.ledger.prefills
            Total.preemptions += sum(r.num_preemptions for r in self.driver.requests.values())

    return History


def search(build: Callable[..., Driver], examples: int, *, shrink: bool = True) -> None:
    """Run machines until one fails or ``examples`` have not."""
    run_state_machine_as_test(
        machine(build),
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=list(Phase) if shrink else [Phase.generate],
        ),
    )


def test_history_leaves_no_trace(drive):
    """At least 100,000 engine steps, with hits, replays and preemptions among them."""
    while Total.steps < STEPS_OWED:
        search(drive, examples=100)
    print({name: count for name, count in vars(Total).items() if isinstance(count, int)})
    assert Total.hits > 300
    assert Total.replays > 3000
    assert Total.preemptions > 300
    assert Total.decodes > 30_000
    assert Total.prefills > 10_000


class OneRecurrence:
    """Builds schedulers of the recurrent arithmetic, whose hits land off the 64-token grid."""

    def __init__(self, drive: Callable[..., Driver]) -> None:
        self.drive = drive
        self.built: list[Driver] = []

    def __call__(self, *, unit: int, **options: Any) -> Driver:
        self.built.append(self.drive(arithmetic="recurrent", unit=unit // 4, **options))
        return self.built[-1]


def test_history_leaves_no_trace_with_one_recurrence(drive):
    """Cuts and hits anywhere, generated tokens rebuilt by prefill, decoded blocks hit by others."""
    build = OneRecurrence(drive)
    search(build, examples=300)
    hits = [hit for driver in build.built for step in driver.steps for hit in step.hits.values()]
    assert sum(hit % 64 > 0 for hit in hits) > 20
    rebuilt = decoded = 0
    for driver in build.built:
        for name, request in driver.requests.items():
            prompt_end = request.num_prompt_tokens
            rebuilt += any(end - max(start, prompt_end) > 1 for start, end in driver.chunks(name))
            decoded += any(hit > prompt_end for hit in driver.hits(name))
    print({"rebuilt": rebuilt, "decoded": decoded})
    assert rebuilt > 20
    assert decoded > 0, "no resumed request took what it had generated from the cache"


def test_chunk_ends_at_blocks_matter_with_one_recurrence(drive, monkeypatch):
    """The grid is one token, but a state block still holds the state at its own end only."""
    monkeypatch.setattr(*RULES["cut"])
    with pytest.raises((AssertionError, ExceptionGroup)):
        search(OneRecurrence(drive), examples=2000, shrink=False)


RULES = {
    "provenance": (HistoryMixin, "_publish", lambda self, request, n: self._stock_publish(request, n)),
    "replay": (GridSchedulerMixin, "_decode_tokens", lambda self, request, start, n: n),
    "cut": (GridSchedulerMixin, "_mamba_block_aligned_split", lambda self, request, n, *computed: n),
}


@pytest.mark.parametrize("rule_off", list(RULES))
def test_each_rule_matters(drive, monkeypatch, rule_off):
    """With one rule off, the books no longer agree."""
    monkeypatch.setattr(*RULES[rule_off])
    monkeypatch.setattr(GridSchedulerMixin, "_check_chunk_ends", lambda self, output: None)
    with pytest.raises((AssertionError, ExceptionGroup)):
        search(drive, examples=2000, shrink=False)  # stops at the first that fails, within seconds


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("mode", ["align", "none"])
def test_a_request_that_outgrows_the_cache_ends_with_an_error(drive, mode, asynchronous):
    """Its prompt fits, its answer does not, and there is nobody to make room."""
    driver = drive(block=BLOCK, blocks=14, mode=mode, asynchronous=asynchronous)
    request = driver.add("long", prompt(300), max_tokens=3000)
    driver.run(most=8000)
    assert request.get_finished_reason().name == "ERROR"
    assert request.num_output_tokens > BLOCK
    driver.add("next", prompt(300), max_tokens=4)
    driver.run()


def test_a_request_that_outgrows_the_cache_would_start_over_for_ever(drive, monkeypatch):
    """The rule turned off."""
    monkeypatch.setattr(HistoryMixin, "_fail", lambda self, request, why: None)
    driver = drive(block=BLOCK, blocks=14)
    driver.add("long", prompt(300), max_tokens=3000)
    with pytest.raises(AssertionError, match="not finished"):
        driver.run(most=8000)


def test_a_prompt_that_cannot_fit_is_rejected_at_once(drive):
    driver = drive(block=BLOCK, blocks=14)
    request = driver.add("huge", prompt(2000), max_tokens=4)
    fits = driver.add("fits", prompt(300), max_tokens=4)
    need = driver.scheduler.blocks_needed
    assert need(request.num_prompt_tokens) > driver.scheduler.capacity >= need(fits.num_prompt_tokens)
    driver.step()
    assert request.is_finished()
    assert not driver.chunks("huge")
    driver.run()
