"""Fixtures of the whole suite.  Nothing here imports vLLM: tests without an engine stay light."""

import os
from pathlib import Path

import pytest

# OpenMP threads that spin while another process holds their core make an engine step on a busy
# machine fifty times longer.  Read once, when torch loads its OpenMP library.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# What is started from here waits without starving others; never undone.
pytest.MonkeyPatch().setenv("PYTHONPATH", str(Path(__file__).parent / "harness/waiting"), prepend=os.pathsep)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random GDN hybrid with a tokenizer, made once a session."""
    from vllm_invariant.demo.checkpoint import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")
