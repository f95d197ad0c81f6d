# In a vLLM branch: not needed (a property of the CPU wheels, not of vLLM).
"""Let a CUDA build of torchvision be imported next to a CPU build of torch.

PyPI's torchvision is built for CUDA.  Next to ``torch+cpu`` its C++ library cannot be loaded,
the operators it would define stay undefined, and ``import torchvision`` dies while it registers
shape functions for them.  vLLM imports torchvision, so every vLLM process dies with it.  Declaring
the two operators' schemas before that import is enough: nothing on a text model's path calls them.

``python -m vllm_invariant.cpu_setup`` writes one ``.pth`` file into the environment, so that each
Python process, vLLM's workers and its model-inspection subprocess included, installs an import hook
at start.  The hook costs nothing until torchvision is imported, and does nothing where torchvision's
own library loads.
"""

import importlib.abc
import importlib.machinery
import sys
import sysconfig
from pathlib import Path

PTH_NAME = "vllm_invariant_cpu.pth"
PTH_LINE = "import vllm_invariant.cpu_setup as s; s.install_hook()\n"

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

_libraries: list[object] = []  # torch.library.Library objects undo their work when collected


def define_missing_schemas(package_dir: Path) -> bool:
    """Declare torchvision's operators if its library at ``package_dir`` does not load.

    Returns True if the schemas were declared here, False if torchvision needs no help.
    """
    import torch

    for binary in sorted(package_dir.glob("_C*.so")):
        try:
            torch.ops.load_library(str(binary))
            return False
        except OSError:
            continue
    library = torch.library.Library("torchvision", "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    _libraries.append(library)
    return True


class _TorchvisionFinder(importlib.abc.MetaPathFinder):
    """Runs `define_missing_schemas` once, just before torchvision is first imported."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "torchvision":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.origin is not None:
            define_missing_schemas(Path(spec.origin).parent)
        return None  # the ordinary finders import it


def install_hook() -> None:
    """Install the import hook in this process (idempotent)."""
    if "torchvision" in sys.modules or any(isinstance(f, _TorchvisionFinder) for f in sys.meta_path):
        return
    sys.meta_path.insert(0, _TorchvisionFinder())


def main() -> None:
    """Write the ``.pth`` file into this environment's site-packages."""
    target = Path(sysconfig.get_paths()["purelib"]) / PTH_NAME
    target.write_text(PTH_LINE)
    print(f"wrote {target.name}: torchvision imports next to CPU torch")


if __name__ == "__main__":
    main()
