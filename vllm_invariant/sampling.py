# In a vLLM branch: vllm/v1/worker/gpu_model_runner.py, sample_tokens.
"""A request's random generator moves once for each token it yields, whatever happens in between.

Model Runner V1 samples every row, also those of a prompt's earlier chunks and of replayed tokens,
throws these samples away, and winds the row's generator back by a fixed offset.  A CPU generator has
no offset, so a seeded request with a cut prompt ends the engine there.  Here such rows' generators
are put aside while the step samples.

And a token drawn by a step under way when its request is preempted may be thrown away by the
scheduler; it is drawn again later, and the generator goes back to where it stood before.

Model Runner V2 draws by seed and position and needs nothing.
"""

import functools
from typing import Any

import numpy as np

# Draws of a request that may have to be undone: more than steps are ever under way at once.
DRAWS = 4


def rewind(request: Any, generator: Any, position: int) -> None:
    """Put a generator where it stood before it first drew the token at ``position``.

    Args:
        request: the worker's state of the request, which also keeps the note of its last draws.
        generator: its ``torch.Generator``.
        position: tokens before the one to be drawn.

    """
    drawn = vars(request).setdefault("invariant_draws", [])
    while drawn and drawn[-1][0] >= position:
        generator.set_state(drawn.pop()[1])
    drawn.append((position, generator.get_state()))
    del drawn[:-DRAWS]


def hold_generators(stock: Any) -> Any:
    """Wrap V1's ``sample_tokens``."""

    @functools.wraps(stock)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = self.input_batch
        generators = batch.generators
        discarded = np.nonzero(self.discard_request_mask.np[: batch.num_reqs])[0]
        held = {row: generators.pop(row) for row in map(int, discarded) if row in generators}
        if self.execute_model_state is not None:  # there is something to sample
            for row, generator in generators.items():
                position = int(self.optimistic_seq_lens_cpu[row])
                rewind(self.requests[batch.req_ids[row]], generator, position)
        try:
            return stock(self, *args, **kwargs)
        finally:
            generators.update(held)

    return sample_tokens
