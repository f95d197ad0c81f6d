# In a vLLM branch: not needed (there is nothing left to refuse).
"""What stock vLLM answers to the same model under the same flag, with this plugin kept out."""

import os
import subprocess
import sys
from pathlib import Path

LIMIT = 180.0  # seconds
WORDS = "batch_invariant mode is not supported"

# Everything in one process, so that the error is raised where it can be seen.
SCRIPT = """
import sys
from vllm import LLM

if __name__ == "__main__":
    LLM(sys.argv[1], enforce_eager=True, max_model_len=1024)
"""


def find_refusal(output: str) -> str | None:
    """The last line of a program's output that is stock's refusal, without a logger's prefix."""
    for line in reversed(output.splitlines()):
        if WORDS in line:
            return line[line.index("RuntimeError") :] if "RuntimeError" in line else line.strip()
    return None


def stock_refusal(model: Path, log: Path) -> str | None:
    """Start a stock engine on ``model`` under ``VLLM_BATCH_INVARIANT=1``.

    Args:
        model: checkpoint folder.
        log: file the engine's output is appended to.

    Returns:
        The refusal, one line, or None if the engine did not refuse.

    Raises:
        subprocess.TimeoutExpired: if it neither starts nor refuses in time.

    """
    environment = os.environ | {
        "VLLM_PLUGINS": "",
        "VLLM_BATCH_INVARIANT": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=LIMIT,
    )
    with log.open("a") as out:
        out.write(result.stdout)
    return find_refusal(result.stdout) if result.returncode else None
