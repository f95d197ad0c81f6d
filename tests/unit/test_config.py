"""Options: what is known, what is refused, and that the answer names what works."""

import pytest

from vllm_invariant.arithmetic import ARITHMETICS, CHUNK, RECURRENT, Arithmetic
from vllm_invariant.config import KEY, InvariantConfig


def parse(options):
    return InvariantConfig.from_additional_config({KEY: options})


@pytest.mark.parametrize("given", [{}, None, 3, "x", {"other": 1}, {KEY: {}}])
def test_defaults(given):
    config = InvariantConfig.from_additional_config(given)
    assert config == InvariantConfig()
    assert config.arithmetic is CHUNK
    assert config.allow_untested_gpu is False


def test_known_options():
    config = parse({"gdn_arithmetic": "chunk", "allow_untested_gpu": True})
    assert config.arithmetic is CHUNK and config.allow_untested_gpu is True


def test_the_recurrent_arithmetic_is_chosen_by_name():
    assert parse({"gdn_arithmetic": "recurrent"}).arithmetic is RECURRENT
    assert (RECURRENT.grid, RECURRENT.decode_equals_prefill) == (1, True)


def test_unknown_key_lists_the_known():
    with pytest.raises(ValueError) as error:
        parse({"gdn_arithmetc": "chunk"})
    message = str(error.value)
    assert "'gdn_arithmetc'" in message
    assert "known keys: allow_untested_gpu, gdn_arithmetic" in message


def test_unknown_arithmetic_lists_the_known():
    with pytest.raises(ValueError) as error:
        parse({"gdn_arithmetic": "exact"})
    assert "'exact'" in str(error.value)
    assert all(name in str(error.value) for name in ARITHMETICS)


@pytest.mark.parametrize("value", [["chunk"], {"chunk": 1}])
def test_an_arithmetic_that_is_no_name(value):
    with pytest.raises(ValueError, match="use one of: chunk"):
        parse({"gdn_arithmetic": value})


@pytest.mark.parametrize("value", [1, "true", None])
def test_allow_untested_gpu_is_a_truth_value(value):
    with pytest.raises(ValueError, match="allow_untested_gpu must be true or false"):
        parse({"allow_untested_gpu": value})


@pytest.mark.parametrize("value", [3, "chunk", ["gdn_arithmetic"]])
def test_options_that_are_no_mapping(value):
    with pytest.raises(ValueError, match="must be a mapping"):
        parse(value)


def test_arithmetics_are_found_by_their_own_name():
    assert all(ARITHMETICS[a.name] is a for a in ARITHMETICS.values())
    assert all(isinstance(a, Arithmetic) and a.grid > 0 for a in ARITHMETICS.values())


def test_an_arithmetic_of_grid_one_has_nothing_to_replay():
    """If a token's bits do not depend on cuts at all, decode and prefill are the same program."""
    assert all(a.decode_equals_prefill for a in ARITHMETICS.values() if a.grid == 1)


def test_chunk_is_the_64_token_grid_with_another_decode():
    assert (CHUNK.grid, CHUNK.decode_equals_prefill) == (64, False)
