"""Two answers differ by exactly the bits in which they differ."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.demo.answers import answer
from vllm_invariant.demo.answers import Difference, difference, float32_bits, total

FLOATS = st.floats(min_value=-1e4, max_value=0.0, width=32)


def next_float(value: float) -> float:
    """The float32 whose bit pattern is one more."""
    return struct.unpack("<f", struct.pack("<I", float32_bits(value) + 1))[0]


def test_an_answer_equals_itself():
    assert difference(answer(), answer()) == Difference(0, 0)


def test_times_and_hits_are_no_difference():
    assert difference(answer(), answer(cached=64, sent=5.0, first=6.0, last=7.0)) == Difference()


@given(FLOATS.filter(lambda x: x < 0))
def test_neighbouring_floats_differ(value):
    other = next_float(value)
    bits = (float32_bits(value) ^ float32_bits(other)).bit_count()
    assert bits >= 1
    got = difference(answer(logprobs=({7: value}, {8: 0.0})), answer(logprobs=({7: other}, {8: 0.0})))
    assert got == Difference(0, bits)


def test_zero_and_minus_zero_differ_in_one_bit():
    assert difference(answer(logprobs=({7: 0.0},)), answer(logprobs=({7: -0.0},))) == Difference(0, 1)


def test_a_logprob_only_one_side_lists_counts_whole():
    one, other = answer(logprobs=({7: -0.5, 9: -1.0},)), answer(logprobs=({7: -0.5, 4: -1.0},))
    assert difference(one, other) == Difference(0, 64)


def test_a_missing_end_counts_as_tokens_and_bits():
    short = answer(tokens=(7,), logprobs=({7: -0.5, 9: -1.25},))
    assert difference(answer(), short) == difference(short, answer()) == Difference(1, 32)


def test_differences_add_up():
    other = answer(tokens=(7, 9))
    assert total([answer(), answer()], [other, other]) == Difference(2, 0)


def test_answers_are_not_dropped_silently():
    with pytest.raises(ValueError):
        total([answer(), answer()], [answer()])


@given(FLOATS)
def test_json_keeps_a_float32(value):
    import json

    assert float32_bits(json.loads(json.dumps(value))) == float32_bits(value)


def test_a_float_that_lost_bits_on_the_way_is_refused():
    with pytest.raises(ValueError, match="no float32"):
        float32_bits(-0.1)
