"""Random requests, lost and repeated reports, killed routers and restarts of the store, against the truth."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from serve_app.core.limits import TokenPrices
from serve_app.core.times import USAGE_SILENT_S
from serve_app.core.usage import USAGE_COUNTS, InFlightUse, RequestUse, UsageBatch, UsageRow, UsedModel
from serve_app.errors import StoreAway
from serve_app.router import UsageReporter, usage_reporter
from serve_app.router.usage_journal import SUFFIX
from serve_app.store.records import UsageQuery, Used
from serve_app.store.sql import SqlStore
from tests.effort import effort

HISTORIES = effort(2, 8)  # of each database
STEPS = 150
DAYS = ("1970-01-01", "1970-01-02")
USED = (UsedModel("m/x"), UsedModel("m/x", "chat"))
PRICES = TokenPrices(3.0, 0.3, 15.0)
ROW = UsageRow("d1", "k", "t", "m/x", requests=2, prompt_tokens=10, output_tokens=5, cost_micro=7)
OPEN = InFlightUse("d1", "k", "t", "m/x", 3)


@pytest.fixture(autouse=True)
def heartbeat_in_every_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_reporter, "USAGE_HEARTBEAT_S", 0.0)


@dataclass
class Clock:
    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(url: str, clock: Clock) -> Iterator[SqlStore]:
    made = SqlStore(url, clock)
    yield made
    made.close()


def total(store: SqlStore) -> UsageRow:
    return next(iter(store.usage(UsageQuery(by=()))), UsageRow())


def test_a_batch_counts_once_however_often_and_late_it_comes(store: SqlStore) -> None:
    first = UsageBatch("r", 1, (ROW,), (OPEN,))
    second = UsageBatch("r", 2, (ROW,))
    for batch in (first, first, second, first, second):
        store.add_usage(batch)
    assert total(store).requests == 4


def test_what_a_killed_router_had_in_flight_is_unsettled_once_it_is_silent(store: SqlStore, clock: Clock) -> None:
    store.add_usage(UsageBatch("r", 1, (ROW,), (OPEN,)))
    store.add_usage(UsageBatch("idle", 1, (ROW,)))
    clock.now += USAGE_SILENT_S - 1
    assert total(store).unsettled == 0
    clock.now += 2
    assert (total(store).unsettled, total(store).requests) == (3, 4)
    assert store.used("key:k", "d1") == Used(requests=7, tokens=30, cost_micro=14)
    clock.now += USAGE_SILENT_S + 1
    assert total(store).unsettled == 3


def test_a_router_that_was_thought_dead_and_comes_back_counts_nothing_twice(store: SqlStore, clock: Clock) -> None:
    batch = UsageBatch("r", 1, (ROW,), (OPEN,))
    store.add_usage(batch)
    clock.now += USAGE_SILENT_S + 1
    assert total(store).unsettled == 3
    store.add_usage(batch)  # the answer was lost
    store.add_usage(UsageBatch("r", 2, (ROW,), (InFlightUse("d1", "k", "t", "m/x", 1),)))
    assert (total(store).unsettled, total(store).requests) == (0, 4)
    clock.now += USAGE_SILENT_S + 1
    assert total(store).unsettled == 1
    store.add_usage(UsageBatch("r", 3, ()))
    assert (total(store).unsettled, total(store).requests) == (0, 4)


def test_rows_in_which_nothing_is_left_are_not_shown(store: SqlStore, clock: Clock) -> None:
    store.add_usage(UsageBatch("r", 1, (), (OPEN,)))
    clock.now += USAGE_SILENT_S + 1
    assert len(store.usage(UsageQuery())) == 1
    store.add_usage(UsageBatch("r", 2, ()))
    assert store.usage(UsageQuery()) == []


Sums = Counter[tuple[str, str]]  # by day and count


@dataclass
class Router:
    """A router, and the truth of its requests. Its name is its tenant, so that each router's sums can be told apart."""

    name: str
    reporter: UsageReporter
    journal: Path
    is_node_lost: bool  # with it
    open: dict[str, str] = field(default_factory=dict)  # days, by request
    truth: Sums = field(default_factory=Counter)
    at_batch: dict[int, tuple[Sums, Counter[str]]] = field(default_factory=dict)  # truth and in flight, by number
    copies: list[UsageBatch] = field(default_factory=list)  # that the network still has
    uncounted: Counter[str] = field(default_factory=Counter)  # ended without tokens
    applied: int = 0  # number of the last batch that the store has

    def in_flight(self) -> Counter[str]:
        return Counter(self.open.values())


class History:
    """What one seed does to routers and the store. Every other router is on a node of its own, which dies with it."""

    def __init__(self, seed: int, url: str, node: Path) -> None:
        self.node = node
        self.names: dict[str, Router] = {}
        self.draw = random.Random(seed)
        self.clock = Clock()
        self.url = url
        self.store = SqlStore(url, self.clock)
        self.routers: list[Router] = []
        self.killed: list[Router] = []
        self.made = self.day = 0

    def run(self) -> None:
        acts = (self.begin, self.end, self.report, self.kill, self.repeat, self.restart, self.silence, self.look_around)
        for _ in range(STEPS):
            self.clock.now += self.draw.choice((0.1, 1.0, 6.0))
            while len(self.routers) < 4:
                self.start()
            self.draw.choices(acts, (40, 30, 20, 2, 6, 2, 2, 3))[0](self.draw.choice(self.routers))
        for router in self.routers:  # a normal end
            for request in list(router.open):
                self.finish(router, request)
            while router.reporter.meter.has_news:
                self.report(router)
        while any(one.journal.exists() for one in self.killed if not one.is_node_lost):
            self.look_around(self.draw.choice([one for one in self.routers if not one.is_node_lost]))
        for router in (*self.routers, *self.killed):
            self.repeat(router)
        self.clock.now += USAGE_SILENT_S + 1

    def start(self) -> None:
        self.made += 1
        name = f"router-{self.made}"

        async def add_usage(batch: UsageBatch) -> None:
            self.deliver(self.names[batch.source], batch)

        folder = self.node / name if self.made % 2 else self.node
        reporter = UsageReporter(name, add_usage, lambda: 86400.0 * self.day, folder)
        router = Router(name, reporter, folder / f"{name}{SUFFIX}", is_node_lost=folder != self.node)
        self.routers.append(router)
        self.names[name] = router

    def begin(self, router: Router) -> None:
        self.made += 1
        self.day = self.draw.randrange(2)
        router.reporter.begin(
            f"q{self.made}", self.draw.choice(("k1", "k2")), router.name, self.draw.choice(USED), PRICES
        )
        router.open[f"q{self.made}"] = DAYS[self.day]

    def end(self, router: Router) -> None:
        if router.open:
            self.finish(router, self.draw.choice(list(router.open)))

    def finish(self, router: Router, request: str) -> None:
        day = router.open.pop(request)
        if self.draw.random() < 0.1:
            router.reporter.end(request, None)  # it got no tokens
            router.uncounted[day] += 1
            return
        prompt = self.draw.randrange(1, 2000)
        use = RequestUse(prompt, self.draw.randrange(prompt), *(self.draw.randrange(500) for _ in range(3)))
        router.reporter.end(request, use)
        cost = PRICES.cost_micro(use.prompt_tokens, use.cached_tokens, use.output_tokens)
        counts = (1, use.prompt_tokens, use.cached_tokens, use.output_tokens, use.kv_token_ms, use.wait_ms, cost)
        for name, count in zip(USAGE_COUNTS[:-1], counts, strict=True):
            router.truth[day, name] += count

    def report(self, router: Router) -> None:
        asyncio.run(router.reporter.flush())

    def deliver(self, router: Router, batch: UsageBatch) -> None:
        """The network between a router and the store."""
        router.at_batch.setdefault(batch.seq, (router.truth.copy(), router.in_flight()))
        fate = self.draw.random()
        if fate < 0.4:
            router.copies.append(batch)  # it arrives late, or again, or both
        if fate > 0.2:
            self.add(router, batch)
        if fate < 0.4:
            raise StoreAway("the answer is lost")

    def add(self, router: Router, batch: UsageBatch) -> None:
        self.store.add_usage(batch)
        router.applied = max(router.applied, batch.seq)

    def repeat(self, _: Router) -> None:
        for router in (*self.routers, *self.killed):
            for batch in self.draw.sample(router.copies, len(router.copies)):
                self.add(router, batch)

    def kill(self, router: Router) -> None:
        """SIGKILL: what its memory has is gone."""
        router.reporter.journal.leave()  # as the kernel does
        self.routers.remove(router)
        self.killed.append(router)

    def look_around(self, router: Router) -> None:
        asyncio.run(router.reporter.report_left_behind())

    def restart(self, _: Router) -> None:
        self.store.close()
        self.store = SqlStore(self.url, self.clock)

    def silence(self, _: Router) -> None:
        """All routers are thought dead, and come back."""
        self.clock.now += USAGE_SILENT_S + 1
        self.store.usage(UsageQuery())

    def stored(self, router: Router) -> Sums:
        rows = self.store.usage(UsageQuery(by=("day",), tenant=router.name))
        return Counter({(row.day, name): getattr(row, name) for row in rows for name in USAGE_COUNTS})


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_sums_are_the_truth_but_for_the_unsettled_whatever_is_lost_repeated_or_killed(
    seed: int, url: str, tmp_path: Path
) -> None:
    history = History(seed, url, tmp_path)
    history.run()
    assert history.killed
    for router in history.routers:
        assert +history.stored(router) == +router.truth, router.name
    for router in history.killed:
        if not router.is_node_lost:
            expected = router.truth + Counter({(day, "unsettled"): n for day, n in router.in_flight().items()})
            assert +history.stored(router) == +expected, router.name
            continue
        known, in_flight = router.at_batch.get(router.applied, (Counter(), Counter()))
        expected = known + Counter({(day, "unsettled"): count for day, count in in_flight.items()})
        assert +history.stored(router) == +expected, router.name
        for day in DAYS:  # each unsettled request ended after the last report, or was in flight
            finished = router.truth[day, "requests"] - known[day, "requests"]
            assert in_flight[day] <= finished + router.in_flight()[day] + router.uncounted[day]
    by_name = history.store.usage(UsageQuery(by=("asked_model",)))
    assert {row.asked_model for row in by_name} == {"chat", "m/x"}
    assert min(getattr(row, name) for row in by_name for name in USAGE_COUNTS) >= 0, "a name has more than its model"
    history.store.close()
