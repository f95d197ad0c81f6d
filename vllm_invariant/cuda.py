# In a vLLM branch: spread over the files each function names.
"""What a CUDA worker changes in stock's kernels' launches."""

import functools
import importlib
import logging
from typing import Any

import torch

from vllm_invariant import preflight, seams
from vllm_invariant.ops import launch, linear_launch, moe_launch

logger = logging.getLogger("vllm.vllm_invariant")

FLA = "vllm.third_party.flash_linear_attention.ops"


def pin_launches(head_k_dim: int, head_v_dim: int, dtype: str, *, untested: bool) -> None:
    """Pin every autotuned chunk kernel of this process.

    Args:
        head_k_dim, head_v_dim: head sizes of the model's GDN layers.
        dtype: of its activations.
        untested: the user runs on a GPU without a row of its own: use SM90's.

    Raises:
        ValueError: if the table has no row for this device and model.

    """
    capability = (9, 0) if untested else moe_launch.capability()
    row = launch.lookup(launch.Key(capability, dtype, head_k_dim, head_v_dim))
    for name, choice in row.items():
        module, kernel = launch.KERNELS[name]
        launch.pin(getattr(importlib.import_module(f"{FLA}.{module}"), kernel), choice)


def check_all_reduce(group: Any, hidden_size: int) -> None:
    """Judge the all-reduce of a tensor-parallel group.

    Under the flag stock's custom all-reduce adds up in rank order and takes a message of any size, in
    pieces.  Where it turned itself off stock falls back to NCCL, which chooses by the message's size.  So
    stock is asked here, about the shortest message of a step and about one above its buffer.

    Args:
        group: stock's coordinator of the tensor-parallel ranks.
        hidden_size: of the model.

    Raises:
        ValueError: if stock would not take it for every message.

    """
    custom = getattr(group.device_communicator, "ca_comm", None)
    messages = (torch.empty(rows, hidden_size, dtype=torch.bfloat16, device="meta") for rows in (1, 1 << 20))
    if custom is None or not all(map(custom.should_custom_ar, messages)):
        raise ValueError(
            preflight.refuse(
                f"--tensor-parallel-size {group.world_size} on GPUs without vLLM's custom all-reduce",
                "--tensor-parallel-size 1, or GPUs of one host that reach each other's memory (P2P), and a "
                "hidden size that is a multiple of 8",
                "leaves the sum to NCCL, whose order follows the message's size",
            )
        )


def pin_norm() -> None:
    """Gated RMSNorm: one row per program, instead of a number that follows the total row count."""
    guard = importlib.import_module(f"{FLA}.layernorm_guard")
    seams.replace(guard, "calc_rows_per_block", lambda stock: lambda *args, **kwargs: 1)


def keep_chunk_states() -> None:
    """The chunk rule can keep states on its way; see `checkpoint`."""
    from vllm_invariant.checkpoint import keep_states

    for module in ("chunk_delta_h", "chunk"):
        owner = importlib.import_module(f"{FLA}.{module}")
        seams.replace(owner, "chunk_gated_delta_rule_fwd_h", keep_states)


def launch_experts_by_shape() -> None:
    """Experts: launches from the table, which round alike, in place of one for all."""
    fused_moe = importlib.import_module("vllm.model_executor.layers.fused_moe.fused_moe")
    seams.replace(fused_moe, "get_default_config", moe_launch.by_shape)


def tile_linears_by_rows() -> None:
    """Linear layers: tiles from the table.  A GPU that it does not have keeps stock's, which is as exact."""
    from vllm.model_executor.determinism import batch_invariant

    from vllm_invariant.cuda_linear import by_rows

    choice = linear_launch.TABLE.get(moe_launch.capability())
    if choice is not None:
        layers = "vllm.model_executor.layers"
        importers = (f"{layers}.linear", f"{layers}.vocab_parallel_embedding")
        seams.replace_in(batch_invariant, "linear_batch_invariant", by_rows(choice), *importers)


def keep_remainders_out_of_decode_graphs() -> None:
    """Full decode graphs replay the decode kernels, so a prompt's last token must not enter one.

    Both model runners judge a step by its shape: rows of one token each.
    """
    from vllm.v1.worker.gpu import model_runner as v2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    seams.replace(GPUModelRunner, "_determine_batch_execution_and_padding", _v1_execution)
    seams.replace(v2.GPUModelRunner, "gather_batch_req_state", _v2_batch_state)


def _v1_execution(stock: Any) -> Any:
    @functools.wraps(stock)
    def determine(self: Any, num_tokens: int, num_reqs: int, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("force_uniform_decode") is None:
            batch = self.input_batch
            computed = batch.num_computed_tokens_cpu[:num_reqs]
            if bool((computed < batch.num_prompt_tokens[:num_reqs]).any()):
                kwargs["force_uniform_decode"] = False
        return stock(self, num_tokens, num_reqs, *args, **kwargs)

    return determine


def _v2_batch_state(stock: Any) -> Any:
    @functools.wraps(stock)
    def gather(self: Any, scheduler_output: Any, dummy_run: bool) -> Any:
        state, uniform = stock(self, scheduler_output, dummy_run)
        if state is None or state.prefill_runs_as_decode_np is None:
            return state, uniform
        # Past the prompt a one-token row replays a generated token: that is a decode.
        prompt_len = self.req_states.prompt_len.np[state.idx_mapping_np]
        decodes = state.prefill_runs_as_decode_np & (state.num_computed_prefill_tokens_np >= prompt_len)
        eligible = bool((decodes | ~state.is_prefilling_np).all())
        state = state._replace(prefill_runs_as_decode_np=decodes, decode_graph_eligible=eligible)
        return state, uniform if eligible else None

    return gather
