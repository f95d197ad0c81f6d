# In a vLLM branch: nothing; the code would be in the tree.
"""vLLM's entry point.  Imports nothing heavy: a broken import here would be logged and skipped."""

import logging
import os

logger = logging.getLogger("vllm.vllm_invariant")


def register() -> None:
    """Install the plugin in this process, or stand aside and say why.

    vLLM calls this in every process it starts: the API server, the engine core, the workers and
    the model-inspection subprocess.  Unless ``VLLM_BATCH_INVARIANT=1`` it returns at once.
    """
    if os.environ.get("VLLM_BATCH_INVARIANT", "0").strip() in ("", "0"):
        return

    from vllm_invariant import gate, install, seams

    verdict = gate.judge()
    if not verdict.ok:
        logger.warning("vllm-invariant stands aside: %s.", verdict.reason)
        return
    moved = seams.moved()
    if moved:
        logger.error("vllm-invariant stands aside: %s. See SEAMS.md.", "; ".join(moved))
        return
    install.in_engine(verdict)
