"""The two comparisons of the suite.  They are never mixed.

`assert_bitwise` is for invariance: the same token computed twice.  `assert_close` is for correctness:
the same mathematics computed by two programs, with one tolerance a dtype.
"""

import torch

# dtype in which the less exact of the two programs computes or returns -> (relative, absolute), for
# values of order 1.
TOLERANCES = {
    torch.float64: (1e-10, 1e-11),
    torch.float32: (1e-5, 2e-6),
    torch.bfloat16: (2e-2, 2e-2),
}


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Two programs agree.

    Args:
        actual: any floating-point tensor.
        expected: a tensor of the same shape; compared in float64.
        dtype: row of `TOLERANCES`; that of ``actual`` by default.

    """
    rtol, atol = TOLERANCES[dtype or actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=rtol, atol=atol)


def differing(actual: torch.Tensor, expected: torch.Tensor) -> int:
    """Elements whose bits differ.  Unlike ``==`` it tells 0.0 from -0.0 and takes NaN for itself."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    width = actual.element_size()
    bits = [t.contiguous().view(torch.uint8).reshape(-1, width) for t in (actual, expected)]
    return int((bits[0] != bits[1]).any(dim=1).sum())


def assert_bitwise(actual: torch.Tensor, expected: torch.Tensor, what: str = "tensors") -> None:
    """Two runs of the same computation give the same bits."""
    count = differing(actual, expected)
    assert count == 0, f"{what}: {count} of {actual.numel()} elements differ in bits"
