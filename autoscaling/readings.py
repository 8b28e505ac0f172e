"""Reads the numbers that routers and engine replicas report to Serve from Serve's series.

A series is a list of points with `timestamp` (seconds, the reporter's clock) and `value`, oldest first. A value that is
not a finite number of at least zero counts as missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autoscaling.policies import ClassSignals, merged
from serve_app.names import (
    BLOCKED_PREFIX,
    CLASS_FORECAST_S,
    CLASS_GRANTED,
    CLASS_IN_TIME,
    CLASS_OLDEST_WAIT_S,
    CLASS_WAITING,
    GRANTED_PREFIX,
    IN_TIME_PREFIX,
    KV_USE,
    ONGOING,
    ROWS_PREFIX,
    SLOT_USE,
    SLOTS,
    START_S,
    TOKENS_ARRIVED_PREFIX,
    TOKENS_SERVED_PREFIX,
    TOKENS_WAITING_PREFIX,
    WAITING_PREFIX,
    class_prefix,
    deployment_of,
)
from serve_app.types import RequestClass

Series = Any  # list[TimeStampedValue], private in Serve
Raw = Mapping[str, Mapping[Any, Series]]  # number -> replica -> series


@dataclass(frozen=True, slots=True)
class RouterCounts:
    """One model's requests in all `routers` that reported.

    `rows`: those that are no load. `in_time`: of those that wait, the ones that start within their class's level.
    `classes`, `waiting_tokens`, `arrived_tokens_s`, `served_tokens_s`: see `Signals`.
    `blocked`: its replicas that wait for memory. Each router has this number from the
    quota actor, so it is the maximum, not the sum.
    """

    waiting: float = 0.0
    granted: float = 0.0
    routers: frozenset[Hashable] = frozenset()
    blocked: float = 0.0
    rows: float = 0.0
    in_time: float = 0.0
    classes: tuple[ClassSignals, ...] = ()
    waiting_tokens: float = 0.0
    arrived_tokens_s: float = 0.0
    served_tokens_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """What one deployment's usable engine replicas report: the running requests that are load, and in the mean how many
    could run at once, the seconds of a start, and the shares of the KV cache and of the slots in use; 0: none has
    reported it."""

    executing: float
    slots: float
    start_s: float
    kv_use: float
    slot_use: float


def newest(series: Series) -> float | None:
    """The value of the last point; None without a point."""
    return count(series[-1].value) if series else None


def count(value: Any) -> float | None:
    """The value as a count; None if it is not one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        return None
    return float(value)


def router_counts(raw: Raw, usable: Callable[[Hashable], bool]) -> dict[str, RouterCounts]:
    """The usable routers' requests, by engine deployment. A router counts for a model if it reported both numbers."""
    found: dict[str, RouterCounts] = {}
    for name, waiting_of in raw.items():
        if not name.startswith(WAITING_PREFIX):
            continue
        model = name.removeprefix(WAITING_PREFIX)
        granted_of = raw.get(f"{GRANTED_PREFIX}{model}", {})
        of_routers: dict[Hashable, tuple[float, float]] = {}
        for router, series in waiting_of.items():
            waiting = newest(series)
            granted = newest(granted_of.get(router))
            if waiting is not None and granted is not None and usable(router):
                of_routers[router] = (waiting, granted)
        blocked_of = raw.get(f"{BLOCKED_PREFIX}{model}", {})
        rows_of = raw.get(f"{ROWS_PREFIX}{model}", {})
        in_time_of = raw.get(f"{IN_TIME_PREFIX}{model}", {})
        newest_at = {router: waiting_of[router][-1].timestamp for router in of_routers}
        found[deployment_of(model)] = RouterCounts(
            sum(waiting for waiting, _ in of_routers.values()),
            sum(granted for _, granted in of_routers.values()),
            frozenset(of_routers),
            max((newest(blocked_of.get(router)) or 0.0 for router in of_routers), default=0.0),
            # between two turns of the queue a row can be in neither of its router's other counts
            sum(min(newest(rows_of.get(router)) or 0.0, sum(numbers)) for router, numbers in of_routers.items()),
            sum(min(newest(in_time_of.get(router)) or 0.0, waiting) for router, (waiting, _) in of_routers.items()),
            _classes(raw, model, newest_at),
            *(
                math.fsum(_of_newest_reports(raw, f"{prefix}{model}", newest_at).values())
                for prefix in (TOKENS_WAITING_PREFIX, TOKENS_ARRIVED_PREFIX, TOKENS_SERVED_PREFIX)
            ),
        )
    return found


def _classes(raw: Raw, model: str, newest_at: Mapping[Hashable, float]) -> tuple[ClassSignals, ...]:
    """The classes of a model that have requests in these routers, from the highest."""

    def reported(level: RequestClass, number: str) -> dict[Hashable, float]:
        return _of_newest_reports(raw, f"{class_prefix(level.label, number)}{model}", newest_at)

    parts = []
    for level in reversed(RequestClass):
        waiting = reported(level, CLASS_WAITING)
        granted = reported(level, CLASS_GRANTED)
        if not waiting and not granted:
            continue
        in_time = reported(level, CLASS_IN_TIME)
        forecast_s = reported(level, CLASS_FORECAST_S)
        oldest_s = reported(level, CLASS_OLDEST_WAIT_S)
        for router in waiting.keys() | granted.keys():
            count = waiting.get(router, 0.0)
            on_replicas = granted.get(router, 0.0)
            early = min(in_time.get(router, 0.0), count)
            wait_s = forecast_s.get(router)
            parts.append(ClassSignals(level.label, count, on_replicas, early, wait_s, oldest_s.get(router, 0.0)))
    return merged(parts)


def _of_newest_reports(raw: Raw, name: str, newest_at: Mapping[Hashable, float]) -> dict[Hashable, float]:
    """By router, a number of its newest report. What that report lacks is zero by now, but Serve keeps what was
    reported before for the look-back."""
    series_of = raw.get(name)
    if series_of is None:
        return {}
    found: dict[Hashable, float] = {}
    for router, at in newest_at.items():
        series: Series = series_of.get(router) or ()
        value = newest(series)
        if value is not None and series[-1].timestamp == at:
            found[router] = value
    return found


def engine_figures(raw: Raw, usable: Callable[[Hashable], bool]) -> EngineFigures:
    """What the usable engine replicas of one deployment report."""

    def reported(name: str) -> list[float]:
        numbers = (newest(series) for replica, series in raw.get(name, {}).items() if usable(replica))
        return [number for number in numbers if number is not None]

    def mean(numbers: Collection[float]) -> float:
        return math.fsum(numbers) / max(1, len(numbers))

    return EngineFigures(
        sum(reported(ONGOING)),
        mean(reported(SLOTS)),
        mean(reported(START_S)),
        mean([min(1.0, share) for share in reported(KV_USE)]),
        mean([min(1.0, share) for share in reported(SLOT_USE)]),
    )


def latest_reports(raw: Raw) -> Iterable[tuple[Hashable, float]]:
    """Every replica with a report, and the timestamp of its newest point, by its own clock."""
    latest: dict[Hashable, float] = {}
    for series_of in raw.values():
        for replica, series in series_of.items():
            at = count(series[-1].timestamp) if series else None
            if at is not None:
                latest[replica] = max(at, latest.get(replica, 0.0))
    return latest.items()
