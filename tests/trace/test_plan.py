"""What the command line says about the two runs."""

import pytest

from vllm_invariant.trace.plan import Ask, path_not_taken, read_asks, read_ids, second_way
from vllm_invariant.trace.record import Run, Step

ASK = Ask((1, 2, 3), 4)


def test_token_ids_from_words_and_files(tmp_path):
    file = tmp_path / "ids"
    file.write_text("[1, 2,\n3 4]\n")
    assert read_ids("1,2, 3") == (1, 2, 3)
    assert read_ids(f"@{file}") == (1, 2, 3, 4)


@pytest.mark.parametrize("text", ["", "1,x", "-1", "@/nowhere/at/all"])
def test_what_is_no_list_of_ids(text):
    with pytest.raises(ValueError):
        read_ids(text)


def test_requests_from_words_and_files(tmp_path):
    file = tmp_path / "company"
    file.write_text('[1, 2]\n\n{"prompt": [3], "max_tokens": 9, "at": 5}\n')
    assert read_asks([f"@{file}", "7,8"], 4) == (Ask((1, 2), 4), Ask((3,), 9, 5), Ask((7, 8), 4))


@pytest.mark.parametrize("line", ["[]", "{}", "1", '{"prompt": "text"}', "nonsense"])
def test_a_bad_line_is_named(tmp_path, line):
    file = tmp_path / "company"
    file.write_text(f"[1]\n{line}\n")
    with pytest.raises(ValueError, match="line 2"):
        read_asks([f"@{file}"], 4)


def test_the_second_run_is_said_in_words():
    way = second_way(ASK, hit=True, company=[ASK, ASK], after=[Ask((9,), 1)])
    assert way.name == "after 1 other request, on a hit of its own prompt, in the company of 2"
    assert way.before == (Ask((9,), 1), ASK) and not way.own_process
    assert second_way(ASK, cut=64).options == {"max_num_batched_tokens": 64}
    assert second_way(ASK, cut=64).own_process and second_way(ASK, alone=True).own_process
    with pytest.raises(ValueError, match="--with, --hit, --cut, --after or --alone"):
        second_way(ASK)


def _run(chunks, cached=0, requests=1):
    return Run([Step(i, a, b, b - a, requests, 0) for i, (a, b) in enumerate(chunks)], 9, cached, (), ())


@pytest.mark.parametrize(
    ("way", "void", "taken"),
    [
        ({"hit": True}, _run([(0, 9)]), _run([(8, 9)], cached=8)),
        ({"company": [ASK]}, _run([(0, 9)]), _run([(0, 9)], requests=2)),
        ({"cut": 4}, _run([(0, 9)]), _run([(0, 4), (4, 9)])),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_run_that_did_not_take_its_path(way, void, taken):
    first = _run([(0, 9)])
    assert path_not_taken(second_way(ASK, **way), first, void) is not None
    assert path_not_taken(second_way(ASK, **way), first, taken) is None
