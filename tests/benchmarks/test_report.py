"""Reports say how they were made, without what one machine has."""

import sys

import pytest

from benchmarks import report


@pytest.mark.parametrize(
    "words",
    [
        ["--rounds", "3", "--out", "/a/folder", "--shape", "tiny"],
        ["--models=/b", "--rounds", "3", "--work", "/c", "--shape", "tiny"],
        ["--rounds", "3", "--shape", "tiny", "--out"],
    ],
)
def test_a_command_is_shown_without_its_folders(monkeypatch, words):
    monkeypatch.setattr(sys, "argv", ["program.py", *words])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert report.command() == "python program.py --rounds 3 --shape tiny"
