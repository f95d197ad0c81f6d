"""A checksum is a function of a row's bytes, and of nothing else."""

import pytest
import torch

from vllm_invariant.trace.digest import row_digests

DTYPES = [torch.bfloat16, torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool]


def rows(dtype, count=7, width=33):
    source = torch.Generator().manual_seed(1)
    return torch.randint(0, 2, (count, width), generator=source).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wherever_a_row_stands(dtype):
    x = rows(dtype)
    whole = row_digests(x, 7)
    assert torch.equal(torch.cat([row_digests(x[i : i + 1], 1) for i in range(7)]), whole)
    strided = torch.stack([x, x], 1)[:, 0]
    assert torch.equal(row_digests(strided, 7), whole)
    assert torch.equal(row_digests(x.flip(0), 7), whole.flip(0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_single_element_counts(dtype):
    x = rows(dtype, count=1)
    seen = {int(row_digests(x, 1))}
    for i in range(x.shape[1]):
        changed = x.clone()
        changed[0, i] = 1 - changed[0, i].to(torch.int64)
        seen.add(int(row_digests(changed, 1)))
    assert len(seen) == x.shape[1] + 1


def test_one_bit_and_the_sign_of_zero():
    x = torch.tensor([[1.0, 0.0]])
    for other in (torch.tensor([[1.0, -0.0]]), torch.tensor([[1.0000001, 0.0]])):
        assert row_digests(x, 1) != row_digests(other, 1)


def test_large_rows_in_parts(monkeypatch):
    from vllm_invariant.trace import digest

    x = rows(torch.bfloat16, count=9)
    whole = row_digests(x, 9)
    monkeypatch.setattr(digest, "_AT_ONCE", 40)
    assert torch.equal(row_digests(x, 9), whole)
