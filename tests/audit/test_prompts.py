"""Prompts lie around the server's edges, and strangers share nothing with targets."""

import re

import pytest

from vllm_invariant.audit import corpus
from vllm_invariant.audit.geometry import Geometry
from vllm_invariant.audit.prompts import PRIVATE, SAFE_IDS, TURN, Prompt, Supply, lengths

GEOMETRY = Geometry(max_len=4096, grid=64, block=320, unit=64, budget=512)
TEXT = list(range(30_000))


def test_lengths_are_one_below_at_and_one_above_each_edge():
    assert lengths(GEOMETRY, 32) == [63, 64, 65, 319, 320, 321, 511, 512, 513, 639, 640, 641]


def test_what_a_server_does_not_tell_is_no_edge():
    assert lengths(Geometry(max_len=4096), 32) == [63, 64, 65]


@pytest.mark.parametrize("max_len", [100, 400, 640, 700])
def test_a_later_turn_still_fits(max_len):
    tokens = 16
    supply = Supply(TEXT, Geometry(max_len, 64, 320, 64, 512), tokens, seed=0)
    for target in supply.targets:
        assert len(supply.next_turn(target, range(tokens)).tokens) + tokens <= max_len
    assert all(len(supply.stranger(400, 1059).tokens) + 1 < max_len for _ in range(3))


def test_targets_share_a_beginning_and_end_apart():
    targets = Supply(TEXT, GEOMETRY, 32, seed=0).targets
    assert [len(target.tokens) for target in targets] == lengths(GEOMETRY, 32)
    longest = targets[-1].tokens
    assert all(target.tokens[:-PRIVATE] == longest[: len(target.tokens) - PRIVATE] for target in targets)
    assert len({target.tokens[-PRIVATE:] for target in targets}) == len(targets)


def test_a_primer_is_what_a_target_shares():
    supply = Supply(TEXT, GEOMETRY, 32, seed=0)
    target = supply.targets[-1]
    assert supply.primer(target) == Prompt(target.tokens[:-PRIVATE], 1)


def test_the_seed_decides_everything():
    def drawn(seed):
        supply = Supply(TEXT, GEOMETRY, 32, seed)
        return supply.targets, supply.stranger(1)

    assert drawn(1) == drawn(1) != drawn(2)


def test_a_next_turn_follows_the_answer():
    supply = Supply(TEXT, GEOMETRY, 32, seed=0)
    target = supply.targets[0]
    turn = supply.next_turn(target, [5, 6])
    assert turn.tokens[: len(target.tokens) + 2] == (*target.tokens, 5, 6)
    assert len(turn.tokens) == len(target.tokens) + 2 + TURN


def test_without_a_text_ids_are_ordinary_ones():
    supply = Supply([], GEOMETRY, 32, seed=0)
    ids = {token for target in supply.targets for token in target.tokens}
    assert ids <= set(SAFE_IDS) and len(ids) > 300


def test_a_short_text_goes_round():
    assert len(Supply([1, 2, 3], GEOMETRY, 32, seed=0).cut(1000)) == 1000


def test_the_corpus_is_english_and_the_same_every_time():
    texts = corpus.corpus()
    assert texts == corpus.corpus()
    assert len(texts) > 30 and sum(map(len, texts)) > 200_000
    assert sum(text.count(" the ") for text in texts) > 1000


def test_nothing_in_the_corpus_depends_on_the_process():
    assert not [m for text in corpus.corpus() for m in re.findall(r"at 0x[0-9a-f]{8,}", text)]


def test_docstrings_come_under_their_names():
    text = corpus.docstrings("heapq")
    assert text.startswith("heapq\n") and "\n\nheapq.merge\n" in text
