# In a vLLM branch: tests/v1/determinism/utils.py.
"""Small random checkpoints of Qwen3.5's and Qwen3-Next's shape, made on the spot.

vLLM's dummy weights are so close to zero that states vanish and state bugs hide.  Here weights have
a standard deviation of about 0.05, and the decay is slow enough that a token still counts more
than a thousand tokens later.  Routers have two equal rows, so that exact ties occur.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from vllm_invariant.audit.corpus import corpus

TINY: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}

# Fields of a mixture of experts, in place of ``intermediate_size``.
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}

# family -> (language model, its config, wrapper, its config), names of transformers'
FAMILIES: dict[str, tuple[str, ...]] = {
    "dense": (
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextConfig",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5Config",
    ),
    "moe": (
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5MoeConfig",
    ),
    "next": ("Qwen3NextForCausalLM", "Qwen3NextConfig"),
}


@dataclass(frozen=True)
class Shape:
    """What to build.

    Attributes:
        config: fields of the language model's config; missing ones are those of `TINY`, and of
            `EXPERTS` in a mixture of experts.
        seed: of the weights.
        std: standard deviation of every weight matrix.
        vision: put a vision tower of one layer beside the language model, as released checkpoints have.
        family: ``"dense"`` or ``"moe"`` (Qwen3.5), or ``"next"`` (Qwen3-Next, also a mixture of experts).
        device: where the weights are made; ``"cuda"`` for gigabytes of them.

    """

    config: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    std: float = 0.05
    vision: bool = False
    family: str = "dense"
    device: str = "cpu"

    @property
    def text(self) -> dict[str, Any]:
        """All fields of the language model's config."""
        fields = TINY | self.config
        if self.family != "dense":
            del fields["intermediate_size"]
            fields = EXPERTS | fields
        return fields


def _initialise(model: torch.nn.Module, shape: Shape) -> None:
    generator = torch.Generator(shape.device).manual_seed(shape.seed)
    random: dict[str, Any] = {"generator": generator, "device": shape.device}
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            # g = -exp(A_log) * softplus(a + dt_bias): memory of roughly 1 / exp(A_log) tokens,
            # from 30 for the fastest head to 3000 for the slowest.
            span = torch.linspace(3.4, 8.0, parameter.numel(), device=shape.device)
            value = -span[torch.randperm(parameter.numel(), **random)]
        elif name.endswith("dt_bias"):
            value = torch.randn(parameter.shape, **random) * 0.5
        elif parameter.dim() == 1:
            value = parameter.detach() + torch.randn(parameter.shape, **random) * shape.std
        elif "conv1d" in name:
            value = torch.randn(parameter.shape, **random) * 0.4
        elif name.endswith("mlp.gate.weight"):
            # Logits of order 1 whatever the width: every expert is used, and bfloat16 rounds many together.
            value = torch.randn(parameter.shape, **random) * parameter.shape[-1] ** -0.5
            value[1] = value[0]
        else:
            value = torch.randn(parameter.shape, **random) * shape.std
        parameter.data.copy_(value)


def make_checkpoint(path: Path, shape: Shape | None = None, *, tokenizer: bool = True) -> Path:
    """Write a random language model of a family, or its wrapper with a vision tower, in bfloat16.

    Args:
        path: the folder to make.  A finished checkpoint already there is reused.
        shape: what to build; `TINY` by default.
        tokenizer: also train and write a tokenizer.

    Returns:
        ``path``.

    """
    shape = shape or Shape()
    done = path / "made.json"
    text = shape.text
    recipe = json.dumps({**asdict(shape), **text, "tok": tokenizer})
    if done.is_file() and done.read_text() == recipe:
        return path

    path.mkdir(parents=True, exist_ok=True)
    with torch.device(shape.device), torch.no_grad():
        model = (_wrapper if shape.vision else _language_model)(shape)
    _initialise(model, shape)
    model.to(torch.bfloat16).save_pretrained(path)
    if shape.device != "cpu":
        del model
        torch.cuda.empty_cache()
    if tokenizer:
        make_tokenizer(path, text["vocab_size"])
    done.write_text(recipe)
    return path


def _language_model(shape: Shape) -> Any:
    import transformers

    model, config = FAMILIES[shape.family][:2]
    fields = getattr(transformers, config)(**shape.text, mamba_ssm_dtype="float32")
    return getattr(transformers, model)(fields)


def _wrapper(shape: Shape) -> Any:
    import transformers

    text = shape.text
    quarter = text["head_dim"] // 4  # of a head is rotated; three kinds of position share its frequencies
    sections = [quarter // 2 - 2 * (quarter // 6), quarter // 6, quarter // 6]
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    rope |= {"mrope_section": sections, "mrope_interleaved": True}
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2}
    last = text["vocab_size"] - 1
    model, config = FAMILIES[shape.family][2:]
    return getattr(transformers, model)(
        getattr(transformers, config)(
            text_config={**text, "mamba_ssm_dtype": "float32", "rope_parameters": rope},
            vision_config={**vision, "out_hidden_size": text["hidden_size"], "num_position_embeddings": 256},
            image_token_id=last,
            video_token_id=last - 1,
            vision_start_token_id=last - 2,
            vision_end_token_id=last - 3,
        )
    )


def make_tokenizer(path: Path, vocab_size: int) -> None:
    """Train a byte-level BPE tokenizer of exactly ``vocab_size`` entries on `corpus`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    fast.save_pretrained(path)
