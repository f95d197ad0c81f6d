"""A made-up worker that only keeps books: who wrote what into which block, by which path.

It does with block tables what vLLM's worker does (copies of hit blocks, the move of a running state
to its next block, writes of keys, values and states), but what it writes is a name: the chain of all
tokens up to a position and of the path, prefill or decode, that computed each; where the arithmetic makes
no difference between the paths, of the tokens alone.  Every read is compared
with the name the reader expects, so a stale, foreign, skipped or differently computed block is found at
its first use, and a block nobody wrote even more so.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_invariant.arithmetic import Arithmetic


def chain(tokens: list[int], prompt_len: int, known: list[int]) -> np.ndarray:
    """Names of positions 1 ... len(tokens): element p - 1 names what p tokens leave behind.

    Args:
        tokens: of the request so far.
        prompt_len: its first tokens, computed by prefill; the others by decode.
        known: names of a prefix of the same request, continued here.

    """
    names = list(known)
    name = names[-1] if names else 17
    for p in range(len(names), len(tokens)):
        name = hash((name, tokens[p], p < prompt_len))
        names.append(name)
    return np.array(names, dtype=np.int64)


@dataclass
class Page:
    """One block of cache memory.  Attention and state layers overlay it: the last writer owns it."""

    kind: str = "never written"
    names: Any = None


@dataclass
class Row:
    """A request as the worker knows it.

    Attributes:
        tables: block ids by cache group.
        started: it has computed something since it was admitted.
        names: what its tokens so far leave behind, see `chain`.

    """

    tables: list[list[int]]
    started: bool = False
    names: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))


class Ledger:
    """Pages, rows and the checks."""

    def __init__(
        self, groups: list[tuple[str, int]], requests: dict[str, Any], arithmetic: Arithmetic
    ) -> None:
        self.arithmetic = arithmetic
        self.groups = groups  # kind, "state" or "attention", and tokens in a block
        self.requests = requests
        self.pages: dict[int, Page] = {}
        self.rows: dict[str, Row] = {}
        self.hits = 0
        self.prefills = 0
        self.decodes = 0
        self.replays = 0

    def execute(self, output: Any, chunks: dict[str, tuple[int, int]]) -> None:
        """Do one step's work, in the order vLLM's worker does it."""
        for name in output.finished_req_ids:
            self.rows.pop(name, None)
        for name in output.preempted_req_ids or ():
            self.rows.pop(name, None)
        for copy in output.kv_cache_block_copies or ():
            source = self._page(copy.src_block_id)
            names = source.names.copy() if isinstance(source.names, np.ndarray) else source.names
            self.pages[copy.dst_block_id] = Page(source.kind, names)
        self._update_tables(output)
        for name, (start, end) in chunks.items():
            self._compute(name, start, end)

    def _update_tables(self, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            self.rows[new.req_id] = Row([list(ids) for ids in new.block_ids])
        cached = output.scheduled_cached_reqs
        for name, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self.rows[name] = Row([list(group) for group in ids])
            elif ids is not None:
                for table, more in zip(self.rows[name].tables, ids, strict=True):
                    table.extend(more)

    def _page(self, block_id: int) -> Page:
        return self.pages.setdefault(block_id, Page())

    def _compute(self, name: str, start: int, end: int) -> None:
        request, row = self.requests[name], self.rows[name]
        prompt_len, grid = request.num_prompt_tokens, self.arithmetic.grid
        one_path = self.arithmetic.decode_equals_prefill
        if start < prompt_len or (one_path and end > start + 1):
            self.prefills += 1
            assert start % grid == 0, f"{name}: prefill starts at {start}"
            whole = request.num_tokens if one_path else prompt_len
            assert end == prompt_len or (end <= whole and end % grid == 0), f"{name}: cut at {end}"
        else:
            self.decodes += 1
            assert end == start + 1, f"{name}: {end - start} tokens in one decode"
            self.replays += end < request.num_tokens
        self.hits += start > 0 and not row.started
        # A token still to come back from the device has no name yet; it needs none to be computed.
        tokens = list(request.all_token_ids)[:end]
        tokens += [-1 - p for p in range(len(tokens), end)]
        row.names = chain(tokens, end if one_path else prompt_len, row.names[:start].tolist())
        for (kind, block), table in zip(self.groups, row.tables, strict=True):
            work = self._attention if kind == "attention" else self._state
            work(name, row, table, block, start, end)
        row.started = True

    def _attention(self, name: str, row: Row, table: list[int], block: int, start: int, end: int) -> None:
        for column in range(-(-end // block)):
            first, page = column * block, self._page(table[column])
            have = min(start - first, block)
            if have > 0:
                expected = row.names[first : first + have]
                found = page.names[:have] if page.kind == "attention" else None
                assert found is not None and np.array_equal(found, expected), (
                    f"{name}: keys of tokens {first} to {first + have} in block {table[column]} are "
                    f"{page.kind}, not its own"
                )
            if end > first and start < first + block:
                if page.kind != "attention":
                    page.kind, page.names = "attention", np.zeros(block, dtype=np.int64)
                low, high = max(start, first), min(end, first + block)
                assert table[column] != 0, f"{name}: writes to the filler block"
                page.names[low - first : high - first] = row.names[low:high]

    def _state(self, name: str, row: Row, table: list[int], block: int, start: int, end: int) -> None:
        target = (end - 1) // block
        if start > 0:
            column = (start - 1) // block
            page = self._page(table[column])
            assert page.kind == "state" and page.names == row.names[start - 1], (
                f"{name}: the state after {start} tokens in block {table[column]} is {page.kind}, not its own"
            )
        assert table[target] != 0, f"{name}: writes to the filler block"
        self.pages[table[target]] = Page("state", row.names[end - 1])
