"""Copy-on-write of a page that a state and an attention layer overlay."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

utils = pytest.importorskip("vllm.v1.worker.utils", reason="vLLM is not installed")
from vllm_invariant.block_copy import copy_whole_pages, from_the_beginning, widest_first  # noqa: E402

STOCK = getattr(utils.copy_kv_cache_blocks_inplace, "__wrapped__", utils.copy_kv_cache_blocks_inplace)
BLOCKS, PAGE, STATE = 4, 96, 64  # bytes in a page, and those that the state uses of it


@pytest.fixture
def views() -> list[torch.Tensor]:
    """A float32 state view and a bf16 attention view of the same pages, the state first as stock has them.

    The pages are those of one of two layers in one allocation, as in the engine: an allocation of one
    layer only is copied by whole strides, whatever the view.
    """
    bytes_ = torch.arange(2 * BLOCKS * PAGE).remainder(251).to(torch.uint8)
    pages = bytes_.view(2, BLOCKS, PAGE)[1]
    state = pages.view(torch.float32)[:, : STATE // 4]
    attention = pages.view(torch.bfloat16)
    assert state.data_ptr() == attention.data_ptr()
    return [state, attention]


def page(views: list[torch.Tensor], block: int) -> torch.Tensor:
    return views[1][block].view(torch.uint8).clone()


def test_the_whole_page_is_copied(views):
    source, others = page(views, 2), [page(views, b) for b in (0, 3)]
    copy_whole_pages(STOCK)(views, BLOCKS, [(2, 1)])
    assert torch.equal(page(views, 1), source)
    assert torch.equal(page(views, 2), source)
    assert all(torch.equal(page(views, b), kept) for b, kept in zip((0, 3), others, strict=True))


def test_stock_leaves_the_tail_behind(views):
    """The rule turned off; once this fails, the module can go."""
    source, before = page(views, 2), page(views, 1)
    STOCK(views, BLOCKS, [(2, 1)])
    copied = page(views, 1)
    assert torch.equal(copied[:STATE], source[:STATE])
    assert torch.equal(copied[STATE:], before[STATE:]) and not torch.equal(copied[STATE:], source[STATE:])


def test_several_copies_and_several_layers(views):
    other = [view.clone() for view in views]  # a layer elsewhere, its views not overlaid
    expected = [page(views, b) for b in (0, 0, 2, 2)]
    elsewhere = other[0].clone()
    copy_whole_pages(STOCK)([views[0], other[0], views[1]], BLOCKS, [(0, 1), (2, 3)])
    assert all(torch.equal(page(views, b), expected[b]) for b in range(BLOCKS))
    assert torch.equal(other[0], elsewhere[[0, 0, 2, 2]])


def test_no_copies(views):
    before = [view.clone() for view in views]
    copy_whole_pages(STOCK)(iter(views), BLOCKS, [])
    assert all(torch.equal(a, b) for a, b in zip(views, before, strict=True))


def test_widest_first_is_stable_and_counts_bytes():
    a, b, c, d = (
        torch.zeros(4),
        torch.zeros(9, dtype=torch.uint8),
        torch.zeros(2, dtype=torch.float64),
        torch.zeros(5),
    )
    assert [id(t) for t in widest_first([b, a, c, d])] == [id(t) for t in (d, a, c, b)]


def test_a_copy_of_a_copy_is_a_copy_of_the_first(views):
    source = page(views, 0)
    copy_whole_pages(STOCK)(views, BLOCKS, [(0, 1), (1, 2), (2, 3)])
    assert all(torch.equal(page(views, b), source) for b in range(BLOCKS))


def test_stock_copies_what_the_block_held_before(views):
    """The rule turned off."""
    source, before = page(views, 0), page(views, 1)
    STOCK(views[1:], BLOCKS, [(0, 1), (1, 2)])
    assert torch.equal(page(views, 1), source)
    assert torch.equal(page(views, 2), before) and not torch.equal(before, source)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8))
def test_all_at_once_is_as_one_after_another(copies):
    one_by_one, at_once = list("abcdef"), list("abcdef")
    for source, destination in copies:
        one_by_one[destination] = one_by_one[source]
    for destination, content in [(d, at_once[s]) for s, d in from_the_beginning(copies)]:
        at_once[destination] = content
    assert at_once == one_by_one
