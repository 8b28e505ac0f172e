"""One model's requests in one router, by class, with the forecast that the quota actor's figures give.

Invariant: the sums over the classes are what the router's queue counts as waiting and as granted; of a class, at most
what waits starts in time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from serve_app.core.receipts import ServiceLevel
from serve_app.core.shared_queue.messages import QueueFigures
from serve_app.core.shared_queue.router_pending import PendingRequests
from serve_app.core.shared_queue.router_running import InFlight
from serve_app.types import RequestClass


class ClassCounts(NamedTuple):
    """One class with requests.

    Args:
        waiting, granted: requests in the router's queue, and on engine replicas.
        in_time: of those that wait, the requests that start within the level of their class.
        forecast_s: seconds until the last waiting one of all routers starts; None: not known, or none waits.
        oldest_wait_s: seconds for which the longest waiting one has waited; 0: none waits.
    """

    request_class: RequestClass
    waiting: int
    granted: int
    in_time: float = 0.0
    forecast_s: float | None = None
    oldest_wait_s: float = 0.0


def class_counts(
    model: str,
    pending: PendingRequests,
    in_flight: InFlight,
    figures: QueueFigures | None,
    levels: Mapping[RequestClass, ServiceLevel],
    now: float,
) -> tuple[ClassCounts, ...]:
    """The classes of a model that have requests, from the highest. O(requests of the model that run).

    Args:
        figures: of all routers' queue; None: not known.
        levels: of the classes that have one.
    """
    waiting = pending.count_by_class(model)
    granted = in_flight.count_by_class(model)
    found = []
    for level in reversed(RequestClass):
        count = waiting[level]
        if count:
            wait_s = forecast_s(figures, level)
            in_time = starts_in_time(count, wait_s, levels.get(level))
            oldest_s = pending.oldest_wait_s(model, level, now)
            found.append(ClassCounts(level, count, granted[level], in_time, wait_s, oldest_s))
        elif granted[level]:
            found.append(ClassCounts(level, 0, granted[level]))
    return tuple(found)


def forecast_s(figures: QueueFigures | None, request_class: RequestClass) -> float | None:
    """Seconds until the last waiting request of a class starts, by the quota actor's figures; None: not known."""
    if figures is None:
        return None
    backlog = figures.classes[request_class].backlog
    return backlog.wait_s(backlog.slots)


def starts_in_time(waiting: int, wait_s: float | None, level: ServiceLevel | None) -> float:
    """The waiting requests of a class that start within its level for the first token.

    A class drains evenly, so of one whose last request starts after twice its level half are in time. Without a level
    or a forecast (`wait_s`), none is known to be.
    """
    if wait_s is None or level is None or level.ttft_s is None:
        return 0.0
    return float(waiting) if wait_s <= level.ttft_s else waiting * level.ttft_s / wait_s
