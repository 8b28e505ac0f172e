"""What the quota actor's largest single events cost; part of `benchmarks.admission`.

- scale-up: an engine starts before 50,000 waiting requests of two routers; a third one reports first that it reaches
  the engine, then the others.
- recovery: a new actor with 300 engines and three routers, of which the first two submit 5,000 requests each, and the
  last one reports late.
- sessions: 1,200 open sessions on 100 engines, which take no more, and 200 pending ones of as many sizes; some close.
- router end: a router of which 5,000 requests run and 5,000 wait begins anew under its name, before 5,000 that wait of
  another one, which then takes all slots and is gone.

An event is one message or one tick. The CPU time of the longest one counts, without collections of garbage: which
event one falls in is chance, and `benchmarks.admission` has the longest one.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.exchange import MODEL, Router, connected
from serve_app.core.memory import Device, EngineReport, Rank, SessionRequest
from serve_app.core.quota import Quota
from serve_app.core.shared_queue import messages
from serve_app.core.times import ACTOR_TICK_S

ROUTERS = 3
SLOTS = 64
POOL_TOKENS = 1_000_000
SCALE_UP_ENGINES = 8
SCALE_UP_WAITING = 50_000
RECOVERY_ENGINES = 300
RECOVERY_WAITING = 10_000
SESSION_ENGINES = 100
SESSIONS = 1_200
PENDING = 200
END_ENGINES = 79
END_REQUESTS = 10_000
BATCH = 256  # events a message, as routers send
MAX_TICKS = 4_000  # until what is left of an event is done


class Spans:
    """CPU seconds of events."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.total_s = 0.0
        self.count = 0

    def add(self, span_s: float) -> None:
        self.longest_s = max(self.longest_s, span_s)
        self.total_s += span_s
        self.count += 1

    def timed(self, act: Callable[[], Any]) -> Any:
        began = time.process_time()
        found = act()
        self.add(time.process_time() - began)
        return found

    def figures(self) -> dict[str, Any]:
        return {
            "longest_ms": round(1000 * self.longest_s, 2),
            "all_ms": round(1000 * self.total_s, 1),
            "events": self.count,
        }


def add_engine(quota: Quota, name: str, now: float) -> None:
    """An engine starts and runs."""
    report = EngineReport(name, MODEL, (Rank("n"),), 1000, 1000, slots=SLOTS)
    holds = quota.on_engine(report, now).holds
    quota.on_engine(replace(report, holds=holds, kv_tokens=POOL_TOKENS), now)


def submit(quota: Quota, router: Router, count: int, now: float, spans: Spans | None = None) -> None:
    """A router submits requests, in full messages."""
    for begin in range(0, count, BATCH):
        arrivals = tuple(router.arrive() for _ in range(min(BATCH, count - begin)))
        span_s = router.say(quota, arrivals, now)
        if spans is not None:
            spans.add(span_s)


def finish(quota: Quota, now: float, spans: Spans) -> None:
    """Ticks as long as the actor asks for one at once."""
    for _ in range(MAX_TICKS):
        due = quota.queue.next_due()
        if due is None or due > now:
            return
        spans.timed(partial(quota.queue.on_tick, now))


def scale_up() -> dict[str, Any]:
    """An engine starts in front of a long queue."""
    quota, routers = connected(SCALE_UP_ENGINES + 1, SLOTS, POOL_TOKENS, ROUTERS, running=SCALE_UP_ENGINES)
    for number in range(SCALE_UP_WAITING // BATCH + 1):
        submit(quota, routers[number % (ROUTERS - 1)], BATCH, 0.0)  # none of the router that reports first
    spans = Spans()
    name = f"e{SCALE_UP_ENGINES}"
    now = 1.0
    spans.timed(lambda: add_engine(quota, name, now))
    spans.timed(partial(quota.on_tick, now))
    for router in (routers[-1], *routers[:-1]):
        now += 0.01
        spans.add(router.say(quota, (messages.EngineReachability(MODEL, name, True),), now))
        finish(quota, now, spans)
    for _ in range(4):
        now += ACTOR_TICK_S
        spans.timed(partial(quota.on_tick, now))
        for router in routers:
            spans.add(router.say(quota, (), now))
        finish(quota, now, spans)
    return spans.figures() | {"waiting": quota.queue.models.by_name[MODEL].admission.waiting}


def recovery() -> dict[str, Any]:
    """A new actor reads its checkpoint; routers report, and submit what waits."""
    before, routers = connected(RECOVERY_ENGINES, SLOTS, POOL_TOKENS, ROUTERS)
    stored = {key: value for key, (kept, value) in before.changes().items() if kept}
    for key in [key for key in stored if key[1] in {router.name for router in routers}]:
        stored[key] = frozenset(f"e{number}" for number in range(RECOVERY_ENGINES))
    quota = Quota(2, stored, 0.0)
    spans = Spans()
    now = 0.0
    spans.timed(lambda: quota.on_devices([Device("n", number, 1000, 0) for number in range(RECOVERY_ENGINES)], now))
    again = [Router(router.name, [f"e{number}" for number in range(RECOVERY_ENGINES)]) for router in routers]
    for router in again[:-1]:
        spans.add(router.say(quota, router.first, now))
    share = RECOVERY_WAITING // (ROUTERS - 1)
    for router in again[:-1]:
        submit(quota, router, share, now, spans)
    for tick in range(1, 9):
        now = tick * ACTOR_TICK_S
        for number in range(RECOVERY_ENGINES):
            report = stored_report(stored, f"e{number}")
            quota.on_engine(report, now)
        spans.timed(partial(quota.on_tick, now))
        for router in again[:-1]:
            spans.add(router.say(quota, (), now))
    spans.add(again[-1].say(quota, again[-1].first, now))
    for _ in range(4):
        now += ACTOR_TICK_S
        spans.timed(partial(quota.on_tick, now))
        finish(quota, now, spans)
        for router in again:
            for _ in range(1 + RECOVERY_WAITING // BATCH):  # it takes what it was granted
                spans.add(router.say(quota, (), now))
    return spans.figures() | {"waiting": quota.queue.models.by_name[MODEL].admission.waiting}


def stored_report(stored: dict[Any, Any], name: str) -> EngineReport:
    """An engine's last report, as it repeats it."""
    return next(value for key, value in stored.items() if key[1] == name and isinstance(value, EngineReport))


def sessions() -> dict[str, Any]:
    """Many sessions are open, many wait, some come and go."""
    quota, _ = connected(SESSION_ENGINES, SLOTS, POOL_TOKENS, 1)
    spans = Spans()
    now = 1.0
    limit = quota.ledger.limit("e0")
    per_engine = SESSIONS // SESSION_ENGINES
    size = limit // (2 * per_engine)
    for number in range(SESSIONS):
        quota.on_open_session(SessionRequest(f"t s{number}", MODEL, size, 600.0, per_engine=per_engine), now)
    for number in range(PENDING):
        ask = SessionRequest(
            f"t w{number}", MODEL, size // 2 + number, 600.0, wait_until=now + 500.0, per_engine=per_engine
        )
        spans.timed(partial(quota.on_open_session, ask, now))
    for step in range(20):
        now += ACTOR_TICK_S / 5
        spans.timed(partial(quota.on_tick, now))
        spans.timed(partial(quota.queue.close_session, f"t s{step}", now))
    return spans.figures() | {"open": len(quota.sessions.by_session_id)}


def router_end() -> dict[str, Any]:
    """Requests of two routers wait behind those that one of them runs. That one begins anew; then both are gone."""
    quota, (ends, other) = connected(END_ENGINES, SLOTS, POOL_TOKENS, 2)
    submit(quota, ends, END_REQUESTS, 0.0)
    submit(quota, other, END_REQUESTS // 2, 0.0)
    spans = Spans()
    now = 0.1
    known = quota.queue.requests.by_ticket
    running = sum(bool(one.engine) for one in known.values())
    again = Router(ends.name, [f"e{number}" for number in range(END_ENGINES)])
    message = messages.RouterMessage(again.name, 2, quota.epoch, 1, again.first, 0, 0)
    spans.timed(partial(quota.on_exchange, message, now))
    finish(quota, now, spans)
    for _ in range(END_REQUESTS // BATCH):  # the other one takes what it was granted
        spans.add(other.say(quota, (), now))
    finish(quota, now, spans)
    for router in (other, again):
        now += ACTOR_TICK_S
        quota.ledger.leave(router.name)  # it was silent for too long
        spans.timed(partial(quota.on_tick, now))
        finish(quota, now, spans)
    assert not known, "something is left of the requests"
    return spans.figures() | {"running": running}


def events() -> dict[str, Any]:
    """The figures of all of them."""
    gc.disable()
    found = {
        f"scale_up_{SCALE_UP_WAITING}": scale_up(),
        f"recovery_{RECOVERY_ENGINES}": recovery(),
        f"sessions_{SESSIONS}": sessions(),
        f"router_end_{END_REQUESTS}": router_end(),
    }
    gc.enable()
    return {"event_ms": {name: one["longest_ms"] for name, one in found.items()}, "events": found}
