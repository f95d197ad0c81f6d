"""`docs/upstream.md` has every module, and every module names its place."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "vllm_invariant"
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p.name != "__init__.py")


@pytest.mark.parametrize("module", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_says_where_it_would_go(module):
    assert module.read_text().startswith("# In a vLLM branch: ")
    assert f"`{module.relative_to(PACKAGE)}`" in (ROOT / "docs" / "upstream.md").read_text()
