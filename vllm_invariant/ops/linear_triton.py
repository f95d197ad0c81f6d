# In a vLLM branch: vllm/model_executor/determinism/batch_invariant.py.
"""Product of bfloat16 rows with a weight, in one order of rounding whatever the tile.

The kernel looks at the number of rows itself: a graph that torch.compile makes for any number of rows has
one launch in it, and so has the host.
"""

import torch
import triton
import triton.language as tl

from vllm_invariant.ops.linear_launch import Launch


@triton.jit
def _product(
    p_x, p_w, p_out, rows, columns, depth, x_stride, out_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """One program's tiles, of BM rows and BN columns, computed BK deep at a time."""
    row_tiles = tl.cdiv(rows, BM)
    column_tiles = tl.cdiv(columns, BN)
    o_k = tl.arange(0, BK)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS):
        # Eight rows of tiles go together, so that neighbours find each other's weights in the cache.
        i_m, i_n = tl.swizzle2d(tile // column_tiles, tile % column_tiles, row_tiles, column_tiles, 8)
        o_m = i_m * BM + tl.arange(0, BM)
        o_n = i_n * BN + tl.arange(0, BN)
        m_row, m_column = (o_m < rows)[:, None], (o_n < columns)[None, :]
        p_row = p_x + o_m.to(tl.int64)[:, None] * x_stride
        p_column = p_w + o_n.to(tl.int64)[None, :] * depth
        # Ascending depth into one accumulator.  This order decides the bits, and none of the sizes does.
        b_out = tl.zeros((BM, BN), dtype=tl.float32)
        for k in tl.range(0, depth, BK, num_stages=STAGES):
            # Rows that are not there are not read.  With row 0 in their place a tile of 64 rows took 1.7
            # times as long for 32 rows as for 64.
            inside = EVEN | (k + o_k < depth)
            b_x = tl.load(p_row + (k + o_k)[None, :], mask=m_row & inside[None, :], other=0.0)
            b_w = tl.load(p_column + (k + o_k)[:, None], mask=m_column & inside[:, None], other=0.0)
            b_out = tl.dot(b_x, b_w, b_out)
        p = p_out + o_m.to(tl.int64)[:, None] * out_stride + o_n[None, :]
        tl.store(p, b_out.to(p_out.dtype.element_ty), mask=m_row & m_column)


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    p_x, p_w, p_out, rows, columns, depth, x_stride, out_stride,
    UP_TO_0: tl.constexpr, BM_0: tl.constexpr, BN_0: tl.constexpr, BK_0: tl.constexpr, STAGES_0: tl.constexpr,
    UP_TO_1: tl.constexpr, BM_1: tl.constexpr, BN_1: tl.constexpr, BK_1: tl.constexpr, STAGES_1: tl.constexpr,
    UP_TO_2: tl.constexpr, BM_2: tl.constexpr, BN_2: tl.constexpr, BK_2: tl.constexpr, STAGES_2: tl.constexpr,
    BM_3: tl.constexpr, BN_3: tl.constexpr, BK_3: tl.constexpr, STAGES_3: tl.constexpr,
    EVEN: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    if rows <= UP_TO_0:
        _product(
            p_x, p_w, p_out, rows, columns, depth, x_stride, out_stride,
            BM_0, BN_0, BK_0, STAGES_0, EVEN, PROGRAMS,
        )  # fmt: skip
    elif rows <= UP_TO_1:
        _product(
            p_x, p_w, p_out, rows, columns, depth, x_stride, out_stride,
            BM_1, BN_1, BK_1, STAGES_1, EVEN, PROGRAMS,
        )  # fmt: skip
    elif rows <= UP_TO_2:
        _product(
            p_x, p_w, p_out, rows, columns, depth, x_stride, out_stride,
            BM_2, BN_2, BK_2, STAGES_2, EVEN, PROGRAMS,
        )  # fmt: skip
    else:
        _product(
            p_x, p_w, p_out, rows, columns, depth, x_stride, out_stride,
            BM_3, BN_3, BK_3, STAGES_3, EVEN, PROGRAMS,
        )  # fmt: skip


def linear(x: torch.Tensor, weight: torch.Tensor, launch: Launch) -> torch.Tensor:
    """``x @ weight.T``, summed in float32 and rounded once.

    Args:
        x: (..., depth) bfloat16; the last dimension is contiguous.
        weight: (columns, depth) bfloat16, contiguous.
        launch: how it is computed, which reaches no bit.

    Returns:
        (..., columns) bfloat16.

    """
    columns, depth = weight.shape
    flat = x.reshape(-1, depth)
    rows = flat.shape[0]
    out = x.new_empty(rows, columns)
    a, b, c, d = launch.tiles
    linear_kernel[(launch.programs,)](
        flat, weight, out, rows, columns, depth, flat.stride(0), out.stride(0),
        UP_TO_0=a.up_to, BM_0=a.rows, BN_0=a.columns, BK_0=a.depth, STAGES_0=a.stages,
        UP_TO_1=b.up_to, BM_1=b.rows, BN_1=b.columns, BK_1=b.depth, STAGES_1=b.stages,
        UP_TO_2=c.up_to, BM_2=c.rows, BN_2=c.columns, BK_2=c.depth, STAGES_2=c.stages,
        BM_3=d.rows, BN_3=d.columns, BK_3=d.depth, STAGES_3=d.stages,
        EVEN=depth % max(a.depth, b.depth, c.depth, d.depth) == 0,
        PROGRAMS=launch.programs, num_warps=launch.warps,
    )  # fmt: skip
    return out.view(*x.shape[:-1], columns)
