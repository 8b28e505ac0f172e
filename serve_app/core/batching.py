"""Forms batches of requests: which requests start together, and when.

Decides, for one engine, the batches of the strategies that the field describes: static, dynamic, sorted, predictive,
length-aware and continuous (Orca, Yu et al., OSDI 2022). In: requests, ends of requests, and the time. Out: batches to
start now.

Rules
- Batches run one at a time: the next one starts when the last request of the one before has ended. Under a continuous
  policy there are no batches: a request starts as soon as fewer than `max_size` run.
- A batch starts when it is full (by requests, weights or tokens), when its oldest request has waited `max_wait_s`, or
  when no more requests will come; at the earliest of these at which no batch runs.
- The oldest waiting request is in the next batch, whatever the order; the others follow by arrival or by length.

Invariant: each request is in exactly one batch, unless it is cancelled before. No batch has more requests, weights or
tokens than its policy allows, but for a batch of a single request that is larger than all of them. While no batch runs,
no request waits longer than `max_wait_s`.
"""

from __future__ import annotations

import bisect
import enum
import itertools
import operator
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from serve_app.core.estimate import LengthRule

RECENT = 5  # batches whose mean size predicts the next one; with SHRINK, FIRST_SIZE and MIN_SIZE the field's figures
SHRINK = 0.9  # of that mean: a batch that was only just filled would wait too long for its last requests
# of predicted sizes
FIRST_SIZE = 16  # of the first `RECENT` batches
MIN_SIZE = 8
ARRIVALS = 32  # of which the arrival rate is measured: enough for 20%, few enough to follow a burst


class Sizing(enum.StrEnum):
    """What sets the size at which a batch is full; never above `max_size`."""

    FIXED = "fixed"  # `max_size`
    RECENT_BATCHES = "recent_batches"  # `SHRINK` times the mean of the last batches
    ARRIVAL_RATE = "arrival_rate"  # as many as come within `max_wait_s` at the present rate
    PROMPT_LENGTH = "prompt_length"  # `max_size`; `long_size` if the waiting prompts are long on average


class Trigger(enum.StrEnum):
    """Why a batch started."""

    FULL = "full"
    WAIT = "wait"  # its oldest request had waited long enough
    CLOSED = "closed"  # no more requests would come


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """When a batch is full, and how long it may be awaited.

    Args:
        max_size: requests of a batch; of all that run, if it is continuous.
        max_wait_s: of a request, while no batch runs; None: until the batch is full.
        max_tokens: of a batch; `counts_output`: with what the answers may have.
        by_length: the requests nearest in length to the oldest one, rather than the next oldest.
        long_size: requests of a batch of prompts of `long_from` tokens and more, for `Sizing.PROMPT_LENGTH`.
        weights: what a request weighs by its length; the weights of a batch together are at most `max_size`.
        max_queued: requests that may wait; None: any number.

    Raises:
        ValueError: a figure is out of range.
    """

    max_size: int
    max_wait_s: float | None = None
    max_tokens: int | None = None
    counts_output: bool = False
    by_length: bool = False
    sizing: Sizing = Sizing.FIXED
    long_size: int = 1
    long_from: int = 1
    weights: LengthRule | None = None
    is_continuous: bool = False
    max_queued: int | None = None

    def __post_init__(self) -> None:
        least = (self.max_size, self.max_tokens or 1, self.long_size, self.long_from, self.max_queued or 1)
        if min(least) < 1 or self.max_tokens == 0 or self.max_queued == 0:
            raise ValueError(f"a size, budget or bound below 1: {self}")
        if self.max_wait_s is not None and not 0.0 <= self.max_wait_s < float("inf"):
            raise ValueError(f"max_wait_s must be a finite number of seconds, at least 0: {self.max_wait_s}")
        if self.sizing is Sizing.ARRIVAL_RATE and self.max_wait_s is None:
            raise ValueError("sizes by the arrival rate need max_wait_s")


@dataclass(frozen=True, slots=True)
class BatchItem:
    """A request. `output_tokens`: what its answer may have; 0: it generates none."""

    item_id: str
    prompt_tokens: int
    output_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """Requests that start now, oldest first. `waits_s`: how long each has waited."""

    items: tuple[BatchItem, ...]
    waits_s: tuple[float, ...]
    trigger: Trigger


def padding_ratio(lengths: Sequence[float]) -> float:
    """The share of a batch that is padding, if all its requests take as long as the longest: 0 up to below 1."""
    longest = max(lengths, default=0.0)
    return 1.0 - sum(lengths) / (len(lengths) * longest) if longest > 0.0 else 0.0


@dataclass(slots=True)
class _Waiting:
    item: BatchItem
    arrived_s: float


@dataclass(slots=True)
class _Queue:
    """Waiting requests by arrival, their sums, and, if wanted, their order by length."""

    by_length: bool
    entries: dict[str, _Waiting] = field(default_factory=dict)
    weight: int = 0
    tokens: int = 0
    sorted: list[tuple[int, int, str]] = field(default_factory=list)  # length, number of the arrival, id
    _keys: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    _arrivals: int = 0

    def add(self, item: BatchItem, now: float, weight: int, tokens: int) -> None:
        self.entries[item.item_id] = _Waiting(item, now)
        self.weight += weight
        self.tokens += tokens
        if self.by_length:
            self._arrivals += 1
            key = self._keys[item.item_id] = item.tokens, self._arrivals, item.item_id
            bisect.insort(self.sorted, key)

    def remove(self, item_id: str, weight: int, tokens: int) -> _Waiting:
        self.weight -= weight
        self.tokens -= tokens
        if self.by_length:
            del self.sorted[bisect.bisect_left(self.sorted, self._keys.pop(item_id))]
        return self.entries.pop(item_id)

    def neighbours(self, count: int) -> tuple[list[BatchItem], int]:
        """The requests by length that may share a batch of `count` with the oldest one, and its place among them."""
        place = bisect.bisect_left(self.sorted, self._keys[next(iter(self.entries))])
        first = max(0, place - count + 1)
        near = self.sorted[first : place + count]
        return [self.entries[item_id].item for _, _, item_id in near], place - first


class Batcher:
    """See the module. O(log n) per event, O(size) for sizes by prompt length, and O(size) per batch; a batch by length
    takes O(n + size), and O(n + size^2) where budgets bind."""

    def __init__(self, policy: BatchPolicy) -> None:
        self.policy = policy
        self._queue = _Queue(policy.by_length)
        self._running: set[str] = set()
        self._sizes: deque[int] = deque(maxlen=RECENT)
        self._arrivals: deque[float] = deque(maxlen=ARRIVALS)
        self._is_closed = False

    @property
    def waiting(self) -> int:
        return len(self._queue.entries)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def is_queue_full(self) -> bool:
        """Whether the next request must be refused."""
        return self.policy.max_queued is not None and self.waiting >= self.policy.max_queued

    def on_arrive(self, item: BatchItem, now: float) -> list[RequestBatch]:
        """A request has come. Raises ValueError: one with this id waits or runs, or the batcher is closed. It is the
        caller who refuses while `is_queue_full`: some were accepted before."""
        if item.item_id in self._queue.entries or item.item_id in self._running:
            raise ValueError(f"{item.item_id!r} waits or runs already")
        if self._is_closed:
            raise ValueError("the queue is closed")
        self._arrivals.append(now)
        self._queue.add(item, now, self._weight(item), self._tokens(item))
        return self._start(now)

    def on_end(self, item_id: str, now: float) -> list[RequestBatch]:
        """A request has ended or is cancelled; an unknown one changes nothing."""
        waiting = self._queue.entries.get(item_id)
        if waiting is not None:
            self._remove(waiting.item)
        self._running.discard(item_id)
        return self._start(now)

    def on_tick(self, now: float) -> list[RequestBatch]:
        """Time has passed."""
        return self._start(now)

    def close(self, now: float) -> list[RequestBatch]:
        """No more requests will come: nothing waits for them."""
        self._is_closed = True
        return self._start(now)

    def next_due(self) -> float | None:
        """When `on_tick` has a batch to start; None: not before the next event."""
        if self._running or not self._queue.entries or self.policy.max_wait_s is None:
            return None
        return next(iter(self._queue.entries.values())).arrived_s + self.policy.max_wait_s

    # Inside

    def _start(self, now: float) -> list[RequestBatch]:
        if self.policy.is_continuous:
            room = self.policy.max_size - len(self._running)
            chosen = [entry.item for entry in itertools.islice(self._queue.entries.values(), room)]
            return [self._begin(chosen, Trigger.FULL, now)] if chosen else []
        if self._running or not self._queue.entries:
            return []
        size = self._size()
        trigger = self._trigger(size, now)
        return [] if trigger is None else [self._begin(self._choose(size), trigger, now)]

    def _begin(self, items: list[BatchItem], trigger: Trigger, now: float) -> RequestBatch:
        waits_s = []
        for item in items:
            waits_s.append(now - self._remove(item).arrived_s)
            self._running.add(item.item_id)
        self._sizes.append(len(items))
        return RequestBatch(tuple(items), tuple(waits_s), trigger)

    def _trigger(self, size: int, now: float) -> Trigger | None:
        """Why a batch starts now; None: it is awaited."""
        queue = self._queue
        policy = self.policy
        is_heavy = queue.weight >= policy.max_size if policy.weights is not None else len(queue.entries) >= size
        if is_heavy or (policy.max_tokens is not None and queue.tokens >= policy.max_tokens):
            return Trigger.FULL
        due = self.next_due()
        if due is not None and now >= due:
            return Trigger.WAIT
        return Trigger.CLOSED if self._is_closed else None

    def _size(self) -> int:
        """How many requests the next batch has at most."""
        policy = self.policy
        match policy.sizing:
            case Sizing.FIXED:
                wanted: float = policy.max_size
            case Sizing.RECENT_BATCHES:
                is_known = len(self._sizes) == RECENT
                wanted = max(MIN_SIZE, SHRINK * sum(self._sizes) / RECENT) if is_known else FIRST_SIZE
            case Sizing.ARRIVAL_RATE:
                span_s = self._arrivals[-1] - self._arrivals[0]
                rate = (len(self._arrivals) - 1) / span_s if span_s > 0.0 else float("inf")
                wanted = max(1.0, rate * (policy.max_wait_s or 0.0))
            case Sizing.PROMPT_LENGTH:
                entries = [
                    entry for entry, _ in zip(self._queue.entries.values(), range(policy.max_size), strict=False)
                ]
                mean = sum(entry.item.prompt_tokens for entry in entries) / len(entries)
                wanted = policy.max_size if mean < policy.long_from else policy.long_size
        return int(min(wanted, policy.max_size))

    def _choose(self, size: int) -> list[BatchItem]:
        """The requests of the next batch, oldest first."""
        if self.policy.by_length:
            return self._nearest(size)
        chosen: list[BatchItem] = []
        weight = tokens = 0
        for entry in self._queue.entries.values():
            weight += self._weight(entry.item)
            tokens += self._tokens(entry.item)
            if chosen and not (len(chosen) < size and self._fits(weight, tokens)):
                break
            chosen.append(entry.item)
        return chosen

    def _nearest(self, size: int) -> list[BatchItem]:
        """As many requests as fit with the oldest one, with the least padding among batches of so many."""
        near, place = self._queue.neighbours(size)
        lengths, weights, tokens = (
            list(itertools.accumulate(map(size_of, near), initial=0))
            for size_of in (operator.attrgetter("tokens"), self._weight, self._tokens)
        )
        for count in range(min(size, len(near)), 1, -1):
            found = [
                (count * near[first + count - 1].tokens - lengths[first + count] + lengths[first], first)
                for first in range(max(0, place - count + 1), min(place, len(near) - count) + 1)
                if self._fits(weights[first + count] - weights[first], tokens[first + count] - tokens[first])
            ]
            if found:
                first = min(found)[1]
                chosen = {item.item_id for item in near[first : first + count]}
                return [entry.item for item_id, entry in self._queue.entries.items() if item_id in chosen]
        return [near[place]]

    def _fits(self, weight: int, tokens: int) -> bool:
        policy = self.policy
        return weight <= policy.max_size and (policy.max_tokens is None or tokens <= policy.max_tokens)

    def _remove(self, item: BatchItem) -> _Waiting:
        return self._queue.remove(item.item_id, self._weight(item), self._tokens(item))

    def _weight(self, item: BatchItem) -> int:
        rule = self.policy.weights
        return 1 if rule is None else rule.slots(1, item.tokens, self.policy.max_size)

    def _tokens(self, item: BatchItem) -> int:
        return item.tokens if self.policy.counts_output else item.prompt_tokens


# What the field's write-ups recommend, by the name here. Sizes without a wait or a wait without a size are theirs, too.
PRESETS: Mapping[str, BatchPolicy] = MappingProxyType(
    {
        "static-8": BatchPolicy(8),
        "static-32": BatchPolicy(32, 0.1),
        "dynamic-32": BatchPolicy(32, 0.05, 8192, counts_output=True),
        "dynamic-8": BatchPolicy(8, 0.05),
        "dynamic-4096": BatchPolicy(128, 0.05, 4096),
        "dynamic-128": BatchPolicy(128, 0.0),  # from one request up: what waits when the engine is free
        "sorted-32": BatchPolicy(32, 0.05, by_length=True),
        "predictive": BatchPolicy(128, 0.1, sizing=Sizing.RECENT_BATCHES),
        "predictive-arrivals": BatchPolicy(128, 0.05, sizing=Sizing.ARRIVAL_RATE),
        "length-aware": BatchPolicy(64, 0.05, sizing=Sizing.PROMPT_LENGTH, long_size=16, long_from=100),
        "length-weighted": BatchPolicy(64, 0.05, weights=LengthRule.of_batch(64, 16, 100)),
        "continuous": BatchPolicy(32, is_continuous=True),
    }
)
