"""Two answers differ by exactly the tokens and logprobs in which they differ."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.audit.answers import answer
from tests.audit.fake import next_float32
from vllm_invariant.audit.answers import Difference, difference, float32_bits

FLOATS = st.floats(min_value=-1e4, max_value=0.0, width=32)


def test_an_answer_equals_itself():
    assert difference(answer(), answer()) == Difference(0, 0, "..")


def test_times_and_hits_are_no_difference():
    other = answer(cached=64, sent=5.0, first=6.0, last=7.0)
    assert difference(answer(), other) == difference(answer(), answer())


@given(FLOATS.filter(lambda x: x < 0))
def test_neighbouring_floats_differ(value):
    other = next_float32(value)
    got = difference(answer(logprobs=({7: value}, {8: 0.0})), answer(logprobs=({7: other}, {8: 0.0})))
    assert got == Difference(0, 1, "l.", f"position 0: logprob of 7 {value} became {other}")


def test_zero_and_minus_zero_differ():
    assert difference(answer((7,), ({7: 0.0},)), answer((7,), ({7: -0.0},))).logprobs == 1


def test_a_logprob_only_one_side_lists_differs():
    one, other = answer((7,), ({7: -0.5, 9: -1.0},)), answer((7,), ({7: -0.5, 4: -1.0},))
    got = difference(one, other)
    assert (got.tokens, got.logprobs, got.marks) == (0, 2, "l")
    assert got.first == "position 0: logprob of 9 -1.0 became None, and 1 more"


def test_another_token_is_marked_and_the_first_difference_named():
    got = difference(answer(), answer(tokens=(7, 9)))
    assert got == Difference(1, 0, ".t", "position 1: token 8 became 9")


def test_a_missing_end_counts_as_tokens_and_logprobs():
    short = answer(tokens=(7,), logprobs=({7: -0.5, 9: -1.25},))
    for got in (difference(answer(), short), difference(short, answer())):
        assert (got.tokens, got.logprobs, got.marks) == (1, 1, ".t")


@given(FLOATS)
def test_json_keeps_a_float32(value):
    assert float32_bits(json.loads(json.dumps(value))) == float32_bits(value)


def test_a_float_that_lost_bits_on_the_way_is_refused():
    with pytest.raises(ValueError, match="no float32"):
        float32_bits(-0.1)
    with pytest.raises(ValueError, match="no float32"):
        difference(answer((7,), ({7: -0.1},)), answer((7,), ({7: -0.1},)))
