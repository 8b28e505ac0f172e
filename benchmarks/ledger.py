"""What the ledger of GPU memory costs: `python -m benchmarks.ledger [--quick] [--without-actor]`.

Three parts:
- operations: the pure ledger with 1,000 engines and 100,000 live leases, each operation timed by itself (reserve, grow,
  end, heartbeat, and `expire` as the quota actor's tick calls it), in a steady state; and charges of a pool and their
  return.
- the actor: routers' messages through the real quota actor on a local Ray of its own; an event is what a message says
  of one engine's pool, a batch is a message. Every event changes what the router has, so that nothing is answered from
  memory: credit is returned and asked for again.
- openb: the placement policies on a real cluster's trace (`benchmarks.openb`).

Prints conditions, tables, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from rich.console import Console
from rich.table import Table

from benchmarks.common.conditions import here
from benchmarks.common.output import write_json
from benchmarks.common.stats import quantile_us
from benchmarks.openb import main as openb
from serve_app.core.memory import Device, EngineReport, Hold, LeaseKind, Ledger, Rank
from serve_app.core.pools import Holder
from serve_app.core.queue import QueuePolicy
from serve_app.core.shared_queue import messages
from serve_app.quota import QuotaActor
from serve_app.settings import QuotaSettings

ENGINES = 1_000
LEASES = 100_000
ROUTERS = 16
POOL_TOKENS = 1_000_000
SLOTS = 64
DEVICE_BYTES = 80 * 10**9
OPERATIONS = 1_000_000
QUICK_OPERATIONS = 200_000
TTL_S = 4.0
TICK_OPERATIONS = 10_000  # between two looks for what has expired: half a second at 20,000 events a second
# engines that a router speaks of in one word, and routers that speak at once
POOLS = 64
WORDS_AT_ONCE = 8
ACTOR_S = 20.0
QUICK_ACTOR_S = 5.0


def full_ledger(draw: random.Random) -> tuple[Ledger, list[str]]:
    """A ledger with everything in it; returns the ids of the sessions, too."""
    book = Ledger()
    for number in range(ENGINES):
        book.add_device(Device(f"node-{number // 8}", number % 8, DEVICE_BYTES))
        book.join(f"engine-{number}", TTL_S, 0.0)
        book.reserve(
            f"engine-{number}",
            LeaseKind.ENGINE,
            f"engine-{number}",
            [Hold(f"node-{number // 8}/{number % 8}", 70 * 10**9)],
        )
        book.commit(f"engine-{number}", POOL_TOKENS)
        book.open_pool(f"engine-{number}", SLOTS)
    for router in range(ROUTERS):
        book.join(f"router-{router}", TTL_S, 0.0)
    sessions = []
    for number in range(LEASES - ENGINES):
        session = f"session-{number}"
        on = Hold(f"engine-{draw.randrange(ENGINES)}", draw.randint(1, 2_000))
        book.reserve(session, LeaseKind.SESSION, f"router-{number % ROUTERS}", [on])
        sessions.append(session)
    return book, sessions


def operations(count: int, seed: int) -> dict[str, Any]:
    """Times of the ledger's operations in microseconds, by operation, and operations per second of all together."""
    draw = random.Random(seed)
    book, sessions = full_ledger(draw)
    ids = itertools.count(len(sessions))
    holders = {f"router-{number}": Holder(f"router-{number}") for number in range(ROUTERS)}
    names = ("reserve", "grow", "end", "heartbeat", "charge", "give_back", "tick")
    times: dict[str, list[int]] = {name: [] for name in names}
    clock = time.perf_counter_ns

    def timed(name: str, act: Callable[[], Any]) -> None:
        began = clock()
        act()
        times[name].append(clock() - began)

    now = 0.0
    began = clock()
    for step in range(count // 6):
        now += 2e-4
        victim = draw.randrange(len(sessions))
        session = f"session-{next(ids)}"
        owner = f"router-{step % ROUTERS}"
        hold = Hold(f"engine-{draw.randrange(ENGINES)}", draw.randint(1, 2_000))
        timed("end", partial(book.end, sessions[victim]))
        timed("reserve", partial(book.reserve, session, LeaseKind.SESSION, owner, [hold]))
        sessions[victim] = session
        timed("grow", partial(book.resize, session, [hold.amount + 64], growth=True))
        pool = book.pool(hold.on)
        assert pool is not None
        timed("charge", partial(pool.charge, holders[owner], 1, 64))
        timed("give_back", partial(pool.give_back, holders[owner], 1, 64))
        timed("heartbeat", partial(book.heartbeat, f"engine-{step % ENGINES}" if step % 2 else owner, now))
        if step % (TICK_OPERATIONS // 6) == 0:
            for lease_owner in list(book.lease_owners):  # nobody falls silent here
                book.heartbeat(lease_owner, now)
            timed("tick", partial(book.expire, now))
    elapsed_s = (clock() - began) / 1e9
    assert sum(1 for _ in book.leases()) == LEASES
    every = [span for name, spans in times.items() if name != "tick" for span in spans]
    return {
        "ops_per_s": round(len(every) / elapsed_s),
        "op_p50_us": quantile_us(every, 0.5),
        "op_p99_us": quantile_us(every, 0.99),
        "by_operation": {
            name: {"p50_us": quantile_us(spans, 0.5), "p99_us": quantile_us(spans, 0.99)}
            for name, spans in times.items()
        },
    }


@contextmanager
def local_ray() -> Iterator[None]:
    """A Ray of our own on this machine."""
    with tempfile.TemporaryDirectory(prefix="ledger-") as folder:
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        try:
            yield
        finally:
            ray.shutdown()


async def speak(seconds: float) -> tuple[int, float]:
    """Routers speak as fast as they are answered; returns events and the seconds they took."""
    actor = QuotaActor(QuotaSettings()).actor.find()
    node = ray.get_runtime_context().get_node_id()
    pools = [f"engine-{number}" for number in range(POOLS)]

    async def engine(name: str) -> None:
        report = EngineReport(name, "m", (Rank(node),), 10**6, 10**6, slots=SLOTS)
        reply = await actor.engine.remote(report)
        for _ in range(2 * POOLS):
            if reply.may_load:
                break
            reply = await actor.engine.remote(report)
        await actor.engine.remote(replace(report, holds=reply.holds, kv_tokens=POOL_TOKENS))

    for name in pools:
        await engine(name)
    ends = time.monotonic() + seconds
    beats = asyncio.create_task(keep_alive(actor, node, pools, ends))
    began = time.monotonic()
    events = await asyncio.gather(*(router(actor, f"router-{number}", pools, ends) for number in range(WORDS_AT_ONCE)))
    took_s = time.monotonic() - began
    await beats
    return sum(events), took_s


async def keep_alive(actor: Any, node: str, pools: list[str], ends: float) -> None:
    """The engines' heartbeats."""
    while time.monotonic() < ends:
        for name in pools:
            holds = (Hold(f"{node}/0", 10**6),)
            report = EngineReport(name, "m", (Rank(node),), 10**6, 10**6, holds, POOL_TOKENS, slots=SLOTS)
            await actor.engine.remote(report)
        await asyncio.sleep(1.0)


async def router(actor: Any, name: str, pools: list[str], ends: float) -> int:
    """One router's messages, which return half of its credit on every engine and ask for it again; returns how many
    events they were."""
    policy = messages.ModelPolicy("m", QueuePolicy(max_queued=10, max_wait_s=60.0))
    reaches = (messages.EngineReachability("m", pool, True) for pool in pools)
    first: tuple[messages.RouterEvent, ...] = (messages.Hello(()), policy, *reaches)
    events = first
    has: dict[str, tuple[int, int]] = {}
    epoch = count = incarnation = taken = ack = 0
    seq = 1
    while time.monotonic() < ends:
        message = messages.RouterMessage(name, incarnation, epoch, seq, events, taken, ack)
        reply: messages.ActorReply = await actor.exchange.remote(message)
        if reply.is_stale:  # at first the epoch is not known; later, this process was too slow for the actor
            epoch = reply.epoch
            incarnation += 1
            seq = 1
            taken = 0
            ack = 0
            events = first
            has = {}
            continue
        count += len(events)
        seq += len(events)
        taken = reply.last_taken_event
        ack = reply.seq + len(reply.actions) - 1
        for action in reply.actions:
            if isinstance(action, messages.CreditGrant):
                had_slots, had_tokens = has.get(action.engine, (0, 0))
                has[action.engine] = had_slots + action.slots, had_tokens + action.tokens
        if isinstance(events[0], messages.CreditRequest):
            events = tuple(messages.GiveBack(pool, slots // 2, tokens // 2) for pool, (slots, tokens) in has.items())
            has = {pool: (slots - slots // 2, tokens - tokens // 2) for pool, (slots, tokens) in has.items()}
        else:
            events = tuple(messages.CreditRequest(pool, *has.get(pool, (0, 0))) for pool in pools)
    return count


def show(console: Console, result: dict[str, Any]) -> None:
    """Tables of what was measured."""
    table = Table("operation", "p50 us", "p99 us", title=f"{ENGINES} engines, {LEASES} leases")
    for name, spans in result["by_operation"].items():
        table.add_row(name, f"{spans['p50_us']}", f"{spans['p99_us']}")
    table.add_row("all but tick", f"{result['op_p50_us']}", f"{result['op_p99_us']}")
    console.print(table)
    console.print(f"{result['ops_per_s']} operations/s", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer operations, seconds and seeds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--without-actor", action="store_true", help="leave out what needs Ray")
    options = parser.parse_args()
    console = Console(stderr=True)
    conditions = here(seed=options.seed)
    console.print(conditions)
    result = operations(QUICK_OPERATIONS if options.quick else OPERATIONS, options.seed)
    show(console, result)
    if not options.without_actor:
        with local_ray():
            events, took_s = asyncio.run(speak(QUICK_ACTOR_S if options.quick else ACTOR_S))
        result["actor_events_per_s"] = round(events / took_s)
        console.print(
            f"{result['actor_events_per_s']} events/s through the actor, {POOLS} a batch, {WORDS_AT_ONCE} routers",
            highlight=False,
        )
    try:
        plan = openb.Plan(openb.QUICK_SEEDS, openb.QUICK_WARMUP, openb.QUICK_WINDOW) if options.quick else openb.Plan()
        found = openb.run(plan, say=console.print)
        openb.show(console, found)
        result["openb"] = found["openb"]
    except openb.TraceMissingError as missing:
        console.print(f"openb skipped: {missing}", style="yellow")
    write_json({**result, "conditions": conditions})


if __name__ == "__main__":
    main()
