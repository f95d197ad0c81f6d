"""The import hook for a torchvision that was built for another torch."""

import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from vllm_invariant import cpu_setup


@pytest.fixture
def meta_path(monkeypatch):
    """The interpreter's finders, put back afterwards, with no hook of ours among them yet."""
    finders = [f for f in sys.meta_path if not isinstance(f, cpu_setup._TorchvisionFinder)]
    monkeypatch.setattr(sys, "meta_path", finders)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    return finders


def test_the_hook_is_installed_once(meta_path):
    before = list(meta_path)
    cpu_setup.install_hook()
    cpu_setup.install_hook()
    assert meta_path[1:] == before and isinstance(meta_path[0], cpu_setup._TorchvisionFinder)


def test_no_hook_once_torchvision_is_imported(meta_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", object())
    before = list(meta_path)
    cpu_setup.install_hook()
    assert meta_path == before


def test_the_hook_acts_on_torchvision_only_and_once(meta_path, monkeypatch):
    asked = []
    monkeypatch.setattr(cpu_setup, "define_missing_schemas", asked.append)
    cpu_setup.install_hook()
    hook = meta_path[0]
    assert importlib.util.find_spec("json.tool") is not None
    assert asked == [] and meta_path[0] is hook
    assert hook.find_spec("torchvision.ops") is None and asked == []
    found = [importlib.util.find_spec("torchvision") for _ in range(2)]
    assert hook not in meta_path
    assert asked == [Path(spec.origin).parent for spec in found[:1] if spec is not None]


def run(code: str) -> str:
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr[-2000:]
    return child.stdout.strip()


def test_missing_schemas_are_declared_where_no_library_loads(tmp_path):
    """An empty package, and one whose library is no library."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "_C.so").write_bytes(b"no library")
    for folder in (tmp_path, tmp_path / "broken"):
        code = (
            "import sys, torch; from pathlib import Path; from vllm_invariant import cpu_setup;"
            f"assert cpu_setup.define_missing_schemas(Path({str(folder)!r})) is True;"
            "print(torch.ops.torchvision.nms.default._schema)"
        )
        assert "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" in run(code)


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed")
def test_torchvision_can_be_imported_in_this_environment():
    """In a process that runs nothing of ours first: the .pth file, or a torchvision that needs no help."""
    assert run("import torchvision; print(torchvision.__name__)").splitlines()[-1] == "torchvision"


def test_main_writes_one_line_that_python_runs_at_start(tmp_path, monkeypatch, capsys, meta_path):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"purelib": str(tmp_path)})
    cpu_setup.main()
    (written,) = Path(tmp_path).iterdir()
    line = written.read_text()
    assert written.suffix == ".pth" and line.startswith("import ") and line.count("\n") == 1
    assert written.name in capsys.readouterr().out
    exec(line, {})
    assert isinstance(meta_path[0], cpu_setup._TorchvisionFinder)
