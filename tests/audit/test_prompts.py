"""Prompts have the lengths they claim, and strangers share nothing with needles."""

import pytest

from vllm_invariant.audit import corpus
from vllm_invariant.demo.prompts import PRIVATE, STRANGER_LENGTHS, SYSTEM, cut

GRID = 64


@pytest.fixture(scope="module")
def prompts():
    return cut([list(range(3000)), list(range(10_000, 18_000))])


def test_needles_share_the_system_prompt_and_nothing_else(prompts):
    heads = {needle.tokens[:SYSTEM] for needle in (*prompts.needles, prompts.primer)}
    assert heads == {tuple(range(SYSTEM))}
    tails = {needle.tokens[SYSTEM] for needle in (*prompts.needles, prompts.primer)}
    assert len(tails) == len(prompts.needles) + 1


def test_lengths_are_exact(prompts):
    assert [len(needle.tokens) for needle in prompts.needles] == [SYSTEM + n for n in PRIVATE]
    assert [len(stranger.tokens) for stranger in prompts.strangers] == list(STRANGER_LENGTHS)


def test_lengths_meet_the_places_where_bits_part(prompts):
    lengths = [len(needle.tokens) for needle in prompts.needles]
    assert {0, 1} <= {length % GRID for length in lengths}
    assert len({length % GRID for length in lengths}) >= 4


def test_strangers_start_differently(prompts):
    starts = [p.tokens[:8] for p in (*prompts.strangers, prompts.needles[0])]
    assert len(set(starts)) == len(starts)


def test_a_short_first_text_is_refused():
    with pytest.raises(ValueError, match="2000 tokens"):
        cut([[1] * 1999, [2] * 9000])


def test_the_corpus_is_english_and_the_same_every_time():
    texts = corpus.corpus()
    assert texts == corpus.corpus()
    assert len(texts) > 30 and sum(map(len, texts)) > 200_000
    assert sum(text.count(" the ") for text in texts) > 1000


def test_nothing_in_the_corpus_depends_on_the_process():
    import re

    assert not [m for text in corpus.corpus() for m in re.findall(r"at 0x[0-9a-f]{8,}", text)]


def test_docstrings_come_under_their_names():
    text = corpus.docstrings("heapq")
    assert text.startswith("heapq\n") and "\n\nheapq.merge\n" in text
