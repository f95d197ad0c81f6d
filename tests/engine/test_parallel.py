"""Two ranks: the axes at tensor-parallel size 2, dense and with experts, split by width or shared out.

Workers are processes of their own here, so a rule is turned off in each of them.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import CPU, TWO_GPUS
from tests.harness import device, moe, ranks
from tests.harness.axes import alone, assert_in_any_order, assert_joined
from tests.harness.compare import assert_same, differing
from tests.harness.engine import Ask, Engine, Engines, asks
from tests.harness.faults import planted
from tests.harness.process import run_child
from tests.harness.prompts import prompt, prompts
from tests.harness.score import budget
from vllm_invariant import doctor
from vllm_invariant.demo.checkpoint import EXPERTS, TINY

pytestmark = pytest.mark.engine

OPTIONS: dict[str, Any] = {"tensor_parallel_size": 2, "max_num_seqs": 16, "max_num_batched_tokens": 2048}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {},
    "experts-shared-out": {"enable_expert_parallel": True},
}
LENGTHS = (1, 63, 64, 65, 129, 300, 511)


@pytest.fixture(scope="module", params=[pytest.param("cpu", marks=CPU), pytest.param("cuda", marks=TWO_GPUS)])
def machine(request: pytest.FixtureRequest) -> str:
    """One case a machine, so that the GPUs' are counted where they cannot run."""
    return request.param


@pytest.fixture(scope="module")
def mixture(machine: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small mixture of experts."""
    return moe.make(tmp_path_factory.mktemp("moe"), "moe")


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """A model, and how its experts are spread."""
    return request.param


@pytest.fixture(scope="module")
def engine(machine: str, kind: str, checkpoint: Path, mixture: Path) -> Iterator[Engine]:
    """One engine of two ranks a kind."""
    builder = Engines(checkpoint if kind == "dense" else mixture)
    yield builder.get(**OPTIONS, **KINDS[kind])
    builder.close()


@pytest.fixture(autouse=True)
def _cold(request: pytest.FixtureRequest) -> None:
    if "engine" in request.fixturenames:
        request.getfixturevalue("engine").reset()


def test_the_work_is_shared(engine: Engine, kind: str) -> None:
    """Each rank has its half of the heads, and of each expert or of the experts."""
    experts = {
        "dense": None,
        "experts": (EXPERTS["num_experts"], moe.WIDTHS["moe_intermediate_size"] // 2),
        "experts-shared-out": (EXPERTS["num_experts"] // 2, moe.WIDTHS["moe_intermediate_size"]),
    }[kind]
    common = {
        "ranks": 2,
        "value heads": TINY["linear_num_value_heads"] // 2,
        "query heads": TINY["num_attention_heads"] // 2,
        "experts": experts,
        "all-reduce": {"cpu": "the device's own", "cuda": "custom"}[device.NAME],
    }
    assert engine.on_ranks(ranks.share) == [{"rank": rank, **common} for rank in (0, 1)]
    text = engine.llm.llm_engine.model_config.hf_text_config
    assert engine.block == doctor.hybrid_block(text, 64, ranks=2)
    first, second = engine.on_ranks(ranks.modes)
    assert first == second and first["layer"].startswith("vllm_invariant.")


def test_batch(engine: Engine) -> None:
    """Alone, all in one step, and in another order; one is sampled."""
    requests = asks(prompts(LENGTHS, seed=60), max_tokens=6)
    requests[3] = Ask(requests[3].prompt, 6, temperature=0.8, seed=5)
    expected = alone(engine, requests)
    assert_in_any_order(engine, requests, expected)


def test_company(engine: Engine) -> None:
    """Prefills join and leave the decode steps of a request."""
    assert_joined(engine, seed=61)


def test_cut(engine: Engine) -> None:
    """Prefill chunks as small as the grid, and cut by a decode beside them."""
    requests = asks(prompts((65, 200, 513), seed=63), max_tokens=4)
    decoding = Ask(tuple(prompt(20, seed=64)), max_tokens=24)
    expected = alone(engine, [decoding, *requests])
    for tokens in (65, 192):
        with budget(engine, tokens):
            run = engine.run([decoding, *(Ask(r.prompt, r.max_tokens, at=2) for r in requests)])
        ends = [run.record.chunk_ends(i) for i in run.ids[1:]]
        assert max(map(len, ends)) > 1
        assert all(end % 64 == 0 for each in ends for end in each[:-1])
        assert_same(expected, run.results, f"budget {tokens}")
        engine.reset()


def test_hit(engine: Engine) -> None:
    """A cached prompt but for its last 1, 2 or 64 tokens, alone and beside seven decodes."""
    b = engine.block
    base = prompt(2 * b + 64, seed=65)
    requests = asks([base[: k * b + rest] for k in (1, 2) for rest in (1, 2, 64)], max_tokens=4)
    companions = asks([prompt(n, seed=66) for n in range(3, 10)], max_tokens=24)
    expected = alone(engine, [*companions, *requests])
    for k in (1, 2):  # a sibling leaves its state at k blocks behind
        engine.run(asks([base[: k * b] + prompt(40, seed=67)], max_tokens=1))
    hits = engine.alone(requests, keep_cache=True)
    assert [r.cached for r in hits] == [(len(r.prompt) - 1) // engine.unit * engine.unit for r in requests]
    assert_same(expected[7:], hits, "alone")
    joining = [Ask(r.prompt, r.max_tokens, at=6 + i) for i, r in enumerate(requests)]
    run = engine.run([*companions, *joining])
    assert run.record.mixed_steps(run.ids[0]) >= len(requests) // 2
    assert all(result.cached for result in run.results[7:])
    assert_same(expected, run.results, "beside seven decodes")


def test_preemption(engine: Engine) -> None:
    """In a prefill and in decode, from an empty cache, and back into another company."""
    requests = asks(prompts((129, 700), seed=68), max_tokens=20)
    late = Ask(tuple(prompt(200, seed=69)), 4, at=12)
    expected = alone(engine, [*requests, late])
    for at in (2, 9, 16):

        def preempt(step: int, at: int = at) -> None:
            if step == at:
                engine.preempt(None, forget=True)

        with budget(engine, 192):
            run = engine.run([*requests, late], preempt)
        assert [run.record.preemptions[i] for i in run.ids[:2]] == [1, 1], f"preempted at step {at}"
        assert_same(expected, run.results, f"preempted at step {at}")
        engine.reset()


def test_abort_and_retry(engine: Engine) -> None:
    """In a prefill, and in decode; the retry and a sibling take what was published."""
    long = prompt(2 * engine.block + 70, seed=70)
    requests = asks([long, long[:500] + prompt(50, seed=71)])
    expected = alone(engine, requests)
    cached = []
    for steps in (1, 2, 8):
        with budget(engine, 192):
            engine.start_and_abort(Ask(requests[0].prompt, 40), steps)
            run = engine.run(requests)
        cached.append(run.results[0].cached)
        assert_same(expected, run.results, f"aborted after {steps} steps")
        engine.reset()
    assert cached[0] <= 192 and cached[-1] > engine.block, f"void: the retries took {cached} tokens"


@pytest.mark.parametrize("rule", [ranks.SUM, *device.BATCH_RULES, *device.MOE_RULES])
def test_a_rule_turned_off_in_the_workers(engine: Engine, kind: str, rule: str) -> None:
    """Then requests that share a step differ; once it is on again they do not."""
    if rule in device.MOE_RULES and kind == "dense":
        pytest.skip("a dense model has no experts")
    requests = asks(prompts((3, 63, 300), seed=72), max_tokens=4)
    try:
        engine.on_ranks(functools.partial(ranks.turn_off, rule))
        expected = alone(engine, requests)
        assert differing(expected, engine.run(requests).results)
    finally:
        engine.on_ranks(ranks.restore)
    expected = alone(engine, requests)
    assert_same(expected, engine.run(requests).results, "the rule on")


def test_ranks_that_disagree_do_not_start(machine: str, checkpoint: Path, tmp_path: Path) -> None:
    """The error names what differs, and where."""
    with pytest.raises(AssertionError) as error:
        run_child(checkpoint, tmp_path, [], planted(tmp_path / "fault", "one rank apart"), **OPTIONS)
    assert all(words in str(error.value) for words in ("another on rank 1", "use the same on every rank"))
