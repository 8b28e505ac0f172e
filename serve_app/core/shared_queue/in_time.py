"""How many of a router's waiting requests start in time, by the forecast that the quota actor's figures give."""

from __future__ import annotations

from collections.abc import Mapping

from serve_app.core.receipts import ServiceLevel
from serve_app.core.shared_queue.messages import QueueFigures
from serve_app.types import RequestClass


def in_time(
    waiting: Mapping[RequestClass, int], figures: QueueFigures | None, levels: Mapping[RequestClass, ServiceLevel]
) -> float:
    """The requests that start within their class's level for the first token.

    A class drains evenly, so of one whose last request starts after twice its level half are in time. Without a level,
    or without figures of the model, none is known to be.

    Args:
        waiting: by class.
        figures: of all routers' queue.
    """
    if figures is None:
        return 0.0
    found = 0.0
    for request_class, count in waiting.items():
        level = levels.get(request_class)
        if not count or level is None or level.ttft_s is None:
            continue
        backlog = figures.classes[request_class].backlog
        wait_s = backlog.wait_s(backlog.slots)
        if wait_s is not None:
            found += count if wait_s <= level.ttft_s else count * level.ttft_s / wait_s
    return found
