"""Make functions of this package vLLM plugins, in the processes of one server and nowhere else."""

import os
from collections.abc import Mapping
from pathlib import Path

GROUP = "vllm.general_plugins"
ROOT = Path(__file__).resolve().parent.parent


def offer(folder: Path, plugins: Mapping[str, str]) -> dict[str, str]:
    """Write the metadata of a distribution that has these entry points.

    Args:
        folder: an empty folder to write to.
        plugins: ``module:function`` by plugin name.

    Returns:
        Environment variables with which a Python process, and those it starts, find the plugins.

    """
    info = folder / "vllm_invariant_benchmarks-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-invariant-benchmarks\nVersion: 0\n")
    lines = [f"[{GROUP}]", *(f"{name} = {target}" for name, target in plugins.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    # Last: an installed package goes before the same one in the working tree.
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]
    return {"PYTHONPATH": os.pathsep.join(path)}
