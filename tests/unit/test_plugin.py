"""The entry point in fresh processes: what it leaves alone, when it stands aside, and twice.

Importing vLLM takes ten seconds of one core, so one process answers for several tests.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

# What the plugin leaves behind once installed.  Runs in the child.
STATE = """
def state():
    from vllm.config.scheduler import SchedulerConfig
    from vllm.model_executor.determinism import batch_invariant
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm_invariant import preflight

    ours = lambda thing: getattr(thing, "vllm_invariant", False)
    return {
        "member": "QWEN_GDN_ATTN" in MambaAttentionBackendEnum.__members__,
        "scheduler": ours(SchedulerConfig.get_scheduler_cls),
        "worker": ours(batch_invariant.init_batch_invariance),
        "preflight": all(ours(MODELS_CONFIG_MAP.get(a)) for a in preflight.ARCHITECTURES),
    }

def supports():
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    return {m.name: m.get_class().supports_batch_invariance()
            for m in MambaAttentionBackendEnum if m.name in ("GDN_ATTN", "QWEN_GDN_ATTN")}
"""

UNSET = """
import os, sys
before = set(sys.modules)
from vllm_invariant import plugin
for value in (None, "0", "", " 0 "):
    if value is not None:
        os.environ["VLLM_BATCH_INVARIANT"] = value
    plugin.register()
answer["loaded"] = sorted(set(sys.modules) - before)
del os.environ["VLLM_BATCH_INVARIANT"]
answer["state"] = state()
"""

ASIDE = """
import logging
from vllm_invariant import gate, plugin, seams

class Lines(logging.Handler):
    def emit(self, record):
        answer["log"][-1].append(record.getMessage())

logging.getLogger("vllm.vllm_invariant").addHandler(Lines())
answer["log"] = []
judge, known = gate.judge, seams.SEAMS

def attempt():
    answer["log"].append([])
    plugin.register()
    gate.judge, seams.SEAMS = judge, known

gate.judge = lambda: gate.check_version("0.99.0", "cpu")
attempt()
gate.judge = lambda: gate.check_device("cuda", (8, 0))
attempt()
seams.SEAMS += (seams.Seam("S0", "vllm.v1.core.sched.scheduler", "Scheduler.gone"),)
attempt()
seams.SEAMS += (seams.Seam("S0", "vllm.gone", "anything"),)
attempt()
answer["state"], answer["supports"] = state(), supports()
"""

INSTALLED = """
from vllm.plugins import load_general_plugins
load_general_plugins()
answer["state"] = state()

from vllm.config.scheduler import SchedulerConfig
from vllm.model_executor.determinism import batch_invariant
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm_invariant import plugin

def things():
    functions = SchedulerConfig.get_scheduler_cls, batch_invariant.init_batch_invariance
    return [*functions, *MODELS_CONFIG_MAP.values()]

first = things()
plugin.register()
plugin.register()
answer["same"] = first == things()
answer["supports"] = supports()
"""


def child(code: str, flag: str | None) -> dict[str, Any]:
    """What a fresh process answers."""
    env = {k: v for k, v in os.environ.items() if k != "VLLM_BATCH_INVARIANT"}
    if flag is not None:
        env["VLLM_BATCH_INVARIANT"] = flag
    code = f"answer = {{}}\n{STATE}\n{code}\nimport json; print('\\nANSWER', json.dumps(answer))"
    ended = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.rsplit("ANSWER", 1)[1])


@pytest.fixture(scope="module")
def unset() -> dict[str, Any]:
    return child(UNSET, flag=None)


@pytest.fixture(scope="module")
def aside() -> dict[str, Any]:
    return child(ASIDE, flag="1")


@pytest.fixture(scope="module")
def installed() -> dict[str, Any]:
    return child(INSTALLED, flag="1")


def test_without_the_flag_it_imports_nothing(unset):
    own = {name for name in unset["loaded"] if name.split(".")[0] == "vllm_invariant"}
    assert own <= {"vllm_invariant", "vllm_invariant.plugin"}
    assert not {name for name in unset["loaded"] if name.split(".")[0] in ("vllm", "torch", "transformers")}


def test_without_the_flag_vllm_is_stock(unset):
    assert not any(unset["state"].values()), unset["state"]


@pytest.mark.parametrize(
    ("attempt", "said"),
    [
        pytest.param(0, "vLLM 0.99.0 on cpu", id="release"),
        pytest.param(1, "SM80 is not supported", id="device"),
        pytest.param(2, "S0: vllm.v1.core.sched.scheduler.Scheduler.gone is gone", id="symbol"),
        pytest.param(3, "S0: module vllm.gone is gone", id="module"),
    ],
)
def test_it_stands_aside_with_one_line(aside, attempt, said):
    (line,) = aside["log"][attempt]
    assert "stands aside" in line and said in line


def test_standing_aside_installs_nothing(aside):
    assert not any(aside["state"].values()), aside["state"]


def test_standing_aside_leaves_stocks_refusal_in_force(aside):
    assert aside["supports"] == {"GDN_ATTN": False}


def test_vllms_own_loading_installs_all_of_it(installed):
    assert all(installed["state"].values()), installed["state"]


def test_a_second_call_changes_nothing(installed):
    assert installed["same"]


def test_only_our_member_claims_the_promise(installed):
    """Kimi, OLMo, Bailing and Qwen4Exp go by GDN_ATTN and stay refused."""
    assert installed["supports"] == {"GDN_ATTN": False, "QWEN_GDN_ATTN": True}
