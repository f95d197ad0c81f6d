"""The written launch table: what it holds, what it refuses, and that it covers upstream's kernels."""

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_invariant.ops import launch

H200 = launch.Key((9, 0), "bfloat16", 128, 128)

# Autotuned kernels of the same files that no call of the Qwen layer reaches: per-channel gates, chunks of
# 16 and 32, and the separate q and k norm (`fused_post_conv_prep` and the decode kernel do it themselves).
OFF_THE_PATH = {
    "chunk_local_cumsum_vector_kernel",
    "solve_tril_16x16_kernel",
    "merge_16x16_to_32x32_inverse_kernel",
    "l2norm_fwd_kernel1",
    "l2norm_fwd_kernel",
}


def fla_folder() -> Path:
    """Upstream's kernels, found without importing vLLM."""
    origin = importlib.util.find_spec("vllm").origin
    return Path(origin).parent / "third_party" / "flash_linear_attention" / "ops"


def autotuned(path: Path) -> set[str]:
    """Functions in a file under ``triton.autotune``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            calls = [d.func for d in node.decorator_list if isinstance(d, ast.Call)]
            if any(isinstance(f, ast.Attribute) and f.attr == "autotune" for f in calls):
                found.add(node.name)
    return found


@pytest.mark.parametrize("key", launch.TABLE, ids=str)
def test_a_row_has_every_kernel(key: launch.Key) -> None:
    """And values a launch can have."""
    row = launch.lookup(key)
    assert row.keys() == launch.KERNELS.keys()
    for choice in row.values():
        assert choice.warps in (1, 2, 4, 8)
        assert choice.stages is None or choice.stages >= 1
        assert all(tile & (tile - 1) == 0 for tile in choice.tiles.values())


@pytest.mark.parametrize(
    "key",
    [
        launch.Key((10, 0), "bfloat16", 128, 128),
        launch.Key((9, 0), "float16", 128, 128),
        launch.Key((9, 0), "bfloat16", 64, 128),
    ],
    ids=str,
)
def test_an_unknown_key_raises_with_what_to_do(key: launch.Key) -> None:
    """The message names the key, the known ones, the script and the file."""
    with pytest.raises(ValueError, match=r"benchmarks/tune_launch\.py") as error:
        launch.lookup(key)
    message = str(error.value)
    assert str(key) in message and str(H200) in message and "ops/launch.py" in message


def test_every_autotuned_kernel_is_pinned_or_off_the_path() -> None:
    """A kernel that upstream starts to autotune has to be looked at."""
    found = set().union(*(autotuned(path) for path in fla_folder().glob("*.py") if path.stem != "kda"))
    pinned = {kernel for _, kernel in launch.KERNELS.values()}
    assert found == pinned | OFF_THE_PATH
    for module, kernel in launch.KERNELS.values():
        assert kernel in autotuned(fla_folder() / f"{module}.py")


def test_pin_reaches_through_decorators_and_forgets() -> None:
    """One candidate is left, with the row's figures, and what was timed before is gone."""
    tuner = SimpleNamespace(configs=["a", "b"], cache={"timed": "a"}, fn=object())
    launch.pin(SimpleNamespace(fn=tuner), launch.Launch(warps=4, stages=3, tiles={"BK": 64}))
    (config,) = tuner.configs
    assert (config.num_warps, config.num_stages, config.kwargs) == (4, 3, {"BK": 64})
    assert tuner.cache == {}


def test_pin_leaves_stages_to_triton() -> None:
    """A row without stages is a config without them."""
    import triton

    tuner = SimpleNamespace(configs=[], cache={})
    launch.pin(tuner, launch.Launch(warps=1))
    assert tuner.configs[0].num_stages == triton.Config({}).num_stages


def test_a_kernel_without_an_autotuner_raises() -> None:
    """Upstream stopped to autotune it: the row must go."""
    with pytest.raises(ValueError, match="not autotuned"):
        launch.autotuner(SimpleNamespace(fn=SimpleNamespace(fn=None)))
