"""The first difference is the one everything else followed from."""

import numpy as np
import pytest

from vllm_invariant.trace.compare import compare
from vllm_invariant.trace.record import AFTER, BEFORE, KEYS_AND_VALUES, STATES, Run, Seen, Step

LAYERS = ("embed", "layers.0.attn.conv", "layers.0.attn.recurrence", "layers.0.attn", "layers.1.mlp", "head")


def seen(site, tensor, positions, digests):
    return Seen(site, tensor, np.array(positions), np.array(digests), (len(positions), 4), "bfloat16", "ran")


def make(cuts, apart=lambda site, position: 0, states=True, tokens=(5,)):
    """A run of 8 tokens, cut anywhere; ``apart`` changes checksums."""
    steps = []
    for number, (start, end) in enumerate(cuts):
        step = Step(number, start, end, end - start, 1, 0)
        if start and states:
            digest = 1000 + start + apart("state", start - 1)
            step.seen.append(seen("layers.0.attn", STATES[1] + BEFORE, [start - 1], [digest]))
        for i, site in enumerate(LAYERS):
            digests = [100 * i + p + apart(site, p) for p in range(start, end)]
            step.seen.append(seen(site, "output", range(start, end), digests))
        if states:
            digest = 1000 + end + apart("state", end - 1)
            step.seen.append(seen("layers.0.attn", STATES[1] + AFTER, [end - 1], [digest]))
        steps.append(step)
    return Run(steps, 8, cuts[0][0], tokens, tuple(bytes([t]) for t in tokens))


WHOLE, CUT = [(0, 8)], [(0, 4), (4, 8)]


@pytest.mark.parametrize("cuts", [WHOLE, CUT, [(0, 1), (1, 8)]])
def test_the_same_however_it_was_cut(cuts):
    verdict = compare(make(WHOLE), make(cuts))
    assert verdict.same and verdict.compared == 8 * len(LAYERS) + 1


def test_a_hit_is_compared_where_both_computed():
    verdict = compare(make(CUT), make([(4, 8)]))
    assert verdict.same and verdict.compared == 4 * len(LAYERS) + 3


def test_the_earliest_place_not_the_earliest_token():
    """Token 6 differs at the recurrence; from there on later places and later tokens differ."""

    def spread(site, position):
        return position >= 6 and LAYERS.index(site) >= 2 if site in LAYERS else 0

    difference = compare(make(WHOLE), make(CUT, spread)).difference
    assert (difference.first.site, difference.first.position) == ("layers.0.attn.recurrence", 6)
    assert (difference.layer, difference.operation) == ("layers.0", "attn.recurrence")
    assert difference.positions == (6, 7)
    assert difference.sites == LAYERS[2:]


def test_an_earlier_step_of_the_first_run_comes_first():
    """In two steps, a late place at token 2 comes before an early one at token 5."""

    def spread(site, position):
        return (site, position) in (("head", 2), ("embed", 5))

    difference = compare(make(CUT), make(WHOLE, spread)).difference
    assert (difference.first.site, difference.first.position) == ("head", 2)


def test_a_restored_state_comes_before_what_it_led_to():
    """On a hit the state is wrong, and then every token's recurrence."""

    def spread(site, position):
        return 1 if site == "state" or site in LAYERS[2:] else 0

    difference = compare(make(CUT), make([(4, 8)], spread)).difference
    assert difference.first.site == "layers.0.attn"
    assert difference.first.tensor == STATES[1] + AFTER and difference.second.tensor == STATES[1] + BEFORE
    assert difference.first.position == 3


def test_restored_keys_come_before_the_attention_that_read_them():
    a, b = make(WHOLE, states=False), make([(4, 8)], lambda site, p: site == "layers.0.attn", states=False)
    a.steps[0].seen.append(seen("layers.0.attn", KEYS_AND_VALUES, range(8), range(8)))
    b.steps[0].seen.append(seen("layers.0.attn", KEYS_AND_VALUES, range(4), [0, 1, 77, 3]))
    difference = compare(a, b).difference
    assert (difference.first.tensor, difference.first.position) == (KEYS_AND_VALUES, 2)


def test_a_difference_after_the_last_place_is_seen_in_the_answer():
    verdict = compare(make(WHOLE), make(WHOLE, tokens=(6,)))
    assert verdict.difference is None and not verdict.same
    assert (verdict.token, verdict.logprobs) == (0, 0)
