"""The verdict: every axis came about, hits happened, no bit differs."""

import pytest
from rich.console import Console

from tests.demo.answers import answer
from vllm_invariant.demo import report
from vllm_invariant.demo.answers import Difference
from vllm_invariant.demo.axes import AXES, BOOT, REFERENCE, Outcome

COLD = Outcome([answer(), answer()])


def row(axis=AXES[0], outcome=None):
    return report.compare(axis, COLD.answers, outcome or Outcome([answer(), answer(cached=64)]))


def test_equal_answers_with_hits_pass():
    assert report.failures(COLD, [row()]) == []


def test_one_bit_fails():
    other = answer(logprobs=({7: -0.5, 9: -1.25}, {8: -0.2500000298023224}))
    broken = row(outcome=Outcome([answer(cached=64), other]))
    assert broken.difference == Difference(0, 1)
    assert report.failures(COLD, [row(), broken]) == ["batch: 0 tokens and 1 logprob bits differ"]


def test_a_try_that_did_not_come_about_counts_as_well():
    other = answer(tokens=(7, 9), cached=64)
    tried = row(outcome=Outcome([answer(), answer()], others=[(1, answer()), (0, other)]))
    assert (tried.requests, tried.cached, tried.difference) == (4, 64, Difference(1, 0))


def test_no_hit_anywhere_fails():
    assert report.failures(COLD, [row(outcome=COLD)]) == ["no request hit the prefix cache"]


@pytest.mark.parametrize("of_reference", [True, False])
def test_an_axis_that_did_not_come_about_fails(of_reference):
    void = Outcome([answer(cached=64), answer()], void="nobody came")
    reference, other = (void, COLD) if of_reference else (COLD, void)
    problems = report.failures(reference, [row(), row(outcome=other)])
    assert len(problems) == 1 and "nobody came" in problems[0]


def test_the_table_shows_every_axis_and_its_numbers():
    axes = (*AXES, BOOT)
    rows = [row(axis) for axis in axes]
    rows[-1] = report.compare(BOOT, COLD.answers, Outcome([answer(tokens=(1, 2)), answer(cached=1984)]))
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.table(COLD, rows))
    text = console.export_text()
    for axis in axes:
        assert axis.name in text
    assert "1,984" in text
    assert max(map(len, text.splitlines())) <= 80


def test_axis_names_tell_the_rows_apart():
    names = [axis.name for axis in (REFERENCE, *AXES, BOOT)]
    assert len(set(names)) == len(names)


def test_success_counts_what_was_compared():
    assert report.success(COLD, [row(), row()]).startswith("2 times 4 tokens and 6 float32 logprobs")
