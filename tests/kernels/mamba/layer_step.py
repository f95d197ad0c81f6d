"""One step of one GDN layer of a live engine, on rows and states of the caller's choice."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.harness import device


@dataclass(frozen=True)
class Row:
    """One request of a step.

    Attributes:
        slot: of the layer's state cache; must belong to no request of the engine.
        computed: tokens computed before the step.
        tokens: tokens of this step.
        prefilling: whether they are tokens of the prompt.

    """

    slot: int
    computed: int
    tokens: int = 1
    prefilling: bool = False


@dataclass
class Outcome:
    """What a step left.

    Attributes:
        rows: each row's output, (tokens, value heads, head_v_dim).
        states: each row's convolution and recurrent state.

    """

    rows: list[torch.Tensor]
    states: list[tuple[torch.Tensor, torch.Tensor]]


class LayerStep:
    """Runs the core of an idle engine's first GDN layer: convolution and recurrence."""

    def __init__(self, runner: Any) -> None:
        self.config = runner.vllm_config
        self.scale = 0.3  # standard deviation of the states
        layers = (
            m for m in runner.get_model().modules() if type(m).__name__.endswith("GatedDeltaNetAttention")
        )
        self.layer = next(layers)
        self.device = self.layer.kv_cache[1].device
        spec = self.layer.get_kv_cache_spec(self.config)
        builder = self.layer.get_attn_backend().get_builder_cls()
        self.builder = builder(spec, [self.layer.prefix], self.config, self.device)
        # Wide enough for the block of any length: in align mode a row's slot stands at its last block.
        self.columns = -(-self.config.model_config.max_model_len // spec.block_size)

    def metadata(self, rows: Sequence[Row]) -> Any:
        """What the layer's own backend makes of a step of these rows."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        lengths = torch.tensor([row.tokens for row in rows])
        starts = torch.tensor([0, *lengths.cumsum(0)], dtype=torch.int32)
        seq_lens = torch.tensor([row.computed + row.tokens for row in rows], dtype=torch.int32)
        slots = torch.tensor([[row.slot] * self.columns for row in rows], dtype=torch.int32)
        total = int(starts[-1])
        return self.builder.build(
            0,
            CommonAttentionMetadata(
                query_start_loc=starts.to(self.device),
                query_start_loc_cpu=starts,
                seq_lens=seq_lens.to(self.device),
                seq_lens_cpu_upper_bound=seq_lens,
                num_reqs=len(rows),
                num_actual_tokens=total,
                max_query_len=int(lengths.max()),
                max_seq_len=int(seq_lens.max()),
                block_table_tensor=slots.to(self.device),
                slot_mapping=torch.zeros(total, dtype=torch.int64, device=self.device),
                is_prefilling=torch.tensor([row.prefilling for row in rows]),
            ),
        )

    def inputs(self, row: Row) -> tuple[torch.Tensor, ...]:
        """Random q+k+v, b and a of a row's tokens; the same for the same slot and position."""
        draw = torch.Generator().manual_seed(row.slot * 100_003 + row.computed)
        heads = self.layer.num_v_heads
        widths = (self.layer.conv_dim, heads, heads)
        return tuple(
            torch.randn(row.tokens, width, generator=draw).to(self.device, torch.bfloat16) for width in widths
        )

    def run(self, rows: Sequence[Row]) -> Outcome:
        """One step, cached rows first.  Each row's states are set before it; the same for the same slot."""
        from vllm.forward_context import set_forward_context

        for row in rows:
            self._set_states(row)
        qkv, b, a = (torch.cat(parts) for parts in zip(*map(self.inputs, rows), strict=True))
        out = torch.zeros(
            len(qkv), self.layer.num_v_heads, self.layer.head_v_dim, dtype=qkv.dtype, device=qkv.device
        )
        metadata = self.metadata(rows)
        with (
            torch.inference_mode(),
            set_forward_context({self.layer.prefix: metadata}, self.config, len(qkv)),
        ):
            self._core(qkv, b, a, out)
        states = [tuple(cache[row.slot].clone() for cache in self.layer.kv_cache) for row in rows]
        return Outcome(list(out.split([row.tokens for row in rows])), states)

    def _core(self, *tensors: torch.Tensor) -> None:
        if device.NAME == "cuda":
            self.layer._forward_core(*tensors)
        else:
            torch.ops.vllm.cpu_gdn_attention_core(*tensors, self.layer.prefix)

    def _set_states(self, row: Row) -> None:
        draw = torch.Generator().manual_seed(row.slot)
        for cache in self.layer.kv_cache:
            # A row that starts from nothing must not see what an earlier tenant left: leave noise there.
            cache[row.slot] = torch.randn(cache.shape[1:], generator=draw).to(cache) * self.scale
