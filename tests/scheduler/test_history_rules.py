"""What a request's past may and may not change: replay, provenance, hits of a resumed request."""

import pytest

from tests.scheduler.build import Driver, prompt
from vllm_invariant.history import HistoryMixin
from vllm_invariant.scheduler import GridSchedulerMixin

GRID, BLOCK = 64, 320


def tokens(driver: Driver, name: str) -> list[int]:
    return list(driver.requests[name].all_token_ids)


# --- replay --------------------------------------------------------------------------------------


def preempted(driver: Driver, length: int, made: int) -> list[tuple[int, int]]:
    """Chunks of a request after it was preempted with ``made`` generated tokens, to its end."""
    request = driver.add("a", prompt(length), max_tokens=made + 20)
    while request.num_output_tokens < made:
        driver.step()
    driver.preempt_all()
    before = len(driver.chunks("a"))
    driver.run()
    assert request.num_preemptions == 1
    return driver.chunks("a")[before:]


@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("length", [129, BLOCK + 2, 2 * BLOCK - 1])
@pytest.mark.parametrize("made", [8, 31, BLOCK])
def test_generated_tokens_are_decoded_again(drive, mode, asynchronous, length, made):
    """The prompt by prefill, ending exactly at its end, then one known token a step."""
    driver = drive(mode=mode, asynchronous=asynchronous)
    again = preempted(driver, length, made)
    assert [end for _, end in again if end <= length][-1] == length
    decoded = [(start, end) for start, end in again if start >= length]
    assert decoded == [(p, p + 1) for p in range(length, length + made + 19)]


def test_a_resumed_request_keeps_its_tokens(drive):
    undisturbed, driver = drive(), drive()
    undisturbed.add("a", prompt(200), max_tokens=51)
    undisturbed.run()
    preempted(driver, 200, 31)
    assert tokens(driver, "a") == tokens(undisturbed, "a")


def test_without_replay_generated_tokens_are_prefilled(drive, monkeypatch):
    """The rule turned off."""
    monkeypatch.setattr(GridSchedulerMixin, "_decode_tokens", lambda self, request, start, n: n)
    again = preempted(drive(mode="none"), 129, 31)
    assert any(end - start > 1 for start, end in again if start >= 129)


# --- provenance ----------------------------------------------------------------------------------


def second_turn(driver: Driver, length: int, made: int) -> int:
    """Tokens that a conversation's next turn takes from the cache."""
    driver.add("turn 1", prompt(length), max_tokens=made)
    driver.run()
    driver.add("turn 2", tokens(driver, "turn 1") + prompt(70, seed=5))
    driver.run()
    return driver.hits("turn 2")[0]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("length", "hit"), [(100, 64), (300, 256), (BLOCK, 320), (BLOCK + 1, 320), (700, 640)]
)
def test_decoded_tokens_are_not_published(drive, asynchronous, length, hit):
    """The next turn hits what the first turn's prefill made, and nothing that its decode made."""
    assert second_turn(drive(asynchronous=asynchronous), length, made=2 * BLOCK) == hit


def test_stock_publishes_decoded_tokens(drive, monkeypatch):
    """The rule turned off."""
    monkeypatch.setattr(
        HistoryMixin, "_publish", lambda self, request, computed: self._stock_publish(request, computed)
    )
    assert second_turn(drive(), 300, made=2 * BLOCK) > 300


def test_hits_of_every_length_land_on_the_grid(drive):
    driver = drive()
    for length in (64, 65, 129, 130, 321, 641, 700, 704, 1500):
        for name in ("cold", "warm"):
            driver.add(f"{name} {length}", prompt(length, seed=length))
            driver.run()
    hits = {n: driver.hits(f"warm {n}")[0] for n in (64, 65, 129, 130, 321, 641, 700, 704, 1500)}
    assert hits == {64: 0, 65: 64, 129: 128, 130: 128, 321: 320, 641: 640, 700: 640, 704: 640, 1500: 1472}
    assert all(driver.hits(f"cold {n}") == [0] for n in hits)


# --- hits of a resumed request -------------------------------------------------------------------


def resumed_beside_its_own_text(driver: Driver, length: int, made: int) -> int:
    """Tokens a resumed request takes from the cache, where another prompt holds all it had generated."""
    a = driver.add("a", prompt(length), max_tokens=made + 20)
    while a.num_output_tokens < made:
        driver.step()
    text = tokens(driver, "a")
    driver.scheduler._preempt_request(driver.scheduler.running.pop(), 0.0)
    # "a" waits at the head of the queue: keep it there while the other prompt is prefilled.
    driver.scheduler.waiting.remove_request(a)
    driver.add("b", text, max_tokens=1)
    driver.run(until=["b"])
    driver.scheduler.waiting.prepend_request(a)
    driver.run()
    return driver.hits("a")[-1]


def test_a_resumed_request_hits_its_prompt_only(drive):
    """The other prompt's tokens were prefilled, this request's were decoded."""
    assert resumed_beside_its_own_text(drive(), 300, made=500) == 256


def test_without_the_limit_it_hits_its_own_text(drive, monkeypatch):
    """The rule turned off."""
    monkeypatch.setattr(HistoryMixin, "_find_hit", lambda self, *args: self._stock_find_hit(*args))
    assert resumed_beside_its_own_text(drive(), 300, made=500) > 300


# --- models that are none of our business ---------------------------------------------------------


def test_other_models_are_scheduled_as_stock_would(drive, monkeypatch):
    """No Qwen GDN group: same steps as stock's scheduler, off the grid and all."""
    from vllm_invariant import scheduler

    ours = drive(mode="none", budget=100, seqs=4)
    monkeypatch.setattr(scheduler, "has_qwen_gdn", lambda kv_cache_config: False)
    without, stock = (
        drive(mode="none", budget=100, seqs=4),
        drive(mode="none", budget=100, seqs=4, stock=True),
    )
    for driver in (ours, without, stock):
        for i in range(4):
            driver.add(str(i), prompt(300, seed=i), max_tokens=20)
        driver.run()
    assert [s.chunks for s in without.steps] == [s.chunks for s in stock.steps]
    assert [s.chunks for s in ours.steps] != [s.chunks for s in stock.steps]
