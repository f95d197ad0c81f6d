"""The checkpoints and plugins of the benchmarks are what the reports say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.models import SHAPES, make_word_tokenizer, state_block
from benchmarks.offer import offer


@pytest.mark.parametrize(
    ("shape", "block"),
    [("tiny", 320), ("design8", 1088), ("qwen35-0.8b", 576), ("tiny-moe", 320), ("qwen35-35b-a3b", 1088)],
)
def test_state_block(shape: str, block: int) -> None:
    """Tiny as the CPU engine logs it; the others are 1,056 and 544 rounded to the grid."""
    assert state_block(shape) == block


def test_a_word_is_a_token(tmp_path: Path) -> None:
    """Text of n words encodes to n tokens, and back, over the whole vocabulary."""
    from transformers import AutoTokenizer

    make_word_tokenizer(tmp_path, 300)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = list(range(1, 300))
    assert len(tokenizer) == 300
    assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids


def test_shapes_differ_from_tiny_only_in_size() -> None:
    """Head sizes of the GDN layers stay 128: the launch table has no other row."""
    assert all("linear_key_head_dim" not in shape for shape in SHAPES.values())


def test_an_offered_plugin_is_found_in_another_process(tmp_path: Path) -> None:
    """As vLLM looks for it, and only where the environment says so."""
    script = (
        "import importlib.metadata as m\n"
        "found = {e.name: e for e in m.entry_points(group='vllm.general_plugins')}\n"
        "assert callable(found['support_only'].load())"
    )
    environment = os.environ | offer(
        tmp_path / "offered", {"support_only": "benchmarks.support_only:register"}
    )
    subprocess.run([sys.executable, "-c", script], env=environment, cwd=tmp_path, check=True)
    plain = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert "KeyError" in plain.stderr
