"""The package, and with it ``csrc/`` where CUDA's compiler is found.

``VLLM_INVARIANT_BUILD=0`` builds no kernels; ``=1`` builds them or fails, and also next to a CPU build of
torch.  The library has a plain C interface and links CUDA's runtime statically, so it needs no torch to
build and runs under any.
"""

import os
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

WANTED = os.environ.get("VLLM_INVARIANT_BUILD", "")
SOURCES = sorted(map(str, Path("csrc").glob("*.cu")))
FLAGS = [
    "-gencode=arch=compute_90a,code=sm_90a",
    "-std=c++17",
    "-O3",
    "-fmad=false",  # the sources say where a product and a sum are fused
    "-shared",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    "-cudart=static",
]


def nvcc() -> Path | None:
    """CUDA's compiler: of CUDA_HOME or CUDA's usual place, else on PATH."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = shutil.which("nvcc", path=f"{home}/bin") or shutil.which("nvcc")
    return Path(found) if found else None


def reason_not_to_build() -> str | None:
    """Why there will be no kernels, or None."""
    if WANTED == "0":
        return "VLLM_INVARIANT_BUILD=0"
    if WANTED == "1":
        return None
    if nvcc() is None:
        return "no nvcc in CUDA_HOME or on PATH"
    try:
        from torch.version import cuda
    except ImportError:
        return None
    return None if cuda else "torch is a CPU build"


class BuildCuda(build_ext):
    """Compile with nvcc into a library that is no Python module."""

    def build_extension(self, ext: Extension) -> None:
        compiler = nvcc()
        if compiler is None:
            raise RuntimeError("VLLM_INVARIANT_BUILD=1, but there is no nvcc in CUDA_HOME or on PATH")
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        home = compiler.resolve().parent.parent
        libraries = [f"-L{home / name}" for name in ("lib64", "lib") if (home / name).is_dir()]
        subprocess.run([str(compiler), *FLAGS, *libraries, "-o", str(target), *ext.sources], check=True)

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"


reason = reason_not_to_build()
if reason:
    print(f"vllm-invariant: CUDA kernels are not built: {reason}")
headers = sorted(map(str, Path("csrc").glob("*.cuh")))
kernels = [Extension("vllm_invariant._recurrent", SOURCES, depends=headers)]
setup(ext_modules=[] if reason else kernels, cmdclass={"build_ext": BuildCuda})
