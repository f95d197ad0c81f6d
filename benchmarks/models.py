"""Random checkpoints of the shapes that are measured, with a tokenizer of one word a token."""

import math
from pathlib import Path
from typing import Any

import torch

from vllm_invariant import grid
from vllm_invariant.arithmetic import CHUNK
from vllm_invariant.demo.checkpoint import TINY, Shape, make_checkpoint

A3B: dict[str, Any] = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "vocab_size": 8192,
}

SHAPES: dict[str, dict[str, Any]] = {
    # For trying the scripts out on a CPU.
    "tiny": {},
    # 8 layers, 2 of them attention.
    "design8": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "vocab_size": 8192,
    },
    # The dimensions published for Qwen3.5-0.8B's language model: layers, widths, heads and vocabulary as in
    # THUDM/slime, scripts/models/qwen3.5-0.8B.sh; 16 GDN heads of 128 for keys and for values.
    "qwen35-0.8b": {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "vocab_size": 248320,
        "tie_word_embeddings": True,
    },
    "tiny-moe": {},
    # The layers of Qwen3.5-35B-A3B and of Qwen3-Next-80B-A3B, as transformers' configs of these checkpoints
    # have them; fewer of them, and a small vocabulary.
    "qwen35-35b-a3b": A3B | {"num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 8},
    "qwen3-next-80b-a3b": A3B | {"num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 4},
}

# The others are dense.
FAMILIES = {"tiny-moe": "moe", "qwen35-35b-a3b": "moe", "qwen3-next-80b-a3b": "next"}


def make_model(name: str, folder: Path, **more: Any) -> Path:
    """Write the checkpoint ``name`` below ``folder``, or reuse the one that is there.

    Args:
        name: one of `SHAPES`.
        folder: where checkpoints are kept.
        more: further fields of its config.

    """
    config, family = TINY | SHAPES[name] | more, FAMILIES.get(name, "dense")
    # Gigabytes of random numbers take a CPU minutes.
    device = "cuda" if family != "dense" and torch.cuda.is_available() else "cpu"
    shape = Shape(config=config, family=family, device=device)
    path = make_checkpoint(folder / name, shape, tokenizer=False)
    if not (path / "tokenizer.json").is_file():
        make_word_tokenizer(path, config["vocab_size"])
    return path


def make_word_tokenizer(path: Path, vocab_size: int) -> None:
    """A tokenizer whose text has exactly one word a token, so that prompts have exact lengths."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    end, *words = ["<|endoftext|>", *(f"t{i}" for i in range(1, vocab_size))]
    vocabulary = {word: i for i, word in enumerate([end, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=end))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, unk_token=end).save_pretrained(path)


def vocabulary(name: str) -> int:
    """Tokens that a shape's checkpoint knows."""
    return (TINY | SHAPES[name])["vocab_size"]


def state_block(name: str) -> int:
    """Tokens of the block vLLM settles on under the flag: the smallest on the grid to hold a state page."""
    c = TINY | SHAPES[name]
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    values = c["linear_num_value_heads"] * c["linear_value_head_dim"]
    recurrent = 4 * values * c["linear_key_head_dim"]  # float32
    convolution = 2 * (c["linear_conv_kernel_dim"] - 1) * (2 * keys + values)  # bfloat16
    a_token = 2 * 2 * c["num_key_value_heads"] * c["head_dim"]  # key and value, bfloat16
    return grid.round_block(math.ceil((recurrent + convolution) / a_token), CHUNK.grid)
