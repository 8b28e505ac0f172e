"""The numbers that routers and engine replicas report to Serve, out of the series Serve keeps of them.

A series is a list of points with `timestamp` (seconds, the reporter's clock) and `value`, oldest first. What is not a
finite number from zero up is no number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.names import BLOCKED_PREFIX, GRANTED_PREFIX, ONGOING, WAITING_PREFIX, deployment_of

Series = Any  # list[TimeStampedValue], private in Serve
Raw = Mapping[str, Mapping[Any, Series]]  # number -> replica -> series


@dataclass(frozen=True, slots=True)
class RouterCounts:
    """One model's requests in all routers that told; `routers` are those.

    `blocked`: its replicas that wait for memory. Each router has it from the quota actor: the largest, not the sum.
    """

    waiting: float = 0.0
    granted: float = 0.0
    routers: frozenset[Hashable] = frozenset()
    blocked: float = 0.0


def newest(series: Series) -> float | None:
    """The value of the last point; None when there is none."""
    return count(series[-1].value) if series else None


def told_at(series: Series) -> float | None:
    """The moment of the last point, by the reporter's clock; None when there is none."""
    return count(series[-1].timestamp) if series else None


def count(value: Any) -> float | None:
    """The value as a count, None when it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        return None
    return float(value)


def router_counts(raw: Raw, usable: Callable[[Hashable], bool]) -> dict[str, RouterCounts]:
    """What the usable routers hold, by engine deployment. A router counts for a model when it has told both numbers."""
    found: dict[str, RouterCounts] = {}
    for name, waiting_of in raw.items():
        if not name.startswith(WAITING_PREFIX):
            continue
        model = name.removeprefix(WAITING_PREFIX)
        granted_of = raw.get(f"{GRANTED_PREFIX}{model}", {})
        told: dict[Hashable, tuple[float, float]] = {}
        for router, series in waiting_of.items():
            waiting, granted = newest(series), newest(granted_of.get(router))
            if waiting is not None and granted is not None and usable(router):
                told[router] = (waiting, granted)
        blocked_of = raw.get(f"{BLOCKED_PREFIX}{model}", {})
        found[deployment_of(model)] = RouterCounts(
            sum(waiting for waiting, _ in told.values()),
            sum(granted for _, granted in told.values()),
            frozenset(told),
            max((newest(blocked_of.get(router)) or 0.0 for router in told), default=0.0),
        )
    return found


def executing(raw: Raw, usable: Callable[[Hashable], bool]) -> float:
    """Requests the usable engine replicas of one deployment say they run."""
    told = (newest(series) for replica, series in raw.get(ONGOING, {}).items() if usable(replica))
    return sum(number for number in told if number is not None)


def replicas_in(raw: Raw) -> Iterable[tuple[Hashable, float]]:
    """Every replica that has told anything, and the moment of its newest point, by its own clock."""
    latest: dict[Hashable, float] = {}
    for series_of in raw.values():
        for replica, series in series_of.items():
            at = told_at(series)
            if at is not None:
                latest[replica] = max(at, latest.get(replica, 0.0))
    return latest.items()
