"""SEAMS.md, the ledger and what the plugin really touches are the same."""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_invariant
from vllm_invariant.seams import SEAMS

SEAMS_MD = Path(vllm_invariant.__file__).parents[1] / "SEAMS.md"
COLUMNS = 7
# Hooks of a backend class that upstream documents for classes outside its tree.
BACKEND_HOOKS = {"get_name", "get_builder_cls", "get_impl_cls", "supports_batch_invariance"}
BACKEND_HOOKS |= {"_supports_batch_invariance"}  # of an expert kernel


def rows() -> dict[str, list[str]]:
    """Cells of each row of the table, by seam."""
    found = {}
    for line in SEAMS_MD.read_text().splitlines():
        if re.match(r"\| S\d+ \|", line):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert cells[0] not in found, f"{cells[0]} has two rows"
            found[cells[0]] = cells
    return found


def test_every_seam_has_a_row_and_every_row_a_seam():
    assert set(rows()) == {seam.name for seam in SEAMS}


@pytest.mark.parametrize("name", sorted({seam.name for seam in SEAMS}))
def test_a_row_names_exactly_its_symbols(name):
    cells = rows()[name]
    assert len(cells) == COLUMNS and all(cells)
    symbols = re.findall(r"`([^`]+)`", cells[1])
    assert sorted(symbols) == sorted(seam.symbol for seam in SEAMS if seam.name == name)


RECORD = """
import json
from vllm_invariant import install, plugin, seams

replaced, stock = [], seams.replace

def replace(owner, name, wrap):
    home = getattr(getattr(owner, name), "__module__", None)
    where = f"{owner.__qualname__}.{name}" if isinstance(owner, type) else name
    replaced.append([home, where])
    stock(owner, name, wrap)

seams.replace = replace
plugin.register()
install.in_worker()
print("\\nREPLACED", json.dumps(replaced))
"""


@pytest.fixture(scope="module")
def replaced() -> list[tuple[str, str]]:
    """(module, symbol) of everything a process with the flag replaces."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    env = os.environ | {"VLLM_BATCH_INVARIANT": "1"}
    child = subprocess.run(
        [sys.executable, "-c", RECORD], env=env, capture_output=True, text=True, timeout=600
    )
    assert child.returncode == 0, child.stderr[-4000:]
    return [tuple(pair) for pair in json.loads(child.stdout.rsplit("REPLACED", 1)[1])]


def test_what_is_replaced_is_in_the_ledger(replaced):
    known = {(seam.module, seam.symbol) for seam in SEAMS}
    assert len(replaced) >= 5
    assert set(replaced) <= known


def overrides() -> set[tuple[str, str]]:
    """(module, Class.name) of upstream methods that classes of ours define anew."""
    from vllm_invariant import backend, cpu_attention, cpu_moe, history, junction, layer, scheduler

    found = set()
    for module in (backend, cpu_attention, cpu_moe, history, junction, layer, scheduler):
        for cls in vars(module).values():
            if not inspect.isclass(cls) or cls.__module__ != module.__name__:
                continue
            for name, value in vars(cls).items():
                if not callable(getattr(value, "__func__", value)) and not isinstance(value, property):
                    continue
                for base in cls.__mro__[1:]:
                    if base.__module__.startswith("vllm.") and name in vars(base):
                        found.add((base.__module__, f"{base.__name__}.{name}"))
                        break
    return found


def test_what_is_overridden_is_in_the_ledger():
    pytest.importorskip("vllm._custom_ops", reason="vLLM is not installed")
    known = {(seam.module, seam.symbol) for seam in SEAMS}
    made_by_dataclass = {"__init__", "__repr__", "__eq__", "__hash__"}
    ours = {
        (module, symbol)
        for module, symbol in overrides()
        if symbol.split(".")[1] not in BACKEND_HOOKS
        and not (
            symbol.startswith(("CPUAttentionMetadata.", "GDNAttentionMetadata."))
            and symbol.split(".")[1] in made_by_dataclass
        )
    }
    assert ("vllm.v1.core.sched.scheduler", "Scheduler.schedule") in ours
    assert ours <= known, sorted(ours - known)
