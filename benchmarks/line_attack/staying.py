"""The line of one model before clients who stay, in virtual time: `core.queue.admission` and nothing else.

A client asks, waits, is answered, thinks, and asks again; refused it comes again after the Retry-After it was told (its
own `RETRY_S` where it was told none). Nobody leaves, so what an overload takes from one class another has to have had.
Answers take `ANSWER_S` in the mean and hold a slot for that long.

`starved` counts windows of `WINDOW_S`. The part of a class is `min_share` of all tokens granted in the window, that
of a tenant is its weight's part of its class's among all tenants who waited there in the window. Both are owed only to
who waited in all of the window, less the largest request that waited.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from autoscaling.simulator import Clock
from benchmarks.common.own_pools import set_replica
from serve_app.core.queue import Action, Admission, Arrival, Grant, QueuePolicy, Refuse
from serve_app.types import RequestClass

SLOTS = 64
ANSWER_S = 10.0
WINDOW_S = 60.0
RETRY_S = 1.0  # of a client that was told no Retry-After
ENGINE = "engine"

Key = tuple[RequestClass, str]  # a class and a tenant
Spans = list[tuple[float, float]]


@dataclass(frozen=True)
class Crowd:
    """Clients that are alike. `tokens`: of a request, prompt and answer; `think_s`: the mean between an answer and the
    next question; `arrive_share`: of the capacity, for which newcomers ask who want one answer each."""

    level: RequestClass
    tenant: str
    clients: int
    tokens: int = 780  # with 64 slots and answers of 10 s: 5,000 tokens/s
    think_s: float = 0.0
    arrive_share: float = 0.0


@dataclass(frozen=True)
class Granted:
    at_s: float
    key: Key
    tokens: int
    waited_s: float  # since the client first asked


class Staying:
    """A run; `granted` are all grants, in order."""

    def __init__(self, crowds: Sequence[Crowd], policy: QueuePolicy, seed: int, kv_tokens: int | None = None) -> None:
        self._draw = random.Random(seed)
        self._policy = policy
        self._queue = Admission(policy)
        set_replica(self._queue, ENGINE, SLOTS, 0.0, kv_tokens)
        self._clock = Clock()
        self._ids = itertools.count()
        self._asked: dict[str, tuple[Crowd, float]] = {}  # who waits, and since when its client has asked
        self._tick_at = math.inf
        self.granted: list[Granted] = []
        self.refused = 0
        self._waiting_count: dict[Key, int] = defaultdict(int)
        self.wait_spans: dict[Key, list[tuple[float, float]]] = defaultdict(list)  # spans in which somebody waited
        self._since: dict[Key, float] = {}
        self.largest: dict[Key, int] = defaultdict(int)
        for crowd in crowds:
            if crowd.arrive_share:
                self._come(crowd)
            for _ in range(crowd.clients):  # not all at once: a first wave would come back as one
                self._clock.at(self._draw.uniform(0.0, ANSWER_S), partial(self._ask, crowd))

    @property
    def now(self) -> float:
        return self._clock.now

    def run(self, span_s: float) -> None:
        """So many seconds of it."""
        self._clock.run(span_s)
        for key, since in self._since.items():
            self.wait_spans[key].append((since, span_s))

    def waits(self, level: RequestClass, warm_s: float = WINDOW_S) -> list[float]:
        """How long clients of a class waited for their grants, in order."""
        return sorted(one.waited_s for one in self.granted if one.key[0] is level and one.at_s >= warm_s)

    def starved(self) -> int:
        """See the module."""
        spans = {key: _merged(found) for key, found in self.wait_spans.items()}
        return sum(self._starved_in(at * WINDOW_S, spans) for at in range(1, int(self.now / WINDOW_S)))

    def _starved_in(self, begin_s: float, waits: Mapping[Key, Spans]) -> int:
        end_s = begin_s + WINDOW_S
        had: dict[Key, int] = defaultdict(int)
        for grant in self.granted:
            if begin_s <= grant.at_s < end_s:
                had[grant.key] += grant.tokens
        part = self._policy.min_share * sum(had.values())
        found = 0
        for level in RequestClass:
            keys = [key for key, spans in waits.items() if key[0] is level and _overlaps(spans, begin_s, end_s)]
            weights = sum(self._policy.weight(tenant) for _, tenant in keys)
            largest = max((self.largest[key] for key in keys), default=0)
            together = _merged([span for key in keys for span in waits[key]])
            if _covers(together, begin_s, end_s):
                found += sum(had[key] for key in keys) < part - largest
            for key in keys:
                if _covers(waits[key], begin_s, end_s):
                    found += had[key] < part * self._policy.weight(key[1]) / weights - self.largest[key]
        return found

    def _come(self, crowd: Crowd) -> None:
        """The next newcomer, and all after it."""

        def comes() -> None:
            self._ask(crowd)
            self._come(crowd)

        self._clock.after(self._draw.expovariate(crowd.arrive_share * SLOTS / ANSWER_S), comes)

    def _ask(self, crowd: Crowd, first_s: float | None = None) -> None:
        """`first_s`: when this request was asked first; None: now."""
        since = self.now if first_s is None else first_s
        request_id = f"request-{next(self._ids)}"
        key = (crowd.level, crowd.tenant)
        prompt = crowd.tokens // 2
        arrival = Arrival(request_id, crowd.level, crowd.tenant, 1, crowd.tokens, prompt_tokens=prompt)
        self._asked[request_id] = (crowd, since)
        self.largest[key] = max(self.largest[key], crowd.tokens)
        self._count(key, 1)
        self._took(self._queue.on_arrive(arrival, self.now))

    def _count(self, key: Key, by: int) -> None:
        self._waiting_count[key] += by
        if self._waiting_count[key] == 1 and by > 0:
            self._since[key] = self.now
        elif not self._waiting_count[key]:
            self.wait_spans[key].append((self._since.pop(key), self.now))

    def _took(self, actions: list[Action]) -> None:
        for action in actions:
            crowd, since = self._asked.pop(action.request_id)
            self._count((crowd.level, crowd.tenant), -1)
            if isinstance(action, Grant):
                key = (crowd.level, crowd.tenant)
                self.granted.append(Granted(self.now, key, crowd.tokens, self.now - since))
                answer_s = self._draw.uniform(0.8, 1.2) * ANSWER_S
                self._clock.after(answer_s, partial(self._end, action.request_id, crowd))
            elif isinstance(action, Refuse):
                self.refused += 1
                retry_s = RETRY_S if action.retry_after_s is None else max(action.retry_after_s, RETRY_S)
                self._clock.after(retry_s, partial(self._ask, crowd, since))
        due = self._queue.next_due()
        if due is not None and (due < self._tick_at or self._tick_at <= self.now):
            self._tick_at = due
            self._clock.at(due, self._tick)

    def _tick(self) -> None:
        if self.now >= self._tick_at:
            self._tick_at = math.inf
        self._took(self._queue.on_tick(self.now))

    def _end(self, request_id: str, crowd: Crowd) -> None:
        half = crowd.tokens // 2
        self._took(self._queue.on_done(request_id, self.now, half, crowd.tokens - half))
        if not crowd.clients:
            return
        think_s = self._draw.expovariate(1.0 / crowd.think_s) if crowd.think_s else 0.0
        self._clock.after(think_s, partial(self._ask, crowd))


def _overlaps(spans: Spans, begin_s: float, end_s: float) -> bool:
    return any(since < end_s and until > begin_s for since, until in spans)


def _covers(spans: Spans, begin_s: float, end_s: float) -> bool:
    return any(since <= begin_s and until >= end_s for since, until in spans)


def _merged(spans: Spans) -> Spans:
    """In order, those that touch or overlap as one."""
    found: Spans = []
    for since, until in sorted(spans):
        if found and since <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], until))
        else:
            found.append((since, until))
    return found
