"""Random histories: the batcher against the definition applied by brute force, and its invariants."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.batching import PRESETS, Batcher, BatchItem, BatchPolicy, RequestBatch, Sizing
from serve_app.core.estimate import LengthRule
from tests.core.batching.oracle import Oracle
from tests.effort import examples

TICK_S = 0.01  # all times are multiples of it, so that events coincide with the ends of waits


@st.composite
def policies(draw: st.DrawFn) -> BatchPolicy:
    max_wait_s = draw(st.sampled_from([None, 0.0, TICK_S, 5 * TICK_S]))
    sizing = draw(st.sampled_from([one for one in Sizing if max_wait_s is not None or one is not Sizing.ARRIVAL_RATE]))
    return BatchPolicy(
        draw(st.integers(1, 5)),
        max_wait_s,
        draw(st.sampled_from([None, 1, 20, 60])),
        counts_output=draw(st.booleans()),
        by_length=draw(st.booleans()),
        sizing=sizing,
        long_size=draw(st.integers(1, 3)),
        long_from=10,
        weights=draw(st.sampled_from([None, LengthRule(15, 2), LengthRule(10, 3)])),
        is_continuous=draw(st.integers(0, 5)) == 0,
    )


ITEMS = st.tuples(st.integers(0, 8), st.integers(1, 30), st.integers(0, 30), st.integers(1, 12))  # gap, sizes, ticks
CANCELS = st.dictionaries(st.integers(0, 11), st.integers(0, 10), max_size=3)  # item: ticks after its arrival


@dataclass(slots=True)
class History:
    """Plays requests to a batcher and the oracle, tick by tick, as a runner does: `next_due` wakes it."""

    policy: BatchPolicy
    items: list[tuple[int, int, int, int]]
    cancels: dict[int, int]
    started: dict[str, float] = field(default_factory=dict)
    arrived: dict[str, float] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)

    def play(self) -> None:
        batcher = Batcher(self.policy)
        oracle = Oracle(self.policy)
        tick = 0
        arrivals = {}
        for number, (gap, *_) in enumerate(self.items):
            tick += gap
            arrivals.setdefault(tick, []).append(number)
        last, tick = tick, 0
        leaves = {(str(n), at): None for n, at in self.cancels.items() if n < len(self.items)}
        while tick <= last or batcher.running or batcher.waiting:
            now = tick * TICK_S
            for name in [one for one, at in self.ends.items() if at == tick]:
                del self.ends[name]
                self.take(batcher.on_end(name, now), oracle.on_end(name, now), tick, batcher)
            for name, after in list(leaves):
                if name in self.arrived and now >= self.arrived[name] + after * TICK_S - 1e-9:
                    del leaves[name, after]
                    self.leave(batcher, oracle, name, now, tick)
            for number in arrivals.get(tick, []):
                name = str(number)
                _, prompt, output, _ = self.items[number]
                item = BatchItem(name, prompt, output)
                self.arrived[name] = now
                self.take(batcher.on_arrive(item, now), oracle.on_arrive(item, now), tick, batcher)
            if tick == last:
                self.take(batcher.close(now), oracle.close(now), tick, batcher)
            due = batcher.next_due()
            if due is not None and due <= now:
                self.take(batcher.on_tick(now), oracle.start(now), tick, batcher)
            assert oracle.start(now) == []  # nothing was forgotten
            self.check(batcher, now)
            tick += 1
            assert tick < last + 2_000, "it does not end"

    def leave(self, batcher: Batcher, oracle: Oracle, name: str, now: float, tick: int) -> None:
        if name in self.started and name not in self.ends:
            return  # it has ended
        self.ends.pop(name, None)
        self.cancelled.add(name)
        self.take(batcher.on_end(name, now), oracle.on_end(name, now), tick, batcher)

    def take(self, found: list[RequestBatch], expected: list[str], tick: int, batcher: Batcher) -> None:
        assert [item.item_id for batch in found for item in batch.items] == expected
        for batch in found:
            self.check_size(batch)
            for item, wait_s in zip(batch.items, batch.waits_s, strict=True):
                assert item.item_id not in self.started
                self.started[item.item_id] = tick * TICK_S
                self.ends[item.item_id] = tick + self.items[int(item.item_id)][3]
                assert abs(tick * TICK_S - self.arrived[item.item_id] - wait_s) < 1e-9

    def check_size(self, batch: RequestBatch) -> None:
        policy = self.policy
        assert 1 <= len(batch.items) <= policy.max_size
        if len(batch.items) > 1 and not policy.is_continuous:
            tokens = sum(item.tokens if policy.counts_output else item.prompt_tokens for item in batch.items)
            assert policy.max_tokens is None or tokens <= policy.max_tokens
            if policy.weights is not None:
                assert (
                    sum(policy.weights.slots(1, one.tokens, policy.max_size) for one in batch.items) <= policy.max_size
                )

    def check(self, batcher: Batcher, now: float) -> None:
        assert batcher.running == len(self.ends)
        if self.policy.is_continuous:
            assert batcher.running <= self.policy.max_size
            assert not batcher.waiting or batcher.running == self.policy.max_size
        elif not batcher.running and self.policy.max_wait_s is not None:
            waiting = self.arrived.keys() - self.started.keys() - self.cancelled
            assert all(now < self.arrived[name] + self.policy.max_wait_s for name in waiting)


@given(policies(), st.lists(ITEMS, min_size=1, max_size=12), CANCELS)
@settings(max_examples=examples(400), deadline=None)
def test_the_batcher_does_what_the_definition_says_and_loses_no_request(
    policy: BatchPolicy, items: list[tuple[int, int, int, int]], cancels: dict[int, int]
) -> None:
    history = History(policy, items, cancels)
    history.play()
    assert history.started.keys() | history.cancelled == {str(number) for number in range(len(items))}


@given(st.sampled_from(sorted(PRESETS)), st.lists(ITEMS, min_size=1, max_size=60))
@settings(max_examples=examples(60), deadline=None)
def test_every_preset_serves_every_request(name: str, items: list[tuple[int, int, int, int]]) -> None:
    history = History(PRESETS[name], items, {})
    history.play()
    assert len(history.started) == len(items)
