# In a vLLM branch: not needed (a tool for users).
"""Watches an eager model while one request goes through it.

Every module's output and every GDN operation's result is reduced, row by row, to checksums of its
bytes; so is what the request keeps in the cache, before and after each step.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from vllm.forward_context import get_forward_context

from vllm_invariant.trace import kernels, operations, states
from vllm_invariant.trace.digest import raw_row, row_digests
from vllm_invariant.trace.record import AFTER, BEFORE, KEYS_AND_VALUES, Seen, Spot, Step
from vllm_invariant.trace.rows import RowMap, Rows

LOGITS = "LogitsProcessor"


class Capture:
    """Hooks on one model.  ``request`` names the traced request; None watches nothing."""

    def __init__(self, runner: Any, scheduler: Any) -> None:
        self.request: str | None = None
        self.keep: Spot | None = None
        self.kept: Any = None
        self.steps: list[Step] = []
        self._map = RowMap(runner, scheduler)
        self._rows: Rows | None = None
        self._inside: list[tuple[str, int]] = []  # modules being run, each with the launches before it
        self._pending: list[tuple[Seen, torch.Tensor]] = []
        self._launches = 0
        model = runner.get_model() if hasattr(runner, "get_model") else runner.model
        self._layers = states.layers(model)
        device = next(model.parameters()).device.type
        kernels.listen()
        self.unseen = operations.watch(device, self._operation, self._mark)
        model.register_forward_pre_hook(self._step_starts, with_kwargs=True)
        for name, module in model.named_modules():
            if name:
                module.register_forward_pre_hook(lambda *_, name=name: self._enter(name))
                module.register_forward_hook(lambda m, _, out, name=name: self._leave(name, m, out))
        model.register_forward_hook(lambda *_: self._step_ends())

    def start(self, request: str, keep: Spot | None) -> None:
        """Watch ``request`` from now on, and keep the values at one spot."""
        self.request, self.keep, self.kept = request, keep, None
        self.steps, self._rows = [], None

    def stop(self) -> None:
        """Watch nothing."""
        self._settle()
        self.request, self._rows = None, None

    # --- steps ---------------------------------------------------------------------------------

    def _step_starts(self, _: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self._settle()
        self._rows, self._inside = None, []
        if self.request is None or get_forward_context().attn_metadata is None:
            return
        positions = kwargs["positions"] if "positions" in kwargs else args[1]
        rows = self._map.find(self.request, positions)
        if rows is None:
            return
        self._rows = rows
        kernels.LAUNCHES.clear()
        number = len(self.steps)
        self.steps.append(Step(number, rows.start, rows.end, rows.total, rows.requests, rows.cached_rows))
        if rows.start:
            self._cache(BEFORE, rows.start, 0 if number == 0 else rows.start)

    def _step_ends(self) -> None:
        if self._rows is not None:
            self._cache(AFTER, self._rows.end, self._rows.start)

    def _cache(self, when: str, end: int, start: int) -> None:
        assert self._rows is not None
        metadata = get_forward_context().attn_metadata
        for name, layer in self._layers.items():
            mine = metadata.get(getattr(layer, "prefix", getattr(layer, "layer_name", name)))
            for kept in states.states(name, layer, mine, self._rows.index, end):
                self._add(kept, when)
            for kept in states.keys_and_values(name, layer, mine, self._rows.index, start, end):
                self._add(kept, "")

    def _add(self, kept: states.Kept, when: str) -> None:
        value = kept.value
        seen = Seen(
            kept.site,
            kept.tensor + when,
            kept.positions,
            np.empty(0),
            tuple(value.shape),
            str(value.dtype).removeprefix("torch."),
            kept.where,
        )
        self._store(seen, kept.digests(), value, len(kept.positions), 0)

    # --- modules and operations -----------------------------------------------------------------

    def _mark(self) -> None:
        self._launches = len(kernels.LAUNCHES)

    def _enter(self, name: str) -> None:
        if self._rows is not None:
            self._inside.append((name, len(kernels.LAUNCHES)))

    def _leave(self, name: str, module: Any, output: Any) -> None:
        if self._rows is None or not self._inside:
            return
        _, launches = self._inside.pop()
        if self._inside and not name.startswith(self._inside[-1][0] + "."):
            # Layers may share a module, such as the rotary embedding: named after the layer that runs it.
            name = f"{self._inside[-1][0]}.{name.rsplit('.', 1)[-1]}"
        ran = tuple(dict.fromkeys(kernels.LAUNCHES[launches:]))
        for label, tensor in _tensors(output, "output"):
            if type(module).__name__ == LOGITS:
                self._logits(name, label, tensor, module, ran)
            elif tensor.dim() and tensor.shape[0] % self._rows.padded == 0 and tensor.numel():
                self._see(name, label, tensor, self._rows.padded, self._rows.first, describe(module), ran)

    def _logits(self, name: str, label: str, tensor: torch.Tensor, module: Any, ran: Any) -> None:
        """One row a request: that of its last token."""
        assert self._rows is not None
        if tensor.shape[0] == self._rows.requests:
            rows = self._rows
            last = np.array([rows.end - 1])
            seen = _seen(name, label, last, tensor, describe(module), ran)
            digest = row_digests(tensor[rows.index : rows.index + 1], 1)
            self._store(seen, digest, tensor, rows.requests, rows.index)

    def _operation(self, op: operations.Operation, name: str, tensor: torch.Tensor, ran: str) -> None:
        rows = self._rows
        layer = next((name for name, _ in reversed(self._inside) if name in self._layers), None)
        if rows is None or layer is None:
            return
        count = tensor.shape[0]
        offset = 0 if op.cached or count >= rows.total else rows.total - count
        first = rows.first - offset
        if first >= 0 and first + rows.count <= count:
            site = f"{layer}.{op.name}"
            launched = tuple(dict.fromkeys(kernels.LAUNCHES[self._launches :]))
            self._see(site, name, tensor, count, first, ran, launched)

    def _see(
        self, site: str, label: str, tensor: torch.Tensor, total: int, first: int, ran: str, launched: Any
    ) -> None:
        assert self._rows is not None
        positions = np.arange(self._rows.start, self._rows.end)
        each = tensor.shape[0] // total
        mine = tensor[first * each : (first + self._rows.count) * each]
        seen = _seen(site, label, positions, tensor, ran, launched)
        self._store(seen, row_digests(mine, self._rows.count), mine, self._rows.count, 0)

    def _store(self, seen: Seen, digests: torch.Tensor, value: torch.Tensor, rows: int, first: int) -> None:
        step = self.steps[-1]
        again = sum(s.site == seen.site and s.tensor == seen.tensor for s in step.seen)
        if again and seen.tensor != KEYS_AND_VALUES:  # those come in two parts, restored and new
            seen.tensor += f", call {again + 1}"
        step.seen.append(seen)
        self._pending.append((seen, digests))
        keep = self.keep
        if keep is not None and (seen.site, seen.tensor) == (keep.site, keep.tensor):
            at = np.nonzero(seen.positions == keep.position)[0]
            if len(at) and self.kept is None:
                row = raw_row(value, rows, first + int(at[0]))
                self.kept = (row.to(torch.float64).numpy(), seen.dtype)

    def _settle(self) -> None:
        """Bring the checksums of the last step to the CPU, in one copy."""
        if self._pending:
            flat = torch.cat([digests for _, digests in self._pending]).cpu().numpy()
            ends = np.cumsum([len(digests) for _, digests in self._pending])
            for (seen, _), part in zip(self._pending, np.split(flat, ends[:-1]), strict=True):
                seen.digests = part
            self._pending = []


def _seen(
    site: str, label: str, positions: np.ndarray, tensor: torch.Tensor, ran: str, launched: tuple[str, ...]
) -> Seen:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Seen(site, label, positions, np.empty(0), tuple(tensor.shape), dtype, ran, launched)


def _tensors(output: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(output, torch.Tensor):
        yield name, output
    elif isinstance(output, tuple | list):
        for i, part in enumerate(output):
            yield from _tensors(part, f"{name}[{i}]")


def describe(module: Any) -> str:
    """A module's class, and the implementation it chose."""
    chosen = [
        type(module.quant_method).__name__ if getattr(module, "quant_method", None) is not None else None,
        type(module.impl).__name__ if getattr(module, "impl", None) is not None else None,
        getattr(getattr(module, "_forward_method", None), "__name__", None),
    ]
    found = ", ".join(name for name in chosen if name)
    return type(module).__name__ + (f" ({found})" if found else "")
