# In a vLLM branch: not needed (a tool for users).
"""Names of the Triton kernels that run, with their launch grids and tile sizes."""

import functools
from typing import Any

LAUNCHES: list[str] = []  # of this process, in order


def listen() -> None:
    """Note every launch from now on.  Without Triton, or twice, it does nothing."""
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        return
    if not getattr(JITFunction.run, "listens", False):
        JITFunction.run = _noting(JITFunction.run)


def _noting(stock: Any) -> Any:
    @functools.wraps(stock)
    def run(self: Any, *args: Any, grid: Any, **kwargs: Any) -> Any:
        LAUNCHES.append(_describe(self, args, grid, kwargs))
        return stock(self, *args, grid=grid, **kwargs)

    run.listens = True  # type: ignore[attr-defined]
    return run


def _describe(kernel: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any]) -> str:
    bound = dict(zip((p.name for p in kernel.params), args, strict=False)) | kwargs
    fixed = [p.name for p in kernel.params if p.is_constexpr] + ["num_warps", "num_stages"]
    sizes = [f"{name}={bound[name]}" for name in fixed if type(bound.get(name)) is int]
    shape = tuple(grid) if isinstance(grid, tuple | list) else None
    launch = [f"grid={shape}"] if shape else []
    return f"{kernel.fn.__name__}[{', '.join(launch + sizes)}]"
