"""The binding of the CUDA recurrence, without a library: what it refuses, and what it says without one."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_invariant.ops import recurrent_cuda

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "build" / "csrc" / "vllm_invariant" / recurrent_cuda.LIBRARY.name
TOKENS, HEADS, DIM = 3, 4, 128


def arguments(**changed):
    """Inputs that fit; ``changed`` replaces some."""
    inputs = {
        "mixed_qkv": torch.zeros(TOKENS, (2 * 2 + HEADS) * DIM, dtype=torch.bfloat16),
        "a": torch.zeros(TOKENS, HEADS, dtype=torch.bfloat16),
        "b": torch.zeros(TOKENS, HEADS, dtype=torch.bfloat16),
        "A_log": torch.zeros(HEADS),
        "dt_bias": torch.zeros(HEADS),
        "state": torch.zeros(5, HEADS, DIM, DIM),
        "out": torch.zeros(TOKENS, HEADS, DIM, dtype=torch.bfloat16),
        "slots": torch.ones(TOKENS, dtype=torch.int32),
        "max_query_len": 1,
    }
    return {**inputs, **changed}


def int32(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mixed_qkv": torch.zeros(TOKENS, 8 * DIM)}, "mixed_qkv must be .* torch.bfloat16"),
        ({"mixed_qkv": torch.zeros(TOKENS, 9 * DIM, dtype=torch.bfloat16)}, "do not fit heads of 128"),
        ({"mixed_qkv": torch.zeros(TOKENS, 4 * DIM, dtype=torch.bfloat16)}, "do not fit heads of 128"),
        ({"state": torch.zeros(5, HEADS, DIM, DIM, dtype=torch.bfloat16)}, "state must be .* torch.float32"),
        ({"state": torch.zeros(5, HEADS, DIM, DIM).mT}, "state may be strided in its first axis only"),
        (
            {"state": torch.zeros(5 * HEADS * DIM * DIM + 1)[1:].view(5, HEADS, DIM, DIM)},
            "aligned to 16 bytes",
        ),
        ({"out": torch.zeros(TOKENS, HEADS, DIM)}, "out must be .* torch.bfloat16"),
        ({"b": torch.zeros(TOKENS, HEADS)}, "b must be .* torch.bfloat16"),
        ({"a": torch.zeros(HEADS, TOKENS, dtype=torch.bfloat16).T}, "a may be strided"),
        ({"dt_bias": torch.zeros(HEADS, dtype=torch.float16)}, "dt_bias must be"),
        ({"slots": torch.ones(TOKENS, dtype=torch.int64)}, "slots must be .* torch.int32"),
        ({"slots": int32(2)}, "without cu_seqlens 3 rows need as many slots, not 2"),
        ({"slots": int32(2), "cu_seqlens": int32(2)}, r"cu_seqlens must be \(3,\)"),
        ({"slots": int32(3, 2)}, "num_accepted and slots"),
        ({"num_accepted": int32(3)}, "num_accepted and slots"),
        ({"has_initial_state": int32(3)}, "has_initial_state must be .* torch.bool"),
        ({"initial_slots": int32(4)}, r"initial_slots must be \(3,\)"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_what_does_not_fit_raises(changed, message: str) -> None:
    """Before anything is launched: there is no GPU and no library here."""
    with pytest.raises(ValueError, match=message):
        recurrent_cuda.recurrent_step(**arguments(**changed))


def test_nothing_to_do_needs_no_library() -> None:
    """An empty step."""
    empty = {
        name: x[:0] for name, x in arguments().items() if name in ("mixed_qkv", "a", "b", "out", "slots")
    }
    recurrent_cuda.recurrent_step(**arguments(**empty))


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With what to install and which variable keeps it from being built."""
    monkeypatch.setattr(recurrent_cuda, "LIBRARY", tmp_path / "_recurrent.so")
    recurrent_cuda.library.cache_clear()
    assert not recurrent_cuda.is_available()
    with pytest.raises(RuntimeError, match=r"_recurrent\.so was not built.*nvcc.*VLLM_INVARIANT_BUILD=0"):
        recurrent_cuda.recurrent_step(**arguments())


@pytest.mark.skipif(not BUILT.exists(), reason="make csrc-check was not run")
def test_the_compiled_library_has_the_interface() -> None:
    """It loads without a GPU, passes its arguments as the binding does, and says what went wrong."""
    loaded = recurrent_cuda.load(BUILT)
    assert loaded.recurrent_shape(0) == b"decode" and loaded.recurrent_shape(99) is None
    described = recurrent_cuda._tokens_and_states(*list(arguments().values())[:7])
    assert loaded.recurrent_launch(described, 99, 0, None) == b"there is no such launch shape"


@pytest.mark.parametrize(("wanted", "reason"), [("0", "VLLM_INVARIANT_BUILD=0"), ("1", None)])
def test_the_variable_decides_the_build(wanted: str, reason: str | None) -> None:
    """Whatever compiler and torch there are."""
    code = f"import os; os.environ['VLLM_INVARIANT_BUILD'] = {wanted!r}; import setuptools; " + (
        "setuptools.setup = lambda **options: None; import setup; print(setup.reason_not_to_build())"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == str(reason)
