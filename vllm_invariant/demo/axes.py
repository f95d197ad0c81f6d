# In a vLLM branch: tests/v1/determinism/test_serve.py.
"""The axes of the demo.  Each asks the same needles under other circumstances.

An axis that did not come about proves nothing, so each also says whether it did: companions were
really answered meanwhile, hits were really hits.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from vllm_invariant.demo.answers import Answer
from vllm_invariant.demo.prompts import Prompt, PromptSet
from vllm_invariant.demo.server import BUDGET
from vllm_invariant.demo.traffic import Flight, Line

Tick = Callable[[], None]

VISIT_TRIES = 3  # a busy machine hands out tokens in bursts, between which nobody is seen to come and go


@dataclass(frozen=True)
class Outcome:
    """What an axis brought.

    Attributes:
        answers: one for each needle, in their order.
        void: why the axis did not come about, or None if it did.
        others: further answers, of tries that did not come about, with their needle's number.  They
            count as well.

    """

    answers: list[Answer]
    void: str | None = None
    others: list[tuple[int, Answer]] = field(default_factory=list)


@dataclass(frozen=True)
class Axis:
    """One row of the table.

    Attributes:
        name: its name in the table.
        how: what is different from the reference, in a few words.
        ask: gets the answers.  Called with a line to the server, the prompts, and what to call
            after each answer.

    """

    name: str
    how: str
    ask: Callable[[Line, PromptSet, Tick], Awaitable[Outcome]]


async def alone(line: Line, prompts: PromptSet, tick: Tick) -> Outcome:
    """One needle at a time, each on an empty cache."""
    answers = []
    for needle in prompts.needles:
        await line.forget()
        answers.append(await line.ask(needle))
        tick()
    hits = sum(answer.cached > 0 for answer in answers)
    return Outcome(answers, f"{hits} cold requests hit the cache" if hits else None)


async def _all_at_once(
    line: Line, needles: Sequence[Prompt], others: Sequence[Prompt], tick: Tick
) -> Outcome:
    """Needles and strangers in turn, all sent before any is answered."""
    strangers = [line.send(prompt) for prompt in others]
    flights = [line.send(needle) for needle in needles]
    answers = []
    for flight in flights:
        answers.append(await flight.answer())
        tick()
    both = [*answers, *[await stranger.answer() for stranger in strangers]]
    together = max(a.sent for a in both) < min(a.first for a in both)
    return Outcome(answers, None if together else "the requests were not all under way at once")


async def batch(line: Line, prompts: PromptSet, tick: Tick) -> Outcome:
    """All needles and all strangers at once, on an empty cache."""
    await line.forget()
    return await _all_at_once(line, prompts.needles, prompts.strangers, tick)


async def _visited(line: Line, needle: Prompt, strangers: Sequence[Prompt]) -> tuple[Answer, int]:
    """Ask a needle; strangers come and go while it decodes.  Returns how many did both."""
    flight = line.send(needle)
    visits: list[Flight] = []
    for i, stranger in enumerate(strangers):
        await flight.reach(1 + 3 * i)
        visits.append(line.send(stranger))
    answer = await flight.answer()
    seen = [await visit.answer() for visit in visits]
    return answer, sum(answer.first < v.sent and v.last < answer.last for v in seen)


async def company(line: Line, prompts: PromptSet, tick: Tick) -> Outcome:
    """Strangers' prefills join a needle's decode steps, and leave before it ends."""
    answers, others, lonely = [], [], 0
    for i, needle in enumerate(prompts.needles):
        strangers = [replace(s, max_tokens=1 + i % 3) for s in prompts.strangers[i % 2 :: 2]]
        tries: list[Answer] = []
        visits = 0
        while not visits and len(tries) < VISIT_TRIES:
            await line.forget()
            answer, visits = await _visited(line, needle, strangers)
            tries.append(answer)
        others += [(i, answer) for answer in tries[:-1]]
        answers.append(tries[-1])
        lonely += visits == 0
        tick()
    void = f"nobody came and went during {lonely} of the requests" if lonely else None
    return Outcome(answers, void, others)


async def cut(line: Line, prompts: PromptSet, tick: Tick) -> Outcome:
    """Others decode, or prefill, throughout a needle's prefill and take from its budget.

    Alone, a needle's chunks end every `BUDGET` tokens.  With a single other row in the step the
    budget's last grid step no longer fits, so every chunk ends elsewhere.
    """
    answers, uncut = [], 0
    for i, needle in enumerate(prompts.needles):
        await line.forget()
        long_lived = [replace(s, max_tokens=400) for s in prompts.strangers[: 1 + i % 3]]
        async with line.company(long_lived) as others:
            # Every other time a stranger's prefill is ahead in the queue too, and ends mid-step.
            ahead = [line.send(replace(prompts.strangers[-1], max_tokens=1))] if i % 2 else []
            answer = await line.ask(needle)
            for other in others:
                await other.reach(len(other.arrivals) + 1)
            uncut += any(o.arrivals[0] > answer.sent or o.arrivals[-1] < answer.first for o in others)
            for flight in ahead:
                await flight.answer()
        answers.append(answer)
        tick()
    return Outcome(answers, f"{uncut} requests had the whole budget of {BUDGET}" if uncut else None)


def _need_hits(answers: list[Answer], void: str | None = None) -> Outcome:
    misses = sum(answer.cached == 0 for answer in answers)
    return Outcome(answers, void or (f"{misses} requests did not hit the cache" if misses else None))


async def shared_hit(line: Line, prompts: PromptSet, tick: Tick) -> Outcome:
    """Each needle hits the system prompt that another request left in the cache."""
    answers = []
    for needle in prompts.needles:
        await line.forget()
        await line.ask(prompts.primer)
        answers.append(await line.ask(needle))
        tick()
    return _need_hits(answers)


async def own_hit(line: Line, prompts: PromptSet, tick: Tick) -> Outcome:
    """Each needle hits its own prompt, as far as the grid allows."""
    await line.forget()
    answers = []
    for needle in prompts.needles:
        await line.ask(replace(needle, max_tokens=1))
        answers.append(await line.ask(needle))
        tick()
    return _need_hits(answers)


async def hit_in_batch(line: Line, prompts: PromptSet, tick: Tick) -> Outcome:
    """All needles hit a warm cache at once, among strangers."""
    await line.forget()
    for needle in prompts.needles:
        await line.ask(replace(needle, max_tokens=1))
    outcome = await _all_at_once(line, prompts.needles, prompts.strangers, tick)
    return _need_hits(outcome.answers, outcome.void)


# On the first server, after `alone` has given the reference.
AXES = (
    Axis("batch", "cold, all at once, among strangers", batch),
    Axis("company", "cold, strangers join and leave the decode", company),
    Axis("cut", "cold, load forces other chunk ends", cut),
    Axis("hit, system prompt", "warm, alone, on the shared system prompt", shared_hit),
    Axis("hit, own prompt", "warm, alone, on the whole prompt", own_hit),
    Axis("hit, in a batch", "warm, all at once, among strangers", hit_in_batch),
)

REFERENCE = Axis("alone", "cold, one at a time", alone)
BOOT = Axis("boot", "cold, one at a time, in another process", alone)  # on a second server
