"""The cases of `benchmarks.line_attack` that need routers, the quota actor and a network between them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from benchmarks.line_attack.network import Asked, Network
from serve_app.core.queue import QueuePolicy
from serve_app.types import RequestClass

LOW, NORMAL, HIGH, CRITICAL = RequestClass
ENOUGH = 20  # incarnations, of a router that begins one after the other
POLICY = QueuePolicy(max_queued=20_000, max_wait_s=60.0)


def never(asked: Asked) -> None:
    """Nothing follows a grant: it runs to the end of the simulation."""


def gone(asked: Asked, retry_s: float | None) -> None:
    """Nothing follows a refusal."""


class Loop:
    """One client that asks again as soon as it was answered, and after its Retry-After when it was refused."""

    def __init__(
        self, network: Network, level: RequestClass, tokens: int, answer_s: Callable[[], float], tenant: str = "t"
    ) -> None:
        self._network = network
        self._level = level
        self._tokens = tokens
        self._answer_s = answer_s
        self._tenant = tenant
        self._router = network.routers[0]
        self.waits: list[float] = []
        self.refused = 0
        self._since: float | None = None

    @property
    def waiting_s(self) -> float:
        """How long the present request has waited so far; none while it runs."""
        return 0.0 if self._since is None else self._network.clock.now - self._since

    def ask(self) -> None:
        """The next request."""
        self._since = self._network.clock.now
        arrival = self._network.arrival(self._level, self._tenant, self._tokens, self._tokens // 2)
        self._router.ask(arrival, self._granted, self._refused)

    def _granted(self, asked: Asked) -> None:
        self.waits.append(asked.waited_s)
        self._since = None
        self._network.clock.after(self._answer_s(), lambda: self._end(asked))

    def _end(self, asked: Asked) -> None:
        self._router.end(asked, self._tokens // 2)
        self.ask()

    def _refused(self, asked: Asked, retry_s: float | None) -> None:
        self.refused += 1
        if retry_s is not None:
            self._network.clock.after(max(1.0, retry_s), self.ask)


def critical_behind_low_s(seed: int) -> dict[str, Any]:
    """The longest wait of one `critical` client on an engine of 64 slots and 10,000 tokens of which a session has
    6,000, while a `low` client wants 5,000."""
    draw = random.Random(seed)
    network = Network({"e": (64, 10_000)}, POLICY)
    network.open_session(6_000)
    low = Loop(network, LOW, 5_000, lambda: 1.0)
    critical = Loop(network, CRITICAL, 1_000, lambda: draw.uniform(0.05, 0.15), "urgent")
    low.ask()
    critical.ask()
    network.clock.run(150.0)
    longest = max([*critical.waits, critical.waiting_s])
    return {"value": round(longest, 3), "served": len(critical.waits), "low_refused": low.refused}


def growth_hold(seed: int) -> dict[str, Any]:
    """How long a `critical` is held that comes when twenty answers of `low` have outgrown the estimates that short
    ones have taught, with 4 of 24 slots free.

    Each was taken for 200 tokens, prompt and answer, and makes 2,000 at 50 a second. As in vLLM the last to come stand
    still while the pool does not hold them beside those before them.
    """
    pool = 10_000
    estimate = 200
    answer = 2_000
    block = 64
    step_s = 0.1
    draw = random.Random(seed)
    network = Network({"e": (24, pool)}, POLICY)
    router = network.routers[0]
    tokens = round(50 * step_s)
    made: dict[str, int] = {}  # in order of their grants
    given: dict[str, int] = {}

    def begin(asked: Asked) -> None:
        made[asked.arrival.request_id] = 0
        given[asked.arrival.request_id] = estimate

    def step() -> None:
        used = 0
        for name in list(made):
            used += 100 + made[name]
            if used > pool:
                break
            made[name] += tokens
            router.queue.in_flight.progress(name, tokens)
            if made[name] >= answer:
                del made[name]
                router.end(router.running[name], answer)
            elif 100 + made[name] > given[name] - 16:
                given[name] += block
                router.queue.in_flight.grow(name, block, network.clock.now)
        router.after([])

    network.clock.every(step_s, step)
    for _ in range(20):
        router.ask(network.arrival(LOW, "batch", estimate, 100), begin, gone)
        network.clock.run(draw.uniform(0.0, 0.2))
    network.clock.run(draw.uniform(10.0, 14.0))
    begun = len(made)
    wanted = sum(given.values())
    critical = router.ask(network.arrival(CRITICAL, "urgent", 200, 100), never, gone)
    network.clock.run(180.0, lambda: critical.granted_s >= 0.0)
    held_s = critical.waited_s if critical.granted_s >= 0.0 else math.inf
    return {"value": round(min(held_s, 180.0), 3), "running": begun, "wanted_of_pool": round(wanted / pool, 2)}


def incarnations(seed: int) -> dict[str, Any]:
    """Incarnations that begin while 9,000 requests come and wait in one router, the worse of two: the actor is there,
    or it is away and comes up again. Counted for ten seconds, or to `ENOUGH`."""
    found = {"there": _many_wait(seed, away=False), "away": _many_wait(seed, away=True)}
    return {"value": max(one["begun"] for one in found.values()), **found}


def _many_wait(seed: int, *, away: bool) -> dict[str, int]:
    draw = random.Random(seed)
    network = Network({"e": (64, 1_000_000)}, POLICY)
    router = network.routers[0]
    granted = 0

    def runs(asked: Asked) -> None:
        nonlocal granted
        granted += 1
        network.clock.after(draw.uniform(0.5, 1.5), lambda: router.end(asked, 10))

    before = len(router.incarnations)
    network.actor.away = away
    for _ in range(9_000):
        router.ask(network.arrival(NORMAL, f"t{draw.randrange(8)}", 100, 50), runs, gone)
    if away:
        network.clock.run(4.0)
        network.actor.restart()
    already = granted
    network.clock.run(10.0, lambda: len(router.incarnations) > before + ENOUGH)
    return {"begun": len(router.incarnations) - before, "granted": granted - already}


def resets(seed: int) -> dict[str, Any]:
    """Incarnations that begin in five seconds with 2,000 requests of one router running, each granted by the actor and
    making 50 tokens a second."""
    draw = random.Random(seed)
    network = Network({f"e{number}": (250, 10_000_000) for number in range(8)}, POLICY)
    router = network.routers[0]
    quick = True

    def runs(asked: Asked) -> None:
        if quick:  # what was granted on credit gives its place to who waits for the actor
            network.clock.after(draw.uniform(0.2, 0.4), lambda: router.end(asked, 10) if quick else None)

    for _ in range(4_200):
        router.ask(network.arrival(NORMAL, "t", 1_000, 50), runs, gone)
    network.clock.run(0.8, lambda: len(router.asked) < 200)
    quick = False
    network.clock.run(0.5)
    before = len(router.incarnations)

    def step() -> None:
        for name in list(router.running):
            router.queue.in_flight.progress(name, 1)

    network.clock.every(0.02, step)

    def one_more() -> None:
        router.ask(network.arrival(NORMAL, "t", 1_000, 50), never, gone)

    network.clock.every(0.05, one_more)  # so that there is something to say
    network.clock.run(5.0, lambda: len(router.incarnations) > before + ENOUGH)
    return {"value": len(router.incarnations) - before, "running": len(router.running)}
