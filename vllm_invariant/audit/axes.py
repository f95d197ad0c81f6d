# In a vLLM branch: tests/v1/determinism/test_serve.py.
"""The axes.  Each asks the same requests under other circumstances.

An axis that did not come about proves nothing, so each also says whether it did: companions were
really answered meanwhile, hits were really hits.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from vllm_invariant.audit.answers import Answer
from vllm_invariant.audit.background import poisson
from vllm_invariant.audit.geometry import Geometry
from vllm_invariant.audit.prompts import STRANGER_LENGTHS, Prompt, Supply, edges
from vllm_invariant.audit.traffic import Flight, Line

Tick = Callable[[], None]

TRIES = 10  # a busy machine hands out tokens in bursts, between which nobody is seen to come
ARRIVALS = 4  # strangers that arrive during a target's decode, on average
LONG_LIFE = 1500  # tokens of a request that is to go on until it is given up
SHORTEST_GAP = 0.002  # seconds
SCRAPE = 0.05  # seconds between two looks at the server's counters


@dataclass
class Exam:
    """What is asked, and of whom.

    Attributes:
        line: to the server.
        geometry: its sizes.
        supply: of the prompts.
        turns: later turns of conversations, as (number of the first turn's target, prompt).
        reference: answers to the targets, then to the turns, each alone and cold.

    """

    line: Line
    geometry: Geometry
    supply: Supply
    turns: list[tuple[int, Prompt]] = field(default_factory=list)
    reference: list[Answer] = field(default_factory=list)

    @property
    def targets(self) -> list[Prompt]:
        """The requests that are compared on every axis."""
        return self.supply.targets

    @property
    def prompts(self) -> list[Prompt]:
        """What `reference` answers."""
        return [*self.targets, *(prompt for _, prompt in self.turns)]


@dataclass(frozen=True)
class Outcome:
    """What an axis brought.

    Attributes:
        answers: each with the number of its prompt in the reference.
        proof: what was seen of the path.
        void: why the axis did not come about, or None if it did.

    """

    answers: list[tuple[int, Answer]]
    proof: str
    void: str | None = None


@dataclass(frozen=True)
class Axis:
    """One row of the table.

    Attributes:
        name: its name in the table.
        how: what is different from the reference, in a few words.
        ask: gets the answers.  Called with the exam, and what to call after each answer.
        missing: says why the axis cannot be asked of this server, or None if it can.

    """

    name: str
    how: str
    ask: Callable[[Exam, Tick], Awaitable[Outcome]]
    missing: Callable[[Exam], str | None] = lambda exam: None


def _hits(answers: list[tuple[int, Answer]]) -> str:
    hits = [answer.cached for _, answer in answers if answer.cached]
    return f"{len(hits)} hits of {sum(hits):,} tokens"


async def cold(line: Line, prompts: list[Prompt], tick: Tick) -> Outcome:
    """Each prompt alone, and without a hit."""
    answers = []
    before = await line.counters()
    for i, prompt in enumerate(prompts):
        line.forget()
        answers.append((i, await line.ask(prompt)))
        tick()
    after = await line.counters()
    warm = sum(bool(answer.cached) for _, answer in answers)
    void = f"{warm} cold requests hit the cache" if warm else None
    if all(answer.cached is None for _, answer in answers):
        if not (before and after):
            void = "the server does not tell what it took from its cache"
        elif after.hits > before.hits:
            void = "the server counted cache hits of cold requests"
    return Outcome(answers, "each alone, no hit", void)


async def alone(exam: Exam, tick: Tick) -> Outcome:
    """The reference: targets and later turns, each alone and cold."""
    first = await cold(exam.line, exam.targets, tick)
    answers = [answer for _, answer in first.answers]
    for i, (target, answer) in enumerate(zip(exam.targets, answers, strict=True)):
        said = [token for token in answer.tokens if isinstance(token, int)]
        if len(target.tokens) + 1 in edges(exam.geometry):  # so that decode passes it
            exam.turns.append((i, exam.supply.next_turn(target, said)))
    second = await cold(exam.line, [prompt for _, prompt in exam.turns], tick)
    exam.reference = answers + [answer for _, answer in second.answers]
    return Outcome(list(enumerate(exam.reference)), first.proof, first.void or second.void)


async def again(exam: Exam, tick: Tick) -> Outcome:
    """Alone and cold once more, after everything else, and after the cache was emptied where possible."""
    reset = await exam.line.reset()
    outcome = await cold(exam.line, exam.targets, tick)
    asked = f"after {len(exam.line.flights):,} requests" + (", cache emptied" if reset else "")
    return replace(outcome, proof=asked)


async def _at_once(exam: Exam) -> tuple[list[tuple[int, Answer]], int]:
    """Targets and strangers in turn, all sent at once.  Returns how many targets shared no step."""
    flights: list[Flight] = []
    strangers: list[Flight] = []
    for target, length in zip(exam.targets, STRANGER_LENGTHS * len(exam.targets), strict=False):
        flights.append(exam.line.send(target))
        strangers.append(exam.line.send(exam.supply.stranger(target.max_tokens, length), apart=True))
    answers = [await flight.answer() for flight in flights]
    both = answers + [await stranger.answer() for stranger in strangers]
    lonely = sum(not any(_together(a, b) for b in both if b is not a) for a in answers)
    return list(enumerate(answers)), lonely


async def _batches(exam: Exam, prepare: Callable[[], None], tick: Tick) -> Outcome:
    """Everything at once, again until each target decoded beside others.  Every try counts."""
    answers: list[tuple[int, Answer]] = []
    lonely = tries = 0
    while not tries or (lonely and tries < TRIES):
        prepare()
        tries += 1
        got, lonely = await _at_once(exam)
        answers += got
    for _ in exam.targets:
        tick()
    void = f"{lonely} requests decoded beside no other" if lonely else None
    return Outcome(answers, f"{2 * len(exam.targets)} at once, each decoding beside others", void)


def _together(a: Answer, b: Answer) -> bool:
    """Whether tokens of two answers came in turn, so that they shared steps."""
    return a.first < b.last and b.first < a.last


async def batch(exam: Exam, tick: Tick) -> Outcome:
    """All targets and as many strangers at once, cold but for what targets have in common."""
    return await _batches(exam, exam.line.forget, tick)


async def _mixed_steps(line: Line, flight: Flight) -> int:
    """Engine steps, seen in the server's counters, that held a prefill while a request decodes."""
    start = last = await line.counters()
    while start and not flight.done:
        await asyncio.sleep(SCRAPE)
        seen = await line.counters()
        if not flight.done:  # the last look may have seen steps after the request's last
            last = seen
    return int(last.wide - start.wide) if start and last else 0


async def company(exam: Exam, tick: Tick) -> Outcome:
    """Strangers arrive at random; their prefills join a target's decode steps."""
    answers: list[tuple[int, Answer]] = []
    lonely = prefills = mixed = 0
    decode = [answer.last - answer.first for answer in exam.reference]
    gap = max(SHORTEST_GAP, sum(decode) / len(decode) / ARRIVALS)
    draw = exam.supply.random

    def stranger() -> Prompt:
        return exam.supply.stranger(draw.randint(1, 3))

    async with poisson(exam.line, draw, gap, stranger) as strangers:
        for i, target in enumerate(exam.targets):
            joined = tries = 0
            while not joined and tries < TRIES:
                exam.line.forget()
                tries += 1
                flight = exam.line.send(target)
                await flight.reach(1)
                if tries > 1:  # nobody came in time by chance
                    strangers.append(exam.line.send(exam.supply.stranger(1, 65), apart=True))
                mixed += await _mixed_steps(exam.line, flight)
                answer = await flight.answer()
                answers.append((i, answer))  # every try counts
                joined = sum(_joined(answer, other) for other in strangers)
            lonely += joined == 0
            prefills += joined
            tick()
    void = f"no prefill joined {lonely} of the requests" if lonely else None
    steps = f", {mixed} mixed steps counted" if mixed else ""
    return Outcome(answers, f"{prefills} prefills joined{steps}", void)


def _joined(answer: Answer, other: Flight) -> bool:
    """Whether another request was sent and prefilled between an answer's first token and its last."""
    return answer.first < other.sent and bool(other.arrivals) and other.arrivals[0] < answer.last


async def cut(exam: Exam, tick: Tick) -> Outcome:
    """Others decode, or prefill, throughout a target's prefill and take from its budget.

    Alone, a target's chunks end where the budget does.  With a single other row in the step the
    budget's last grid step no longer fits, so every chunk ends elsewhere.
    """
    answers: list[tuple[int, Answer]] = []
    uncut = 0
    for n, i in enumerate(_cut_by_budget(exam)):
        shared, tries = False, 0
        while not shared and tries < TRIES:
            tries += 1
            answer, shared = await _ask_beside(exam, i, n)
            answers.append((i, answer))  # every try counts
        uncut += not shared
        tick()
    void = f"{uncut} requests had the whole budget of {exam.geometry.budget}" if uncut else None
    return Outcome(answers, f"{len(answers)} prefills, each step shared", void)


async def _ask_beside(exam: Exam, i: int, n: int) -> tuple[Answer, bool]:
    """Ask target ``i`` beside others, of another number for each ``n``.  Did they last all its prefill?"""
    exam.line.forget()
    long_lived = [exam.supply.stranger(LONG_LIFE, length) for length in STRANGER_LENGTHS[: 1 + n % 3]]
    async with exam.line.company(long_lived) as others:
        # Every other time a stranger's prefill is ahead in the queue too, and ends mid-step.
        ahead = [exam.line.send(exam.supply.stranger(1, 600), apart=True)] if n % 2 else []
        answer = await exam.line.ask(exam.targets[i])
        for other in others:
            if not other.done:
                await other.reach(len(other.arrivals) + 1)
        shared = all(o.arrivals[0] <= answer.sent and answer.first <= o.arrivals[-1] for o in others)
        for flight in ahead:
            await flight.answer()
    return answer, shared


def _cut_by_budget(exam: Exam) -> list[int]:
    budget = exam.geometry.budget or exam.geometry.max_len
    return [i for i, target in enumerate(exam.targets) if len(target.tokens) > budget]


def _no_budget(exam: Exam) -> str | None:
    if exam.geometry.budget is None:
        return "the server does not tell its budget (--budget)"
    return None if _cut_by_budget(exam) else f"no prompt fits that is longer than {exam.geometry.budget}"


def _need_hits(exam: Exam, outcome: Outcome, counted: float, *, all_must: bool = True) -> Outcome:
    """Void the outcome unless there were hits.

    Args:
        exam: the exam.
        outcome: of the axis.
        counted: hit tokens by the server's own counter, for a server that does not say for each.
        all_must: every prompt longer than a unit must hit, not just any.

    """
    if all(answer.cached is None for _, answer in outcome.answers):
        void = None if counted else "no hit seen; does the server run with --enable-prompt-tokens-details?"
        return replace(outcome, proof=f"{counted:,.0f} hit tokens counted", void=outcome.void or void)
    unit = exam.geometry.unit or max(len(target.tokens) for target in exam.targets) - 1
    long = [a for i, a in outcome.answers if len(exam.prompts[i].tokens) > unit]
    misses = sum(not answer.cached for answer in long)
    failed = misses if all_must else misses == len(long)
    void = f"{misses} of {len(long)} requests did not hit the cache" if failed or not long else None
    proof = _hits(outcome.answers)
    return replace(outcome, proof=proof, void=outcome.void or void)


async def _hit_tokens(line: Line) -> float:
    counters = await line.counters()
    return counters.hits if counters else 0.0


async def shared_hit(exam: Exam, tick: Tick) -> Outcome:
    """Each target hits what another request, its beginning, left in the cache."""
    answers, before = [], await _hit_tokens(exam.line)
    for i, target in enumerate(exam.targets):
        exam.line.forget()
        if len(primer := exam.supply.primer(target).tokens):
            await exam.line.ask(Prompt(primer, 1))
            answers.append((i, await exam.line.ask(target)))
        tick()
    counted = await _hit_tokens(exam.line) - before
    return _need_hits(exam, Outcome(answers, ""), counted, all_must=False)


async def own_hit(exam: Exam, tick: Tick) -> Outcome:
    """Each target hits its own prompt, as far as the server allows."""
    answers, before = [], await _hit_tokens(exam.line)
    for i, target in enumerate(exam.targets):
        exam.line.forget()
        await exam.line.ask(replace(target, max_tokens=1))
        answers.append((i, await exam.line.ask(target)))
        tick()
    return _need_hits(exam, Outcome(answers, ""), await _hit_tokens(exam.line) - before)


async def hit_in_batch(exam: Exam, tick: Tick) -> Outcome:
    """All targets hit a warm cache at once, among strangers."""
    exam.line.forget()
    for target in exam.targets:
        await exam.line.ask(replace(target, max_tokens=1))
    before = await _hit_tokens(exam.line)
    outcome = await _batches(exam, lambda: None, tick)
    return _need_hits(exam, outcome, await _hit_tokens(exam.line) - before)


async def aborted(exam: Exam, tick: Tick) -> Outcome:
    """Each target is given up in the middle of its answer, others come, and it is asked again."""
    answers, late = [], 0
    for i, target in enumerate(exam.targets):
        exam.line.forget()
        longer = min(LONG_LIFE, exam.geometry.max_len - len(target.tokens))
        flight = exam.line.send(replace(target, max_tokens=longer))
        await flight.reach(target.max_tokens // 2)
        late += len(flight.arrivals) == longer
        await flight.hang_up()
        await exam.line.ask(exam.supply.stranger(1))
        answers.append((i, await exam.line.ask(target)))
        tick()
    void = f"{late} requests ended before they could be given up" if late else None
    return Outcome(answers, f"{len(answers) - late} aborted, then {_hits(answers)}", void)


async def next_turn(exam: Exam, tick: Tick) -> Outcome:
    """A conversation's second turn, on what its first left in the cache."""
    answers, before = [], await _hit_tokens(exam.line)
    for n, (i, prompt) in enumerate(exam.turns):
        exam.line.forget()
        await exam.line.ask(exam.targets[i])
        # Twice: the first time finds states of prompts, and only the second keys and values of decode.
        for _ in range(2):
            answers.append((len(exam.targets) + n, await exam.line.ask(prompt)))
        tick()
    counted = await _hit_tokens(exam.line) - before
    return _need_hits(exam, Outcome(answers, ""), counted, all_must=False)


def _no_turns(exam: Exam) -> str | None:
    return None if exam.turns else "no prompt ends one token below an edge"


REFERENCE = Axis("(reference)", "alone, cold, one at a time", alone)

# In this order on one server, after `alone` has given the reference.
AXES = (
    Axis("batch", "cold, all at once, among strangers", batch),
    Axis("company", "cold, prefills of strangers join the decode", company),
    Axis("cut", "cold, load forces other chunk ends", cut, _no_budget),
    Axis("hit, shared", "warm, alone, on a request with the same beginning", shared_hit),
    Axis("hit, own", "warm, alone, on the whole prompt", own_hit),
    Axis("hit, in a batch", "warm, all at once, among strangers", hit_in_batch),
    Axis("history, aborted", "given up while it decoded, then asked again", aborted),
    Axis("history, next turn", "a later turn, on what the turn before left", next_turn, _no_turns),
    Axis("history, again", "cold again, at the end of everything", again),
)
