# In a vLLM branch: vllm/model_executor/determinism/batch_invariant_configs.py.
"""Tiles of linear layers under batch invariance, from a written table.

Under the flag vLLM computes a linear layer by a Triton kernel whose tile, for most shapes, is 128 x 128
whatever the number of rows; the few rows of a decode step then leave most of a GPU idle.  But an element
of the product is a sum along ascending depth, in steps of the matrix instruction, and no tile's size
changes that order.  So the tile may follow the number of rows, and the bits stay those of vLLM's kernel:
``tests/kernels/test_linear.py`` compares them.  ``benchmarks/tune_linears.py`` times tiles.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """How a program computes its part of a product.

    Attributes:
        up_to: rows of the whole product up to which it is used; None is without end.
        rows, columns, depth: of a tile.
        stages: tiles on their way from memory at once.

    """

    up_to: int | None
    rows: int
    columns: int
    depth: int
    stages: int


@dataclass(frozen=True)
class Launch:
    """One launch, of any number of rows.

    Attributes:
        tiles: by ascending number of rows.
        warps: of a program.
        programs: of a launch, which share the tiles out among them.

    """

    tiles: tuple[Tile, Tile, Tile, Tile]
    warps: int
    programs: int


# By compute capability.
TABLE = {
    # NVIDIA H200, torch 2.11.0+cu130, triton 3.6.0.  Two programs a multiprocessor.
    (9, 0): Launch(
        (
            Tile(16, rows=16, columns=32, depth=256, stages=3),
            Tile(64, rows=64, columns=32, depth=128, stages=4),
            Tile(256, rows=64, columns=64, depth=128, stages=3),
            Tile(None, rows=128, columns=128, depth=64, stages=3),
        ),
        warps=4,
        programs=264,
    ),
}
