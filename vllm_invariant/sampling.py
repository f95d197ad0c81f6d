# In a vLLM branch: vllm/v1/worker/gpu_model_runner.py, sample_tokens.
"""A step that yields no token must not advance a request's random generator.

Model Runner V1 samples every row, also those of a prompt's earlier chunks and of replayed tokens,
throws these samples away, and winds the row's generator back by a fixed offset.  A CPU generator has
no offset, so a seeded request with a cut prompt ends the engine there.  Here such rows' generators
are put aside while the step samples.  Model Runner V2 draws by seed and position and needs nothing.
"""

import functools
from typing import Any

import numpy as np


def hold_generators(stock: Any) -> Any:
    """Wrap V1's ``sample_tokens``."""

    @functools.wraps(stock)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        discarded = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]
        held = {row: generators.pop(row) for row in map(int, discarded) if row in generators}
        try:
            return stock(self, *args, **kwargs)
        finally:
            generators.update(held)

    return sample_tokens
