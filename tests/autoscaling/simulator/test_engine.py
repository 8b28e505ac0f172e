"""The engine that jumps gives the first tokens and ends of the one that takes each step."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaling.simulator.engine import SimulatedBatch, SimulatedSequence
from autoscaling.simulator.profiles import EngineProfile
from serve_app.engine.simulated.scheduler import Sequence, SequenceState, SimulatedScheduler
from tests.effort import examples

# Binary fractions: sums of steps are then exact, whether they are added one by one or multiplied.
STEP_S = 1 / 64
SEQUENCE_S = 1 / 1024
PREFILL = 4096.0
CHUNK = 32
PROFILE = EngineProfile("p", "of the tests", 4, 200, STEP_S, SEQUENCE_S, 0.0, PREFILL, 1.0, prefill_chunk_tokens=CHUNK)


@dataclass(frozen=True)
class Wish:
    """A request: when it comes, what it is, and when its client leaves."""

    at: int  # in 1/2048 s
    prompt: int
    output: int
    priority: int
    leaves_after: int | None

    @property
    def at_s(self) -> float:
        return self.at / 2048

    @property
    def leaves_s(self) -> float | None:
        return None if self.leaves_after is None else (self.at + self.leaves_after) / 2048


WISHES = st.lists(
    st.builds(
        Wish,
        at=st.integers(0, 2000),
        prompt=st.integers(1, 90),
        output=st.integers(1, 60),
        priority=st.integers(0, 1),
        leaves_after=st.none() | st.integers(0, 1500),
    ),
    min_size=1,
    max_size=14,
)
Moments = dict[int, tuple[float | None, float | None]]  # by wish: first token and end


def events(wishes: list[Wish]) -> list[tuple[float, int, int]]:
    """Arrivals and departures: the moment, 0 or 1, the wish."""
    found = [(wish.at_s, 0, at) for at, wish in enumerate(wishes)]
    found += [(wish.leaves_s, 1, at) for at, wish in enumerate(wishes) if wish.leaves_s is not None]
    heapq.heapify(found)
    return found


def stepped(wishes: list[Wish], profile: EngineProfile) -> tuple[Moments, int]:
    """By the scheduler, one step after the other."""
    engine = SimulatedScheduler(
        slots=profile.slots,
        kv_tokens=profile.kv_tokens,
        prefill_tokens_per_s=profile.prefill_tokens_per_s,
        decode_step_s=profile.step_s,
        sequence_step_s=profile.sequence_s,
        prefill_chunk_tokens=profile.prefill_chunk_tokens,
    )

    def make(wish: Wish) -> Sequence:
        return Sequence(wish.prompt, wish.output, wish.priority)

    return played(
        wishes,
        engine,
        make,
        lambda sequence, _: engine.cancel(sequence),
        lambda sequence: sequence.state is SequenceState.DONE,
        profile.kv_tokens,
    )


def jumped(wishes: list[Wish], profile: EngineProfile) -> tuple[Moments, int]:
    """By the engine that jumps."""
    engine = SimulatedBatch(profile)

    def make(wish: Wish) -> SimulatedSequence:
        return SimulatedSequence(wish.prompt, wish.output, wish.priority)

    return played(wishes, engine, make, engine.cancel, lambda sequence: sequence.has_ended, profile.kv_tokens)


def played(
    wishes: list[Wish],
    engine: Any,
    make: Callable[[Wish], Any],
    cancel: Callable[[Any, float], Any],
    has_ended: Callable[[Any], bool],
    kv_tokens: int,
) -> tuple[Moments, int]:
    """All wishes on one of the two engines, and its preemptions."""
    found: Moments = dict.fromkeys(range(len(wishes)), (None, None))
    sequences: dict[int, Any] = {}
    left = events(wishes)
    while left or engine.due is not None:
        now = min(left[0][0] if left else float("inf"), float("inf") if engine.due is None else engine.due)
        while left and left[0][0] == now:
            _, leaves, at = heapq.heappop(left)
            if leaves:
                cancel(sequences[at], now)
            else:
                sequences[at] = make(wishes[at])
                engine.add(sequences[at], now)
        moved = engine.advance(now)
        for at, sequence in sequences.items():
            if sequence in moved:
                first, _ = found[at]
                found[at] = (now if first is None else first, now if has_ended(sequence) else None)
        assert engine.kv_used <= kv_tokens
    return found, engine.preemptions


@settings(max_examples=examples(300))
@given(WISHES)
def test_a_jump_ends_as_its_steps_do(wishes: list[Wish]) -> None:
    assert jumped(wishes, PROFILE) == stepped(wishes, PROFILE)


def test_a_jump_takes_as_long_as_steps_that_read_a_growing_cache() -> None:
    profile = replace(PROFILE, kv_token_s=1 / 65536)
    engine = SimulatedBatch(profile)
    sequence = SimulatedSequence(10, 50)
    engine.add(sequence, 0.0)
    engine.advance(0.0)
    assert engine.due is not None
    first_s = STEP_S + SEQUENCE_S + 10 / 65536 + 9 / PREFILL
    assert engine.due == pytest.approx(first_s)
    engine.advance(engine.due)
    assert engine.due == pytest.approx(first_s + sum(STEP_S + SEQUENCE_S + kv / 65536 for kv in range(11, 60)))
    for step in range(1, 49):
        begun_s = first_s + sum(STEP_S + SEQUENCE_S + kv / 65536 for kv in range(11, 11 + step))
        assert engine.produced(sequence, begun_s + 1e-4) == 1 + step


def test_a_sequence_is_reported_at_its_mark_and_at_marks_that_are_set_then() -> None:
    engine = SimulatedBatch(PROFILE)
    sequence = SimulatedSequence(5, 40, mark=10)
    engine.add(sequence, 0.0)
    reported = []
    while not sequence.has_ended:
        now = engine.due or 0.0
        if engine.advance(now):
            reported.append(engine.produced(sequence, now) if not sequence.has_ended else sequence.produced)
            if reported[-1] == 10:
                engine.set_mark(sequence, 13)
    assert reported == [1, 10, 13, 40]


@pytest.mark.parametrize(("prompt", "output"), [(0, 5), (5, 0), (150, 60)])
def test_a_sequence_that_no_engine_could_run_is_refused_and_changes_nothing(prompt: int, output: int) -> None:
    engine = SimulatedBatch(PROFILE)
    with pytest.raises(ValueError, match="tokens"):
        engine.add(SimulatedSequence(prompt, output), 0.0)
    assert engine.due is None
