"""The batch of one simulated engine, which jumps from change to change instead of step by step.

The model is that of `serve_app.engine.simulated.scheduler`: one token for each running sequence and step, chunked
prefill in the same step, KV that grows with a sequence, recompute preemption of the highest rank (priority, arrival)
when KV runs out; and a cache of prefixes (`prefix_cache`), whose tokens need no prefill. A step takes `step_s`,
`sequence_s` for each sequence, `kv_token_s` for each token of their KV, and the time of its prefill.

Rules
- While all running sequences decode, nothing changes until one reaches its end or mark, or until KV runs out: these
  steps are one jump, whose duration is a sum in closed form.
- A sequence that arrives, and could be admitted, ends the jump at the end of the step in flight.
- Steps with prefill are taken one by one: a prompt needs one for each chunk.

Invariant: the tests compare every first token and every end with the scheduler that takes each step.
Invariant: `kv_used` is the sum over the running sequences, and at most `kv_tokens` when a step begins.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from autoscaling.simulator.prefix_cache import PrefixCache
from autoscaling.simulator.profiles import EngineProfile

NEVER = 1 << 62  # tokens: a mark that no sequence reaches


@dataclass(slots=True, eq=False)
class SimulatedSequence:
    """One sequence. The engine owns every field but the first four from `add` on; counts are in tokens.

    Args:
        max_tokens: of output, those of earlier runs included.
        priority: lower runs sooner, as in vLLM.
        produced: of output; above 0 at `add`: another engine has produced these.
        mark: the engine reports the sequence when it has produced so many.
        prefix_blocks: of its prompt, see `SimulatedRequest`.
        request: by which a run is known that goes on with a stopped one; empty: none will.
    """

    prompt_tokens: int
    max_tokens: int
    priority: int = 0
    produced: int = 0
    mark: int = NEVER
    prefix_blocks: tuple[str, ...] = ()
    request: str = ""
    order: int = -1  # arrival number
    computed: int = 0  # of prompt and earlier output, while it is prefilled
    chunk: int = 0  # of these, in the step in flight
    is_running: bool = False
    decodes_since: int = -1  # the engine's step from which on it decodes; -1: it does not
    report: int = -1  # the number of its next report; -1: none is planned
    has_ended: bool = False

    @property
    def rank(self) -> tuple[int, int]:
        return self.priority, self.order


def _rank(sequence: SimulatedSequence) -> tuple[int, int]:
    return sequence.priority, sequence.order


@dataclass(slots=True)
class _Jump:
    """Steps in flight: `steps` of them from `began_s` on. The first one takes `first_s`, each later one `more_s` more
    than the one before it."""

    began_s: float
    steps: int
    first_s: float
    more_s: float

    def end_of(self, step: int) -> float:
        """When so many steps have ended."""
        return self.began_s + step * self.first_s + self.more_s * (step * (step - 1) // 2)

    def in_flight(self, now: float) -> int:
        """The number, from 1, of the step that ends now or next."""
        elapsed_s = now - self.began_s
        if self.more_s:
            half = self.first_s - self.more_s / 2
            guess = (math.sqrt(half * half + 2 * self.more_s * max(0.0, elapsed_s)) - half) / self.more_s
        else:
            guess = elapsed_s / self.first_s
        step = min(self.steps, max(1, math.ceil(guess)))
        while step > 1 and self.end_of(step - 1) >= now:
            step -= 1
        while step < self.steps and self.end_of(step) < now:
            step += 1
        return step


@dataclass(slots=True, eq=False)
class SimulatedBatch:
    """The sequences of one engine.

    Every method is O(log sequences) for each change, and O(sequences in prefill) for each step that has some.
    """

    profile: EngineProfile
    running: list[SimulatedSequence] = field(default_factory=list, init=False)  # both lists in order of rank
    waiting: list[SimulatedSequence] = field(default_factory=list, init=False)
    kv_used: int = field(default=0, init=False)
    preemptions: int = field(default=0, init=False)
    cached_tokens: int = field(default=0, init=False)  # of prompts, that were not computed
    _prefixes: PrefixCache = field(init=False)
    _due: float | None = field(default=None, init=False)
    _jump: _Jump | None = field(default=None, init=False)
    _steps: int = field(default=0, init=False)  # that have ended
    _prefilling: list[SimulatedSequence] = field(default_factory=list, init=False)  # in order of rank
    # Ends and marks: the step, a number, the sequence. A sequence has one of these, by `report`; others are outdated.
    _reports: list[tuple[int, int, SimulatedSequence]] = field(default_factory=list, init=False)
    _numbers: int = field(default=0, init=False)  # of reports
    _arrivals: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._prefixes = PrefixCache(self.profile.kv_tokens if self.profile.prefix_cache else 0)

    @property
    def due(self) -> float | None:
        """When to call `advance` next; None: the engine is idle."""
        return self._due

    def add(self, sequence: SimulatedSequence, now: float) -> None:
        """Add a new sequence, which waits for a slot.

        Raises:
            ValueError: it would not fit into an empty KV cache, or has nothing to compute or to produce.
        """
        if sequence.prompt_tokens < 1 or sequence.max_tokens <= sequence.produced:
            raise ValueError(f"{sequence.prompt_tokens} prompt and {sequence.max_tokens} output tokens")
        if sequence.prompt_tokens + sequence.max_tokens > self.profile.kv_tokens:
            raise ValueError(f"{sequence.prompt_tokens + sequence.max_tokens} tokens, {self.profile.kv_tokens} fit")
        sequence.order = self._arrivals
        self._arrivals += 1
        insort(self.waiting, sequence, key=_rank)
        self._end_jump_for_waiting(now)

    def cancel(self, sequence: SimulatedSequence, now: float) -> None:
        """Remove a waiting or running sequence, which holds nothing from now on; one that has ended changes nothing."""
        if sequence.has_ended:
            return
        if sequence.is_running:
            self._settle(now)
            is_decoding = sequence.decodes_since >= 0
            computed = sequence.computed
            self._leave(sequence)
            if sequence.request and self.profile.prefix_cache:
                whole = sequence.prompt_tokens + sequence.produced
                self._prefixes.keep(sequence.request, whole if is_decoding else computed)
        else:
            del self.waiting[bisect_left(self.waiting, sequence.rank, key=_rank)]
        sequence.has_ended = True
        self._end_jump_for_waiting(now)

    def set_mark(self, sequence: SimulatedSequence, mark: int) -> None:
        """Report a sequence when it has produced so many tokens; call it as soon as `advance` has reported it."""
        sequence.mark = mark
        if sequence.decodes_since < 0:
            return
        left = self._plan_report(sequence) - self._steps
        if self._jump is not None and left < self._jump.steps:
            self._jump.steps = left
            self._due = self._jump.end_of(left)

    def produced(self, sequence: SimulatedSequence, now: float) -> int:
        """The output tokens of a sequence by now, with those of earlier runs."""
        if sequence.decodes_since < 0:
            return sequence.produced
        steps = self._steps
        if self._jump is not None:
            steps += self._jump.in_flight(now) - 1
        return sequence.produced + steps - sequence.decodes_since

    def advance(self, now: float) -> list[SimulatedSequence]:
        """End the steps in flight if they are due, and begin the next ones.

        Returns:
            The sequences that have produced their first token here, reached their mark or ended; of the latter
            `has_ended` is set. Empty if nothing is due.
        """
        if self._due is None or now < self._due:
            return []
        start_s = self._due
        moved: list[SimulatedSequence] = []
        if self._jump is not None:
            moved = self._end_steps(self._jump.steps)
            self._jump = None
        self._preempt_for_kv()
        prefill = self._plan_prefill()
        if not self.running:
            self._due = None
            return moved
        profile = self.profile
        count = len(self.running)
        step_s = profile.step_s + count * profile.sequence_s + self.kv_used * profile.kv_token_s
        if self._prefilling:
            steps = 1
            step_s += prefill / profile.prefill_tokens_per_s
        else:
            until_kv = (profile.kv_tokens - self.kv_used) // count + 1
            steps = min(self._next_report() - self._steps, until_kv)
        self._jump = _Jump(start_s, steps, step_s, count * profile.kv_token_s)
        self._due = self._jump.end_of(steps)
        return moved

    # Inside

    def _end_jump_for_waiting(self, now: float) -> None:
        """If the first that waits could be admitted, look again as soon as the step in flight ends."""
        if self._jump is None:
            if self.waiting and self._due is None:
                self._due = now
        elif self._jump.steps > 1 and self._may_admit():
            self._jump.steps = self._jump.in_flight(now)
            self._due = self._jump.end_of(self._jump.steps)

    def _may_admit(self) -> bool:
        if not self.waiting or len(self.running) >= self.profile.slots:
            return False
        first = self.waiting[0]
        return self.kv_used + first.prompt_tokens + first.produced <= self.profile.kv_tokens

    def _settle(self, now: float) -> None:
        """End the steps that are over, so that one is in flight, whose duration stays."""
        jump = self._jump
        if jump is None or jump.steps == 1:
            return
        step = jump.in_flight(now)
        began_s = jump.end_of(step - 1)
        ends_s = jump.end_of(step)
        self._end_steps(step - 1)
        self._jump = _Jump(began_s, 1, ends_s - began_s, 0.0)
        self._due = ends_s

    def _end_steps(self, steps: int) -> list[SimulatedSequence]:
        """So many steps have ended; returns the sequences that are to be reported."""
        self._steps += steps
        self.kv_used += steps * (len(self.running) - len(self._prefilling))
        moved = [sequence for sequence in self._prefilling if self._end_chunk(sequence)]
        if moved:
            self._prefilling = [sequence for sequence in self._prefilling if sequence.decodes_since < 0]
        reports = self._reports
        while reports and reports[0][0] <= self._steps:
            _, number, sequence = heapq.heappop(reports)
            if number == sequence.report:
                moved.append(sequence)
        for sequence in moved:
            produced = sequence.produced + self._steps - sequence.decodes_since
            if produced >= sequence.max_tokens:
                self._leave(sequence)
                sequence.has_ended = True
            else:
                sequence.mark = sequence.mark if sequence.mark > produced else NEVER
                self._plan_report(sequence)
        return moved

    def _end_chunk(self, sequence: SimulatedSequence) -> bool:
        """A step with a chunk of a prompt has ended; returns whether the sequence has produced a token by it."""
        sequence.computed += sequence.chunk
        if sequence.computed < sequence.prompt_tokens + sequence.produced:
            return False
        sequence.produced += 1
        self.kv_used += 1
        sequence.decodes_since = self._steps
        return True

    def _plan_report(self, sequence: SimulatedSequence) -> int:
        """Plan the report of a decoding sequence; returns the step at whose end it is."""
        step = sequence.decodes_since + min(sequence.mark, sequence.max_tokens) - sequence.produced
        self._numbers += 1
        sequence.report = self._numbers
        heapq.heappush(self._reports, (step, self._numbers, sequence))
        return step

    def _next_report(self) -> int:
        """The step at whose end the next decoding sequence is reported."""
        reports = self._reports
        while reports[0][1] != reports[0][2].report:
            heapq.heappop(reports)
        return reports[0][0]

    def _preempt_for_kv(self) -> None:
        while self.kv_used > self.profile.kv_tokens:
            last = self.running[-1]
            self.preemptions += 1
            self._leave(last)
            insort(self.waiting, last, key=_rank)

    def _plan_prefill(self) -> int:
        """Give the prefilling sequences their chunks, and admit waiting ones; returns the step's prefill tokens."""
        prefill = 0
        for sequence in self._prefilling:
            prefill += self._plan(sequence, prefill)
        while self._may_admit():
            sequence = self.waiting.pop(0)
            sequence.is_running = True
            self.kv_used += sequence.prompt_tokens + sequence.produced
            insort(self.running, sequence, key=_rank)
            insort(self._prefilling, sequence, key=_rank)
            if sequence.prefix_blocks or sequence.request:
                self._find_prefix(sequence)
            prefill += self._plan(sequence, prefill)
        return prefill

    def _find_prefix(self, sequence: SimulatedSequence) -> None:
        """Skip what the cache has of a prompt, and keep the rest from now on."""
        blocks = sequence.prefix_blocks
        known = min(self._prefixes.cached_tokens(blocks), sequence.prompt_tokens)
        known = max(known, self._prefixes.take(sequence.request))
        sequence.computed = min(known, sequence.prompt_tokens + sequence.produced - 1)
        self.cached_tokens += sequence.computed
        self._prefixes.add(blocks)

    def _plan(self, sequence: SimulatedSequence, prefill: int) -> int:
        """Set a sequence's tokens in this step; returns those that count as prefill, all but one."""
        left = sequence.prompt_tokens + sequence.produced - sequence.computed
        extra = min(left - 1, self.profile.prefill_chunk_tokens - prefill)
        sequence.chunk = 1 + extra
        return extra

    def _leave(self, sequence: SimulatedSequence) -> None:
        """A running sequence leaves with what it has produced."""
        del self.running[bisect_left(self.running, sequence.rank, key=_rank)]
        if sequence.decodes_since >= 0:
            sequence.produced += self._steps - sequence.decodes_since
            sequence.decodes_since = -1
        else:
            del self._prefilling[bisect_left(self._prefilling, sequence.rank, key=_rank)]
        self.kv_used -= sequence.prompt_tokens + sequence.produced
        sequence.computed = sequence.chunk = 0
        sequence.report = -1
        sequence.is_running = False
