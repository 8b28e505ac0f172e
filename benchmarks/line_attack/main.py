"""What attacks on the waiting line do to others: `python -m benchmarks.line_attack [--quick]`.

In virtual time, on the pure cores (`benchmarks.line_attack.staying`, `benchmarks.line_attack.network`). Every case runs
with `SEEDS` seeds, and the worst is told. Bars in brackets.

    high_wait_p50_s_4x      64 slots, answers of 10 s, ten minutes, clients who stay: `high` asks for 30% of the
                            capacity, `normal` for 370%; the p50 wait of `high` [0.5]
    normal_wait_p50_s_batch the same of `normal` against a batch of `low` [1]
    starved                 windows of 60 s in which a class, or a tenant that waited throughout, got less than its part
                            less one request, over all `MIXES` [0]
    critical_behind_low_s   the longest wait of a `critical` on an engine that is empty but for a session's tokens,
                            beside which a `low` request does not fit [0.5]
    growth_hold_s           twenty answers of a `low` tenant outgrow short learned estimates; how long a `critical` that
                            comes then is held with 4 slots free [1]
    tick_us_20x200          CPU of the actor's core for a message, microseconds, at 20 routers and 200 engines while one
                            session waits [1,000]
    incarnations_9000       incarnations that 9,000 waiting requests of one router begin, with the actor there and with
                            it away while they arrive [2]
    resets_2000             incarnations begun with 2,000 running at 50 tokens/s and 20 ms a round trip [0]

Prints conditions, a table, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.conditions import here
from benchmarks.common.output import write_json
from benchmarks.line_attack.cases import critical_behind_low_s, growth_hold, incarnations, resets
from benchmarks.line_attack.staying import Crowd, Staying
from benchmarks.line_attack.tick_cost import tick_us
from serve_app.core.queue import QueuePolicy, TenantPolicy
from serve_app.settings import AdmissionSettings
from serve_app.types import RequestClass

LOW, NORMAL, HIGH, CRITICAL = RequestClass
DEFAULTS = AdmissionSettings()
SEEDS = 3
SPAN_S = 600.0
QUICK_SPAN_S = 300.0
TENANTS = 20  # of the crowd
LARGE = 32_000  # tokens
BARS = {
    "high_wait_p50_s_4x": 0.5,
    "normal_wait_p50_s_batch": 1.0,
    "starved": 0,
    "critical_behind_low_s": 0.5,
    "growth_hold_s": 1.0,
    "tick_us_20x200": 1000.0,
    "incarnations_9000": 2,
    "resets_2000": 0,
}


def people(level: RequestClass) -> list[Crowd]:
    """Four tenants who ask for 30% of the capacity: 40 clients, half of their time thinking."""
    return [Crowd(level, f"people-{number}", 10, think_s=10.0) for number in range(4)]


def crowd(level: RequestClass, tenants: int = TENANTS, clients: int = 12, tokens: int = 780) -> list[Crowd]:
    """Tenants who ask for 370% of it, 240 clients who never pause."""
    return [Crowd(level, f"crowd-{number}", clients, tokens) for number in range(tenants)]


def arriving(level: RequestClass, share: float, tenants: int) -> list[Crowd]:
    """Clients who come, at random, for one answer that they stay for; `share` of the capacity."""
    return [Crowd(level, f"new-{level.name}-{n}", 0, arrive_share=share / tenants) for n in range(tenants)]


def policy(tenants: dict[str, TenantPolicy] | None = None, max_wait_s: float = DEFAULTS.max_wait_s) -> QueuePolicy:
    """What a deployment has that sets nothing."""
    return QueuePolicy(
        DEFAULTS.max_queued, max_wait_s, guard_slots_share=DEFAULTS.guard_slots_share, tenants=tenants or {}
    )


def small(level: RequestClass, clients: int = 12) -> list[Crowd]:
    """Tenants of small requests beside a large one's."""
    return [Crowd(level, f"small-{number}", clients) for number in range(3)]


WEIGHTED = {"small-0": TenantPolicy(4.0), "large": TenantPolicy(2.0)}
MIXES: dict[str, tuple[list[Crowd], QueuePolicy, int | None]] = {
    "high before normal": ([*people(HIGH), *crowd(NORMAL)], policy(), None),
    "normal before a batch": ([*people(NORMAL), *crowd(LOW)], policy(), None),
    "three classes": ([*crowd(HIGH, 4, 20), *crowd(NORMAL), *crowd(LOW)], policy(), None),
    "four classes": ([*crowd(CRITICAL, 4, 20), *crowd(HIGH, 4), *crowd(NORMAL, 4), *crowd(LOW, 4)], policy(), None),
    "large heads below": ([*crowd(NORMAL), Crowd(LOW, "large", 4, LARGE), *small(LOW)], policy(), None),
    "large heads below, patient": (
        [*crowd(NORMAL), Crowd(LOW, "large", 4, LARGE), *small(LOW)],
        policy(max_wait_s=600.0),
        None,
    ),
    "large heads among equals": ([*people(HIGH), *crowd(NORMAL), Crowd(NORMAL, "large", 4, LARGE)], policy(), None),
    "weights": ([*crowd(NORMAL), Crowd(LOW, "large", 4, LARGE), *small(LOW)], policy(WEIGHTED), None),
    "tokens short": ([*crowd(NORMAL), Crowd(LOW, "large", 4, LARGE), *small(LOW)], policy(), 65_000),
}
QUICK_MIXES = ("three classes", "large heads below", "tokens short")


def wait_p50_s(above: RequestClass, below: RequestClass, span_s: float, seed: int) -> float:
    """The worse of two ways to stay: a closed loop, and newcomers who each wait for one answer."""
    loop = Staying([*people(above), *crowd(below)], policy(), seed)
    newcomers = Staying([*arriving(above, 0.3, 4), *arriving(below, 3.7, TENANTS)], policy(), seed)
    found = []
    for staying in (loop, newcomers):
        staying.run(span_s)
        waits = staying.waits(above)
        found.append(waits[len(waits) // 2])
    return max(found)


def starved(span_s: float, seed: int, names: tuple[str, ...]) -> dict[str, int]:
    """Windows by mix."""
    found = {}
    for name in names:
        crowds, bounds, kv_tokens = MIXES[name]
        staying = Staying(crowds, bounds, seed, kv_tokens)
        staying.run(span_s)
        found[name] = staying.starved()
    return found


def value_of(found: Any) -> float:
    """The figure itself of what a case says; of several runs their sum."""
    if not isinstance(found, dict):
        return float(found)
    return float(found["value"]) if "value" in found else sum(value_of(one) for one in found.values())


def measure(console: Console, quick: bool, only: list[str]) -> dict[str, Any]:
    """All figures, or those named; a case that fails is told as such, and the others run."""
    span_s = QUICK_SPAN_S if quick else SPAN_S
    mixes = QUICK_MIXES if quick else tuple(MIXES)
    cases: dict[str, Callable[[int], Any]] = {
        "high_wait_p50_s_4x": lambda seed: wait_p50_s(HIGH, NORMAL, span_s, seed),
        "normal_wait_p50_s_batch": lambda seed: wait_p50_s(NORMAL, LOW, span_s, seed),
        "starved": lambda seed: starved(span_s, seed, mixes),
        "critical_behind_low_s": critical_behind_low_s,
        "growth_hold_s": growth_hold,
        "tick_us_20x200": lambda seed: tick_us(seed, quick),
        "incarnations_9000": incarnations,
        "resets_2000": resets,
    }
    result: dict[str, Any] = {}
    by_seed: dict[str, list[Any]] = {}
    table = Table("figure", "worst", "bar", "by seed", title=f"{SEEDS} seeds")
    for name in only or cases:
        found = by_seed[name] = [cases[name](seed) for seed in range(1, SEEDS + 1)]
        values = [value_of(one) for one in found]
        result[name] = max(values)
        met = "met" if result[name] <= BARS[name] else "MISSED"
        console.print(f"{name}: {found}", highlight=False)
        table.add_row(
            name, f"{result[name]:g}", f"at most {BARS[name]:g}: {met}", " ".join(f"{one:g}" for one in values)
        )
    console.print(table)
    return {**result, "by_seed": by_seed, "bars": BARS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="five minutes instead of ten, and fewer mixes")
    parser.add_argument("--only", help="some of the figures, by name, comma separated")
    options = parser.parse_args()
    only = options.only.split(",") if options.only else []
    if unknown := set(only) - BARS.keys():
        parser.error(f"no figure is named {', '.join(sorted(unknown))}")
    console = Console(stderr=True, width=140)
    conditions = here()
    console.print(conditions)
    write_json({**measure(console, options.quick, only), "conditions": conditions})
