# In a vLLM branch: not needed (a tool for users).
"""Checksums of the exact bytes of each row of a tensor."""

import functools

import torch

_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_ONCE = 1 << 22  # elements widened to eight bytes at a time


@functools.cache
def _weights(width: int, device: torch.device) -> torch.Tensor:
    source = torch.Generator().manual_seed(width)
    weights = torch.randint(-(2**62), 2**62, (width,), generator=source)
    return (weights * 2 + 1).to(device)  # odd: no single changed element can vanish


def row_digests(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """One checksum a row: a sum of the row's bits times fixed weights, modulo 2**64.

    Integers add up to the same whatever the order, so a checksum is a function of the bytes alone.

    Args:
        tensor: any dtype; its first dimension is ``rows``, or a multiple of it.
        rows: how many.

    Returns:
        (rows,) int64 on the tensor's device.

    """
    bits = tensor.detach().reshape(rows, -1).contiguous().view(_INTEGER[tensor.element_size()])
    weights = _weights(bits.shape[1], bits.device)
    step = max(1, _AT_ONCE // max(1, bits.shape[1]))
    parts = [(part.to(torch.int64) * weights).sum(1) for part in bits.split(step)]
    return torch.cat(parts)


def raw_row(tensor: torch.Tensor, rows: int, row: int) -> torch.Tensor:
    """A copy of one row on the CPU, flattened."""
    return tensor.detach().reshape(rows, -1)[row].to("cpu", copy=True)
