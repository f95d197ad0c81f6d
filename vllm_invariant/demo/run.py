# In a vLLM branch: not needed (a test would assert instead).
"""The demo: a tiny checkpoint, stock's refusal of it, and an audit of a server with this plugin."""

import tempfile
import warnings
from pathlib import Path

from rich.console import Console

from vllm_invariant.audit.run import Wish, audit
from vllm_invariant.audit.server import Launch, tail
from vllm_invariant.demo.refusal import stock_refusal

OPTIONS = (
    *("--served-model-name", "demo"),
    *("--max-model-len", "4096"),
    *("--max-num-batched-tokens", "512"),  # small enough to cut prompts several times
    *("--max-num-seqs", "32"),
    "--enforce-eager",
)
ENVIRONMENT = {
    "VLLM_BATCH_INVARIANT": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "HF_HUB_OFFLINE": "1",
}


def launch(model: Path) -> Launch:
    """The demo's server for a checkpoint, with the flag set."""
    import torch

    # A tiny model needs little; the GPU may have other users.
    small = ("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(1 << 30))
    return Launch(str(model), (*OPTIONS, *(small if torch.cuda.is_available() else ())), ENVIRONMENT)


def _checkpoint(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="fla")  # transformers imports it; no kernel of it runs
        from transformers.utils import logging

        from vllm_invariant.demo.checkpoint import make_checkpoint

        logging.disable_progress_bar()
        return make_checkpoint(folder / "tiny")


def run(console: Console) -> int:
    """Run the demo.

    Returns:
        0 if every axis came about, hits happened and no bit differs; otherwise as `audit`, and 2 if
        stock vLLM did not refuse the model.

    """
    with tempfile.TemporaryDirectory(prefix="vllm-invariant-demo-") as name:
        folder = Path(name)
        with console.status("making a tiny GDN hybrid and its tokenizer"):
            model = _checkpoint(folder)
        with console.status("asking stock vLLM"):
            refusal = stock_refusal(model, folder / "stock.log")
        if refusal is None:
            console.print(f"stock vLLM did not refuse the model; its log ends:\n{tail(folder / 'stock.log')}")
            return 2
        console.print(f"stock vLLM: {refusal}", highlight=False, soft_wrap=True)
        return audit(Wish(launch=launch(model), tokens=24, command="vllm-invariant demo"), console)
