"""What one queue for all routers costs: `python -m benchmarks.exchange [--quick]`.

The quota actor's brain alone, without Ray: `ROUTERS` routers hand in requests of four classes and eight tenants for one
model with `ENGINES` engines, all full, and end them; an event is an arrival or an end, a batch is what one message
carries. Every event takes the whole way: numbered batch, line, ledger, grant. Times are of `on_exchange`, without the
routers' own work, in CPU seconds of one core: other processes of the machine do not count.

Then the largest single events, which the actor does a part at a time: an engine starts before 50,000 requests that
wait; a new actor has 300 engines, of which its routers tell, and 10,000 requests; a router ends of which as many
requests run or wait, and another one. The longest part counts, a message or a tick, without collections of garbage.
Bar: 50 ms.

Prints conditions, a table, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.conditions import here
from benchmarks.common.output import write_json
from serve_app.core.memory import Device, EngineReport, Rank
from serve_app.core.queue import Arrival, Grant, QueuePolicy
from serve_app.core.quota import Quota
from serve_app.core.shared_queue import RouterMessage, messages
from serve_app.types import RequestClass

ROUTERS = 3
ENGINES = 8
SLOTS = 64
POOL_TOKENS = 1_000_000
BATCHES = (1, 16, 256)
EVENTS = 200_000
QUICK_EVENTS = 20_000
WAITING = 1_000  # requests of each router in the line, so that every end grants
MAX_QUEUED = 100_000  # none is refused
MODEL = "m"
LARGE_WAITING = 50_000  # before an engine that starts
LARGE_ENGINES = 300  # of a new actor
LARGE_REQUESTS = 10_000  # of its routers, or of one that ends
END_ENGINES = 79  # which run half of these
BATCH = 256  # events a message, as routers send
MAX_TICKS = 4_000  # until what is left of an event is done
LONGEST_BAR_MS = 50.0


class Router:
    """What a router says, without what it costs to say it."""

    def __init__(self, name: str, engines: list[str]) -> None:
        self.name = name
        self.numbers = itertools.count()
        self.seq = self.taken = self.ack = 0
        self.running: deque[str] = deque()
        policy = QueuePolicy(max_queued=MAX_QUEUED, max_wait_s=1e9)
        self.first: tuple[messages.RouterEvent, ...] = (messages.Hello(()), messages.ModelPolicy(MODEL, policy))
        self.first += tuple(messages.EngineReachability(MODEL, engine, True) for engine in engines)

    def arrive(self) -> messages.RouterEvent:
        number = next(self.numbers)
        level = RequestClass(number % len(RequestClass))
        arrival = Arrival(f"{self.name}:{number}", level, f"tenant-{number % 8}", 1, 500 + number % 700)
        return messages.Arrive(MODEL, arrival, 0.0)

    def end(self) -> messages.RouterEvent:
        return messages.Done(self.running.popleft(), 300, 200)

    def say(self, quota: Quota, events: tuple[messages.RouterEvent, ...], now: float) -> float:
        """One message; returns the seconds the brain took for it."""
        message = RouterMessage(self.name, 1, quota.epoch, self.seq + 1, events, self.taken, self.ack)
        began = time.process_time()
        reply = quota.on_exchange(message, now)
        took_s = time.process_time() - began
        self.seq += len(events)
        self.taken = reply.last_taken_event
        self.ack = reply.seq + len(reply.actions) - 1
        self.running.extend(action.request_id for action in reply.actions if isinstance(action, Grant))
        return took_s


def add_engine(quota: Quota, name: str, now: float, slots: int = SLOTS, pool_tokens: int = POOL_TOKENS) -> None:
    """An engine starts and runs."""
    report = EngineReport(name, MODEL, (Rank("n"),), 1000, 1000, slots=slots)
    holds = quota.on_engine(report, now).holds
    quota.on_engine(replace(report, holds=holds, kv_tokens=pool_tokens), now)


def connected(
    devices: int, slots: int, pool_tokens: int, routers: int, running: int | None = None
) -> tuple[Quota, list[Router]]:
    """Engines of one model, one a device or only so many that run, and routers that have said what they reach."""
    engines = devices if running is None else running
    quota = Quota(1, {}, 0.0)
    quota.on_devices([Device("n", number, 1000, 0) for number in range(devices)], 0.0)
    names = [f"e{number}" for number in range(engines)]
    for name in names:
        add_engine(quota, name, 0.0, slots, pool_tokens)
    found = [Router(f"r{number}", names) for number in range(routers)]
    for router in found:
        router.say(quota, router.first, 0.0)
    return quota, found


def full_queue() -> tuple[Quota, list[Router]]:
    """Engines that are full, and a line before them."""
    quota, routers = connected(ENGINES, SLOTS, POOL_TOKENS, ROUTERS)
    for router in routers:
        for _ in range(WAITING + ENGINES * SLOTS // ROUTERS):
            router.say(quota, (router.arrive(),), 0.0)
    return quota, routers


def measure(events: int, batch: int) -> dict[str, float]:
    """Events a second, and what a message takes."""
    quota, routers = full_queue()
    spans: list[float] = []
    done = 0
    now = 0.0
    for router in itertools.cycle(routers):
        if done >= events:
            break
        now += batch * 2e-5
        step: list[messages.RouterEvent] = []
        while len(step) < batch:
            step.append(router.end() if router.running and len(step) % 2 == 0 else router.arrive())
        spans.append(router.say(quota, tuple(step), now))
        done += len(step)
    spans.sort()
    return {
        "events_per_s": round(done / sum(spans)),
        "message_p50_us": round(spans[len(spans) // 2] * 1e6, 1),
        "message_p99_us": round(spans[int(len(spans) * 0.99)] * 1e6, 1),
    }


def submit(quota: Quota, router: Router, count: int) -> list[float]:
    """A router submits requests in full messages; the seconds of each."""
    return [router.say(quota, tuple(router.arrive() for _ in range(BATCH)), 0.0) for _ in range(-(-count // BATCH))]


def timed(act: Callable[[], object]) -> float:
    began = time.process_time()
    act()
    return time.process_time() - began


def ticks(quota: Quota, now: float) -> Iterator[float]:
    """The actor's tick, and those that it asks for at once; the seconds of each."""
    yield timed(partial(quota.on_tick, now))
    for _ in range(MAX_TICKS):
        due = quota.queue.next_due()
        if due is None or due > now:
            return
        yield timed(partial(quota.queue.on_tick, now))


def scale_up() -> Iterator[float]:
    """An engine starts before a long queue, and the router that has none there reports it first."""
    quota, routers = connected(ENGINES + 1, SLOTS, POOL_TOKENS, ROUTERS, running=ENGINES)
    for router in routers[:-1]:
        submit(quota, router, LARGE_WAITING // (ROUTERS - 1))
    name = f"e{ENGINES}"
    yield timed(partial(add_engine, quota, name, 1.0))
    for router in reversed(routers):
        yield router.say(quota, (messages.EngineReachability(MODEL, name, True),), 1.0)
        yield from ticks(quota, 1.0)


def recovery() -> Iterator[float]:
    """A new actor reads what was stored; routers report, and submit what waits."""
    before, routers = connected(LARGE_ENGINES, SLOTS, POOL_TOKENS, ROUTERS)
    stored = {key: value for key, (is_kept, value) in before.changes().items() if is_kept}
    quota = Quota(2, stored, 0.0)
    devices = [Device("n", number, 1000, 0) for number in range(LARGE_ENGINES)]
    yield timed(partial(quota.on_devices, devices, 0.0))
    for router in [Router(one.name, [f"e{number}" for number in range(LARGE_ENGINES)]) for one in routers]:
        yield router.say(quota, router.first, 0.0)
        yield from submit(quota, router, LARGE_REQUESTS // ROUTERS)
    for report in [value for value in stored.values() if isinstance(value, EngineReport)]:
        quota.on_engine(report, 1.0)
    yield from ticks(quota, 1.0)


def router_end() -> Iterator[float]:
    """A router with many requests begins anew under its name; then another one is gone."""
    quota, (ends, other) = connected(END_ENGINES, SLOTS, POOL_TOKENS, 2)
    submit(quota, ends, LARGE_REQUESTS)
    submit(quota, other, LARGE_REQUESTS // 2)
    message = RouterMessage(ends.name, 2, quota.epoch, 1, ends.first, 0, 0)
    yield timed(partial(quota.on_exchange, message, 0.1))
    yield from ticks(quota, 0.1)
    quota.ledger.leave(other.name)  # it was silent for too long
    yield from ticks(quota, 0.2)


def longest_ms() -> dict[str, float]:
    """The longest part of each of the largest events."""
    gc.disable()
    found = {event.__name__: round(1000 * max(event()), 2) for event in (scale_up, recovery, router_end)}
    gc.enable()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer events")
    options = parser.parse_args()
    console = Console(stderr=True)
    conditions = here()
    console.print(conditions)
    by_batch: dict[str, Any] = {}
    table = Table("events a message", "events/s", "message p50 us", "p99 us", title=f"{ROUTERS} routers")
    for batch in BATCHES:
        found = by_batch[str(batch)] = measure(QUICK_EVENTS if options.quick else EVENTS, batch)
        table.add_row(str(batch), *(f"{found[key]}" for key in ("events_per_s", "message_p50_us", "message_p99_us")))
    console.print(table)
    longest = longest_ms()
    console.print(f"longest parts of the largest events, ms (bar {LONGEST_BAR_MS:g}): {longest}", highlight=False)
    write_json({"line_events_per_s": by_batch, "longest_ms": longest, "conditions": conditions})


if __name__ == "__main__":
    main()
