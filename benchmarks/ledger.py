"""What the ledger of GPU memory costs: `python -m benchmarks.ledger [--quick]`.

The pure ledger with 1,000 engines and 100,000 live leases, each operation timed by itself (reserve, grow, end,
heartbeat, and `expire` as the quota actor's tick calls it), in a steady state; and charges of a pool and their return.
What a message costs the actor: `benchmarks.exchange`; the placement policies on a real cluster's trace:
`benchmarks.openb`.

Prints conditions, a table, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.conditions import here
from benchmarks.common.output import write_json
from benchmarks.common.stats import quantile_us
from serve_app.core.memory import Device, Hold, LeaseKind, Ledger
from serve_app.core.pools import Holder

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


def show(console: Console, result: dict[str, Any]) -> None:
    """A table of what was measured."""
    table = Table("operation", "p50 us", "p99 us", title=f"{ENGINES} engines, {LEASES} leases")
    for name, spans in result["by_operation"].items():
        table.add_row(name, f"{spans['p50_us']}", f"{spans['p99_us']}")
    table.add_row("all but tick", f"{result['op_p50_us']}", f"{result['op_p99_us']}")
    console.print(table)
    console.print(f"{result['ops_per_s']} operations/s", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer operations")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    console = Console(stderr=True)
    conditions = here(seed=options.seed)
    console.print(conditions)
    result = operations(QUICK_OPERATIONS if options.quick else OPERATIONS, options.seed)
    show(console, result)
    write_json({**result, "conditions": conditions})


if __name__ == "__main__":
    main()
