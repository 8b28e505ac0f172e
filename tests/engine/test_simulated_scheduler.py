"""The simulated engine's batch: slots, KV and order, in made-up time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.engine.simulated.scheduler import Sequence, SequenceState, SimulatedScheduler
from tests.effort import examples


def scheduler(**changes: Any) -> SimulatedScheduler:
    """Two slots, 100 tokens of KV, 1,000 prompt tokens/s, steps of 10 ms."""
    base = {"slots": 2, "kv_tokens": 100, "prefill_tokens_per_s": 1000.0, "decode_step_s": 0.01}
    return SimulatedScheduler(**(base | changes))


def run_to_end(batch: SimulatedScheduler) -> list[tuple[float, Sequence, int]]:
    """Every token as (time, sequence, tokens so far), each step at the moment it is due."""
    reported = []
    while batch.due is not None:
        now = batch.due
        reported += [(now, sequence, sequence.produced) for sequence in batch.advance(now)]
    return reported


def test_first_token_follows_the_prefill_and_the_others_a_step_each() -> None:
    batch = scheduler()
    sequence = Sequence(prompt_tokens=51, max_tokens=3)
    batch.add(sequence, now=5.0)
    times = [time for time, _, _ in run_to_end(batch)]
    assert times == pytest.approx([5.06, 5.07, 5.08])  # a step of 10 ms, and 50 tokens beside it at 1,000 a second
    assert sequence.state is SequenceState.DONE
    assert (batch.steps, batch.generated_tokens, batch.prompt_tokens, batch.kv_used) == (3, 3, 51, 0)


def test_each_running_sequence_lengthens_a_step() -> None:
    batch = scheduler(sequence_step_s=0.002)
    batch.add(Sequence(prompt_tokens=1, max_tokens=1), now=5.0)
    batch.add(Sequence(prompt_tokens=1, max_tokens=2), now=5.0)
    assert [time for time, _, _ in run_to_end(batch)] == pytest.approx([5.014, 5.014, 5.026])


def test_prefill_alone_ends_without_a_token() -> None:
    batch = scheduler()
    sequence = Sequence(prompt_tokens=51, max_tokens=0)
    batch.add(sequence, now=0.0)
    assert run_to_end(batch) == [(pytest.approx(0.06), sequence, 0)]
    assert batch.generated_tokens == 0


def test_long_prompt_is_prefilled_in_chunks_beside_running_streams() -> None:
    batch = scheduler(prefill_chunk_tokens=20)
    talking = Sequence(1, 10)
    long = Sequence(80, 1)
    batch.add(talking, now=0.0)
    batch.advance(0.0)
    batch.add(long, now=0.0)
    reported = run_to_end(batch)
    steps = [time for time, sequence, _ in reported if sequence is talking]
    gaps = [later - earlier for earlier, later in pairwise(steps)]
    assert max(gaps) <= 0.01 + 20 / 1000 + 1e-9
    assert [sequence for _, sequence, _ in reported].index(long) > 3  # 80 tokens in chunks of 21


def test_one_that_does_not_fit_holds_back_those_behind_it() -> None:
    batch = scheduler()
    first = Sequence(50, 10)
    large = Sequence(60, 1)
    small = Sequence(5, 1)
    for sequence in (first, large, small):
        batch.add(sequence, now=0.0)
    batch.advance(0.0)
    assert batch.running == [first]
    assert batch.waiting == [large, small]
    assert [s for _, s, n in run_to_end(batch) if n == s.max_tokens] == [first, large, small]


def test_lower_priority_number_is_admitted_sooner_and_never_evicts() -> None:
    batch = scheduler(slots=1)
    running = Sequence(5, 3, 1)
    late = Sequence(5, 1, 1)
    urgent = Sequence(5, 1, 0)
    batch.add(running, now=0.0)
    batch.advance(0.0)
    batch.add(late, now=0.0)
    batch.add(urgent, now=0.0)
    assert [s for _, s, n in run_to_end(batch) if n == s.max_tokens] == [running, urgent, late]
    assert batch.preemptions == 0


def test_without_kv_the_last_in_rank_is_computed_again_and_still_ends() -> None:
    batch = scheduler()
    first = Sequence(40, 50)
    second = Sequence(40, 50)
    batch.add(first, now=0.0)
    batch.add(second, now=0.0)
    reported = run_to_end(batch)
    assert batch.preemptions > 0
    for sequence in (first, second):
        assert [n for _, s, n in reported if s is sequence] == list(range(1, 51))  # each token once
    times = [time for time, sequence, _ in reported if sequence is first]
    assert max(b - a for a, b in pairwise(times)) < 0.1  # the first in rank never starts again
    again, tokens = next((time, n) for time, s, n in reported if s is second and time > times[-1])
    computed = 40 + tokens - 1  # prompt and what was produced before, all of it anew
    assert again == pytest.approx(times[-1] + 0.01 + (computed - 1) / 1000)
    assert batch.prompt_tokens == 80  # counted once, however often computed


@pytest.mark.parametrize("started", [False, True], ids=["waiting", "running"])
def test_a_cancelled_sequence_holds_nothing_from_that_moment(started: bool) -> None:
    batch = scheduler(slots=1 if not started else 2)
    other = Sequence(10, 5)
    cancelled = Sequence(20, 5)
    batch.add(other, now=0.0)
    batch.add(cancelled, now=0.0)
    batch.advance(0.0)
    assert cancelled.state is (SequenceState.RUNNING if started else SequenceState.WAITING)
    batch.cancel(cancelled)
    assert (batch.running, batch.waiting, batch.kv_used) == ([other], [], 10)
    batch.cancel(cancelled)
    assert {s for _, s, _ in run_to_end(batch)} == {other}


@pytest.mark.parametrize(
    "refused", [Sequence(0, 5), Sequence(5, -1), Sequence(90, 11), Sequence(5, 5, state=SequenceState.DONE)], ids=str
)
def test_a_refused_sequence_changes_nothing(refused: Sequence) -> None:
    batch = scheduler()
    with pytest.raises(ValueError, match=r"tokens|already"):
        batch.add(refused, now=0.0)
    assert (batch.waiting, batch.due, refused.order) == ([], None, -1)


def test_nothing_happens_before_a_step_is_due() -> None:
    batch = scheduler()
    assert batch.advance(1.0) == []
    batch.add(Sequence(1, 2), now=1.0)
    batch.advance(1.0)
    due = batch.due
    assert due == pytest.approx(1.01)
    assert batch.advance(1.009) == []
    assert (batch.due, batch.steps) == (due, 0)


def test_a_late_caller_keeps_the_mean_rate_but_gets_no_burst_after_a_pause() -> None:
    batch = scheduler()
    batch.add(Sequence(1, 50), now=0.0)
    batch.advance(0.0)
    batch.advance(0.014)  # 4 ms late
    assert batch.due == pytest.approx(0.02)
    batch.advance(9.0)
    assert batch.due == pytest.approx(9.01)


Operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 40), st.integers(0, 24), st.integers(0, 2)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("advance"), st.floats(0.0, 0.2)),
    ),
    max_size=60,
)


class Watched:
    """A scheduler with the record that its invariants are checked on."""

    def __init__(self, slots: int, chunk: int) -> None:
        self.batch = scheduler(slots=slots, kv_tokens=64, prefill_chunk_tokens=chunk)
        self.sequences: list[Sequence] = []
        self.cancelled: set[Sequence] = set()
        self.admitted: list[Sequence] = []
        self.tokens: dict[Sequence, int] = {}
        self.now = 0.0

    def add(self, prompt: int, output: int, priority: int) -> None:
        self.sequences.append(Sequence(prompt, output, priority))
        self.batch.add(self.sequences[-1], self.now)

    def cancel(self, index: int) -> None:
        if index < len(self.sequences):
            self.cancelled.add(self.sequences[index])
            self.batch.cancel(self.sequences[index])

    def advance(self, elapsed_s: float) -> None:
        self.now += elapsed_s
        line = self.batch.waiting.copy()
        for sequence in self.batch.advance(self.now):
            before = self.tokens.get(sequence, 0)
            assert sequence not in self.cancelled
            assert sequence.produced == (before + 1 if sequence.max_tokens else 0)
            self.tokens[sequence] = sequence.produced
        joined = [s for s in self.batch.running if s in line]
        assert joined == [s for s in line if s in joined] == line[: len(joined)]  # from the head, none skipped
        self.admitted += [s for s in joined if s not in self.admitted]

    def check(self) -> None:
        batch = self.batch
        assert len(batch.running) <= batch.slots
        assert batch.kv_used == sum(s.kv for s in self.sequences) <= batch.kv_tokens
        assert all(s.kv >= s.total - 1 for s in batch.running)
        assert all(s.kv == 0 for s in self.sequences if s.state is not SequenceState.RUNNING)
        ranks = [(s.priority, s.order) for s in batch.waiting]
        assert ranks == sorted(ranks)
        if batch.due is None:
            assert (batch.running, batch.waiting) == ([], [])


@settings(max_examples=examples(300), deadline=None)
@given(operations=Operations, slots=st.integers(1, 4), chunk=st.integers(1, 32))
def test_capacity_holds_order_holds_and_every_sequence_ends(operations: list[Any], slots: int, chunk: int) -> None:
    watched = Watched(slots, chunk)
    for name, *arguments in operations:
        getattr(watched, name)(*arguments)
        watched.check()
    work = sum(s.prompt_tokens + s.max_tokens for s in watched.sequences)
    for _ in range(50 * (work + 1)):  # recomputation after preemption included
        if watched.batch.due is None:
            break
        watched.advance(max(0.0, watched.batch.due - watched.now))
        watched.check()
    assert watched.batch.due is None
    assert all(s.state is SequenceState.DONE for s in watched.sequences)
    ended = [s for s in watched.sequences if s not in watched.cancelled]
    assert all(watched.tokens[s] == s.max_tokens for s in ended)
    for priority in range(3):
        orders = [s.order for s in watched.admitted if s.priority == priority]
        assert orders == sorted(orders)
