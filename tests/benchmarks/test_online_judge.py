"""The judge of the online validation sees what it counts."""

import json
import struct
from pathlib import Path

import pytest

from benchmarks.online_judge import Mismatches, crossings, mixed_steps, overlaps
from benchmarks.online_traffic import Reply, Request, background, target_kinds

REQUEST = Request((1, 2, 3), 2, compared=True)


def float32(value: float) -> float:
    """The nearest float32, as JSON brings it."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def reply(name: str = "target-0000", **changes) -> Reply:
    """Two tokens with two listed logprobs each."""
    listed = [{7: float32(-0.5), 8: float32(-1.5)}, {9: float32(-0.25), 8: float32(-2.0)}]
    return Reply(name, REQUEST, **({"tokens": [7, 9], "logprobs": listed} | changes))


def compared(**changes) -> Mismatches:
    """A changed reply against the plain one."""
    found = Mismatches()
    found.add(reply("alone-0000"), reply(**changes))
    return found


def test_equal_replies() -> None:
    """Nothing to see."""
    found = compared()
    assert not found.any() and found.requests_compared == 1


def test_last_bit_of_a_selected_logprob() -> None:
    """One bit is a mismatch of the token's own logprob and of the map, and the difference is reported."""
    moved = struct.unpack("<f", struct.pack("<I", struct.unpack("<I", struct.pack("<f", -0.5))[0] + 1))[0]
    rows = [{7: moved, 8: float32(-1.5)}, {9: float32(-0.25), 8: float32(-2.0)}]
    found = compared(logprobs=rows)
    assert (found.tokens, found.selected_logprobs, found.top_logprob_maps) == (0, 1, 1)
    assert found.maximum_difference == pytest.approx(2**-24, rel=1e-6) and found.any()


def test_another_listed_token() -> None:
    """The map differs, the selected logprob does not."""
    rows = [{7: float32(-0.5), 6: float32(-1.5)}, {9: float32(-0.25), 8: float32(-2.0)}]
    found = compared(logprobs=rows)
    assert (found.tokens, found.selected_logprobs, found.top_logprob_maps) == (0, 0, 1)


def test_another_token_and_a_short_reply() -> None:
    """Positions that only one reply has count."""
    assert compared(tokens=[7, 8]).tokens == 1
    short = compared(tokens=[7], logprobs=reply().logprobs[:1])
    assert (short.tokens, short.selected_logprobs, short.top_logprob_maps) == (1, 1, 1)


def test_minus_zero_is_not_zero() -> None:
    """Bits, not values."""
    listed = reply().logprobs[1:]
    alone, loaded = ([{7: zero, 8: float32(-1.5)}, *listed] for zero in (0.0, -0.0))
    found = Mismatches()
    found.add(reply(logprobs=alone), reply(logprobs=loaded))
    assert found.selected_logprobs == 1 and found.maximum_difference == 0.0


def test_mixed_steps_of_a_trace(tmp_path: Path) -> None:
    """Only steps with both kinds count, and only for those that decoded."""
    steps = [
        {"prefill": ["cmpl-target-0001-0-ab"], "decode": []},
        {
            "prefill": ["cmpl-background-0003-0-cd"],
            "decode": ["cmpl-target-0001-0-ab", "cmpl-target-0002-0-ef"],
        },
        {"prefill": [], "decode": ["cmpl-target-0001-0-ab"]},
        {"prefill": ["cmpl-background-0004-0-cd"], "decode": ["cmpl-target-0001-0-ab"]},
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(step) + "\n" for step in steps))
    found = mixed_steps(trace)
    assert found == {"target-0001": 2, "target-0002": 1}
    targets = [reply("target-0001"), reply("target-0003")]
    assert crossings(targets, targets, found) == [2, 0]


def test_the_clients_clock() -> None:
    """A prefill that ended before the target's first token, or began after its last, was no company."""
    target = reply(sent=0.0, first=10.0, last=20.0)
    times = {"before": (1.0, 9.0), "during": (12.0, 13.0), "across": (5.0, 15.0), "after": (21.0, 22.0)}
    others = {n: reply(f"background-{n}", sent=s, first=f) for n, (s, f) in times.items()}
    assert {n: overlaps(target, [o]) for n, o in others.items()} == {
        "before": False,
        "during": True,
        "across": True,
        "after": False,
    }
    assert not overlaps(target, [target])
    assert not overlaps(target, [reply("background-1", sent=12.0, first=0.0, error="refused")])


def test_traffic_is_what_it_says() -> None:
    """Three prompt classes, three generations, greedy and sampled, all distinct; the same every time."""
    kinds = target_kinds(2000, sampled=True)
    assert len(set(kinds)) == len(kinds) == 18
    assert {len(k.prompt) for k in kinds} == {116, 321, 1059}
    assert {k.max_tokens for k in kinds} == {16, 64, 128}
    assert len(target_kinds(2000, sampled=False)) == 9
    assert background(30, 2000) == background(30, 2000)
    lengths = [len(r.prompt) for r in background(30, 2000)]
    assert {length: lengths.count(length) for length in set(lengths)} == {116: 10, 321: 10, 1059: 10}
