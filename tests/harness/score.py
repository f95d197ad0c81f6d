"""Scoring: the logprobs of tokens that are all given as prompt."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.harness.compare import Result
from tests.harness.engine import Engine


@dataclass(frozen=True)
class Scored:
    """What an engine said of given tokens.

    Attributes:
        tokens: the tokens.
        logprobs: for each token but the first, a mapping of token id to logprob, the token's own first.
        chunk_ends: where the prefill was cut.
        hit: tokens taken from the prefix cache; the scores of these and of the next one mean nothing.

    """

    tokens: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]
    chunk_ends: list[int]
    hit: int

    def part(self, start: int, end: int | None = None) -> Result:
        """Tokens ``start:end``, in the form of a request that generated them."""
        assert start > self.hit, f"token {start} was not computed: {self.hit} were cached"
        return Result.of(
            self.tokens[start:end], self.logprobs[start - 1 : None if end is None else end - 1], 0
        )


def score(engine: Engine, tokens: Sequence[int], *, read_cache: bool = False) -> Scored:
    """Give ``tokens`` to an engine as a prompt and ask for the 20 likeliest at each position.

    Args:
        engine: an idle engine.
        tokens: at least two.
        read_cache: take what the prefix cache holds; vLLM leaves it alone for such requests.

    """
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=20,
        detokenize=False,
        skip_reading_prefix_cache=not read_cache,
    )
    engine.record.clear()
    (output,) = engine.llm.generate({"prompt_token_ids": list(tokens)}, params, use_tqdm=False)
    (request_id,) = engine.record.prompt_ends
    hit, ends = engine.record.hit(request_id), engine.record.chunk_ends(request_id)
    positions = output.prompt_logprobs[1:]
    scores = [{token: entry.logprob for token, entry in position.items()} for position in positions]
    missing = len(tokens) - 1 - len(scores)
    assert missing in (0, hit), "model runner V2 leaves out what was cached, V1 fills it with anything"
    return Scored(tuple(tokens), (*({},) * missing, *scores), ends, hit)


@contextmanager
def budget(engine: Engine, tokens: int) -> Iterator[None]:
    """Let the scheduler spend ``tokens`` a step, without another engine for it."""
    scheduler: Any = engine.scheduler
    stock = scheduler.max_num_scheduled_tokens
    assert tokens <= stock, f"the engine was built for {stock} tokens a step"
    scheduler.max_num_scheduled_tokens = tokens
    try:
        yield
    finally:
        scheduler.max_num_scheduled_tokens = stock
