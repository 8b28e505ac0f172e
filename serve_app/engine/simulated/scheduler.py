"""Which sequences of the simulated engine run in a step, and when the step ends. Pure: the time is an argument.

Continuous batching as in vLLM: one token per running sequence and step, chunked prefill in the same step, KV allocated
as a sequence grows, and recompute preemption of the highest rank when KV runs out. Rank is (priority, arrival).

Invariant: at most `slots` sequences run, with at most `kv_tokens` of KV; the waiting sequence of lowest rank is
admitted first, so no later arrival overtakes within a priority; a cancelled sequence holds nothing from that moment.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from dataclasses import dataclass, field

PREFILL_CHUNK_TOKENS = 2048  # per step; 0.1 s at the default rate, so that a long prompt does not stop all streams
CATCH_UP_S = 0.05  # a caller late by less keeps the mean rate of steps; after a longer pause there is no burst


class SequenceState(enum.Enum):
    """The state of a sequence."""

    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence of a request. The scheduler owns every field but the first three, and `produced` from `add` on
    (above 0: another engine has produced these). Counts are in tokens."""

    prompt_tokens: int
    max_tokens: int  # of output; 0: prefill only
    priority: int = 0  # lower runs sooner, as in vLLM
    order: int = -1  # arrival number
    state: SequenceState = SequenceState.NEW
    produced: int = 0
    computed: int = 0  # of prompt and output, since its last admission
    kv: int = 0
    chunk: int = 0  # computed by the step in flight

    @property
    def total(self) -> int:
        return self.prompt_tokens + self.produced


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.priority, sequence.order


@dataclass(slots=True, kw_only=True, eq=False)
class SimulatedScheduler:
    """A batch of an engine, step by step.

    Args:
        slots: sequences one step runs.
        kv_tokens: KV cache size.
        prefill_tokens_per_s: rate at which a step computes prompt tokens.
        decode_step_s: duration of a step without its prefill.
        sequence_step_s: added to a step by each running sequence, for reading its KV cache.
        prefill_chunk_tokens: the most prompt tokens of one step, besides one for each running sequence.
    """

    slots: int
    kv_tokens: int
    prefill_tokens_per_s: float
    decode_step_s: float
    sequence_step_s: float = 0.0
    prefill_chunk_tokens: int = PREFILL_CHUNK_TOKENS
    running: list[Sequence] = field(default_factory=list, init=False)  # both lists in order of rank
    waiting: list[Sequence] = field(default_factory=list, init=False)
    due: float | None = field(default=None, init=False)  # when to call `advance` next; None: idle
    kv_used: int = field(default=0, init=False)
    steps: int = field(default=0, init=False)
    generated_tokens: int = field(default=0, init=False)
    prompt_tokens: int = field(default=0, init=False)
    prefilled_tokens: int = field(default=0, init=False)  # at each admission, those produced elsewhere too
    preemptions: int = field(default=0, init=False)
    sequence_steps: int = field(default=0, init=False)  # the sequences of all steps, added up
    _arrivals: int = field(default=0, init=False)
    _in_step: bool = field(default=False, init=False)

    def add(self, sequence: Sequence, now: float) -> None:
        """Add a new sequence, which waits for a slot.

        Raises:
            ValueError: it is not new, has no prompt, or would not fit into an empty KV cache.
        """
        if sequence.state is not SequenceState.NEW:
            raise ValueError(f"the sequence is {sequence.state.value} already")
        if sequence.prompt_tokens < 1 or sequence.max_tokens < 0:
            raise ValueError(f"{sequence.prompt_tokens} prompt and {sequence.max_tokens} output tokens")
        if sequence.prompt_tokens + sequence.max_tokens > self.kv_tokens:
            raise ValueError(f"{sequence.prompt_tokens + sequence.max_tokens} tokens, the cache has {self.kv_tokens}")
        sequence.order = self._arrivals
        sequence.state = SequenceState.WAITING
        self._arrivals += 1
        insort(self.waiting, sequence, key=_rank)
        if self.due is None:
            self.due = now

    def cancel(self, sequence: Sequence) -> None:
        """Remove a waiting or running sequence; one that has ended changes nothing."""
        if sequence.state is SequenceState.WAITING:
            del self.waiting[bisect_left(self.waiting, _rank(sequence), key=_rank)]
        elif sequence.state is SequenceState.RUNNING:
            self._leave(sequence)
        sequence.state = SequenceState.DONE

    def advance(self, now: float) -> list[Sequence]:
        """End the step in flight if it is due, and begin the next one.

        Returns:
            The sequences that produced a token or ended; empty if the step is not due yet.
        """
        if self.due is None or now < self.due:
            return []
        start = self.due if now - self.due <= CATCH_UP_S else now
        moved = self._end_step() if self._in_step else []
        prefill = self._admit(self._continue_running())
        self._in_step = bool(self.running)
        step_s = self.decode_step_s + len(self.running) * self.sequence_step_s
        self.due = start + step_s + prefill / self.prefill_tokens_per_s if self._in_step else None
        return moved

    def _continue_running(self) -> int:
        """Plan the running sequences' tokens; returns the prefill tokens among them."""
        prefill = 0
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            grows = sequence.total - sequence.kv
            while self.kv_used + grows > self.kv_tokens and sequence.state is SequenceState.RUNNING:
                self._preempt(self.running[-1])
            if sequence.state is not SequenceState.RUNNING:
                break  # it preempted itself, as the last in rank
            sequence.kv += grows
            self.kv_used += grows
            prefill += self._plan(sequence, prefill)
            index += 1
        return prefill

    def _admit(self, prefill: int) -> int:
        """Move waiting sequences into free slots while their prompts fit; returns the step's prefill tokens."""
        while self.waiting and len(self.running) < self.slots:
            sequence = self.waiting[0]
            if self.kv_used + sequence.total > self.kv_tokens:
                break  # later sequences must not overtake it
            del self.waiting[0]
            if not sequence.produced:
                self.prompt_tokens += sequence.prompt_tokens
            self.prefilled_tokens += sequence.total
            sequence.state = SequenceState.RUNNING
            sequence.kv = sequence.total
            self.kv_used += sequence.kv
            insort(self.running, sequence, key=_rank)
            prefill += self._plan(sequence, prefill)
        return prefill

    def _plan(self, sequence: Sequence, prefill: int) -> int:
        """Set the sequence's tokens in this step; returns those that count as prefill, all but one."""
        extra = min(sequence.total - sequence.computed - 1, self.prefill_chunk_tokens - prefill)
        sequence.chunk = 1 + extra
        return extra

    def _end_step(self) -> list[Sequence]:
        self.steps += 1
        self.sequence_steps += len(self.running)
        moved = []
        for sequence in self.running:
            sequence.computed += sequence.chunk
            if sequence.computed == sequence.prompt_tokens + sequence.produced:
                if sequence.max_tokens:
                    sequence.produced += 1
                    self.generated_tokens += 1
                moved.append(sequence)
        for sequence in moved:
            if sequence.produced == sequence.max_tokens:
                self._leave(sequence)
                sequence.state = SequenceState.DONE
        return moved

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self._leave(sequence)
        sequence.state = SequenceState.WAITING
        insort(self.waiting, sequence, key=_rank)

    def _leave(self, sequence: Sequence) -> None:
        del self.running[bisect_left(self.running, _rank(sequence), key=_rank)]
        self.kv_used -= sequence.kv
        sequence.kv = sequence.computed = sequence.chunk = 0
