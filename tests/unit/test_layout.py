"""Rules of the source tree that a linter does not know."""

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_invariant

PACKAGE = Path(vllm_invariant.__file__).parent
ROOT = PACKAGE.parent
SOURCES = [p for top in ("vllm_invariant", "tests", "benchmarks") for p in sorted((ROOT / top).rglob("*.py"))]
WIDEST = 400

# Modules that decide without torch or vLLM, so that most of what they decide is tested without either.
LIGHT = ["arithmetic", "config", "gate", "grid", "plugin", "preflight", "requests", "seams"]


def loaded_by(*modules: str) -> set[str]:
    """Top-level packages in a fresh process that imports the modules."""
    code = f"import sys, {', '.join(modules)}; print(*{{name.split('.')[0] for name in sys.modules}})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return set(ended.stdout.split())


def test_light_modules_import_neither_torch_nor_vllm():
    assert not loaded_by(*(f"vllm_invariant.{name}" for name in LIGHT)) & {"torch", "vllm", "transformers"}


def test_ops_import_no_vllm():
    found = [f"vllm_invariant.ops.{m.name}" for m in pkgutil.iter_modules([str(PACKAGE / "ops")])]
    assert "vllm_invariant.ops.reference" in found
    assert not loaded_by("vllm_invariant.ops", *found) & {"vllm", "transformers"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_is_too_long(path):
    assert len(path.read_text().splitlines()) <= WIDEST
