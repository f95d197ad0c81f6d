"""Faults planted in engines and servers of other processes, to see that audit and trace find them.

A fault travels as a vLLM general plugin that is found on PYTHONPATH, so it needs nothing from the
package and reaches every process an engine or a server starts.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.offer import offer


def planted(folder: Path, name: str) -> dict[str, str]:
    """Environment in which every vLLM process has the fault ``name``; see `FAULTS`."""
    return offer(folder, {"planted_fault": f"{__name__}:{FAULTS[name].__name__}"})


def _in_worker(fault: Callable[[], None]) -> None:
    """Plant once stock's kernels may be imported, after the package has put itself in place."""
    from vllm_invariant import install

    ours = install.in_worker

    def in_worker() -> None:
        ours()
        fault()

    install.in_worker = in_worker


# --- CUDA -------------------------------------------------------------------------------------------


def packed_decode_off() -> None:
    """Cached rows of a mixed step go through stock's path, so they change kernel as prefills come and go."""

    def fault() -> None:
        from vllm_invariant.layer import InvariantQwenGatedDeltaNetAttention

        del InvariantQwenGatedDeltaNetAttention._forward_core

    _in_worker(fault)


def norm_pin_off() -> None:
    """The gated norm takes its rows per program from the step's total row count."""
    from vllm_invariant import cuda

    cuda.pin_norm = lambda: None


# --- the same on a CPU, whose kernels differ --------------------------------------------------------


def chunk_in_mixed_steps() -> None:
    """Cached rows of a mixed step take the chunk kernel."""

    def fault() -> None:
        from vllm import _custom_ops as ops
        from vllm.forward_context import get_forward_context

        stock = ops.fused_sigmoid_gating_delta_rule_update_cpu

        @functools.wraps(stock)
        def update(**kw: Any) -> Any:
            steps = get_forward_context().attn_metadata.values()
            if not any(getattr(step, "num_prefills", 0) for step in steps):
                return stock(**kw)
            gates = {name: kw[name] for name in ("A_log", "a", "b", "dt_bias")}
            g, beta = ops.fused_gdn_gating_cpu(**gates)
            out, _ = ops.chunk_gated_delta_rule_cpu(
                query=kw["q"],
                key=kw["k"],
                value=kw["v"],
                g=g,
                beta=beta,
                initial_state=kw["initial_state_source"],
                output_final_state=True,
                cu_seqlens=kw["cu_seqlens"],
                head_first=False,
                use_qk_l2norm_in_kernel=True,
                initial_state_indices=kw["initial_state_indices"],
            )
            return out.transpose(0, 1)

        ops.fused_sigmoid_gating_delta_rule_update_cpu = update

    _in_worker(fault)


def norm_by_rows() -> None:
    """The gated norm rounds before its gate once a step has more than 64 rows."""

    def fault() -> None:
        import torch
        from vllm.model_executor.layers.layernorm import RMSNormGated

        stock = RMSNormGated.forward_native

        def forward_native(self: Any, x: Any, z: Any = None) -> Any:
            if x.shape[0] <= 64:
                return stock(self, x, z)
            wide = x.float()
            scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
            normed = (wide * scale * self.weight.float()).to(x.dtype)
            return (normed.float() * torch.nn.functional.silu(z.float())).to(x.dtype)

        RMSNormGated.forward_native = forward_native

    _in_worker(fault)


# --- either -----------------------------------------------------------------------------------------


def grid_32() -> None:
    """Prefill chunks end on a grid half as wide as the chunk kernel's."""
    from vllm_invariant.arithmetic import ARITHMETICS, CHUNK

    ARITHMETICS[CHUNK.name] = replace(CHUNK, grid=32)


def decode_blocks_published() -> None:
    """Blocks that decode filled go to the prefix cache like any other."""
    from vllm_invariant.history import HistoryMixin

    HistoryMixin._publish = lambda self, request, tokens: self._stock_publish(request, tokens)


def one_rank_apart() -> None:
    """Rank 1 says that it has a torch of its own."""
    from vllm_invariant import agreement

    stock = agreement.facts

    def facts(*args: Any) -> dict[str, str]:
        from vllm.distributed.parallel_state import get_tp_group

        return stock(*args) | ({"torch": "another"} if get_tp_group().rank_in_group == 1 else {})

    agreement.facts = facts


def state_slot_perturbed() -> None:
    """The recurrent state of layer 2 that a prefix-cache hit starts from is disturbed."""

    def fault() -> None:
        from vllm.v1.worker.gpu import model_runner as v2
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        for runner in (GPUModelRunner, v2.GPUModelRunner):
            runner.execute_model = _disturbing(runner.execute_model)

    _in_worker(fault)


def _disturbing(stock: Any) -> Any:
    @functools.wraps(stock)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        for new in scheduler_output.scheduled_new_reqs:
            if new.num_computed_tokens:
                _disturb(self, new, scheduler_output)
        return stock(self, scheduler_output, *args, **kwargs)

    return execute_model


def _disturb(runner: Any, new: Any, scheduler_output: Any) -> None:
    name, layer = next(
        (name, module)
        for name, module in runner.get_model().named_modules()
        if name.endswith("2.linear_attn")
    )
    groups = runner.kv_cache_config.kv_cache_groups
    group = next(i for i, g in enumerate(groups) if any(name.endswith(n) for n in g.layer_names))
    size = groups[group].kv_cache_spec.block_size
    slot = new.block_ids[group][(new.num_computed_tokens - 1) // size]
    sources = {copy[1]: copy[0] for copy in scheduler_output.kv_cache_block_copies or ()}
    state = layer.kv_cache[1][sources.get(slot, slot)]
    state += 1e-3 * state.abs().mean()


FAULTS: dict[str, Callable[[], None]] = {
    "packed decode off": packed_decode_off,
    "norm pin off": norm_pin_off,
    "chunk kernel in mixed steps": chunk_in_mixed_steps,
    "norm by rows": norm_by_rows,
    "grid 32": grid_32,
    "decode blocks published": decode_blocks_published,
    "state slot perturbed": state_slot_perturbed,
    "one rank apart": one_rank_apart,
}
