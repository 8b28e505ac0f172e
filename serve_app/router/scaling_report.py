"""What a router reports to Serve for scaling: the numbers of its models, by name.

A number of a class is reported only where it is not zero, so there are as many names as classes have requests. A name
that is missing in the newest report is zero or not known, whatever Serve still keeps of it (`autoscaling.readings`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from serve_app.core.receipts import ServiceLevel
from serve_app.core.shared_queue import ClassCounts
from serve_app.names import (
    BLOCKED_PREFIX,
    CLASS_FORECAST_S,
    CLASS_GRANTED,
    CLASS_IN_TIME,
    CLASS_OLDEST_WAIT_S,
    CLASS_WAITING,
    GRANTED_PREFIX,
    IN_TIME_PREFIX,
    ROWS_PREFIX,
    TOKENS_ARRIVED_PREFIX,
    TOKENS_SERVED_PREFIX,
    TOKENS_WAITING_PREFIX,
    WAITING_PREFIX,
    class_prefix,
)
from serve_app.router.model_router import ModelRouter
from serve_app.types import RequestClass


def scaling_report(
    models: Mapping[str, ModelRouter], levels: Mapping[RequestClass, ServiceLevel], now: float
) -> dict[str, float]:
    """All numbers, of one moment: a request just granted must not be reported as both, or as neither.

    Args:
        models: by name.
        levels: of the classes that have one.
        now: seconds of the clock of the queues.
    """
    found: dict[str, float] = {}
    for name, model in models.items():
        queue = model.queue
        classes = queue.by_class(levels, now)
        rates = model.token_rates(now)
        found[f"{WAITING_PREFIX}{name}"] = model.waiting
        found[f"{GRANTED_PREFIX}{name}"] = queue.granted
        found[f"{ROWS_PREFIX}{name}"] = model.active[False]
        found[f"{IN_TIME_PREFIX}{name}"] = sum(counts.in_time for counts in classes)
        found[f"{BLOCKED_PREFIX}{name}"] = queue.blocked
        found[f"{TOKENS_WAITING_PREFIX}{name}"] = queue.waiting_tokens
        found[f"{TOKENS_ARRIVED_PREFIX}{name}"] = rates.arrived
        found[f"{TOKENS_SERVED_PREFIX}{name}"] = rates.served
        found |= class_numbers(name, classes)
    return found


def class_numbers(model: str, classes: Iterable[ClassCounts]) -> dict[str, float]:
    """The numbers of a model's classes that are not zero; a forecast of zero seconds is one."""
    found: dict[str, float] = {}
    for counts in classes:
        label = counts.request_class.label
        numbers = {
            CLASS_WAITING: counts.waiting or None,
            CLASS_GRANTED: counts.granted or None,
            CLASS_IN_TIME: counts.in_time or None,
            CLASS_FORECAST_S: counts.forecast_s,
            CLASS_OLDEST_WAIT_S: counts.oldest_wait_s or None,
        }
        for number, value in numbers.items():
            if value is not None:
                found[f"{class_prefix(label, number)}{model}"] = value
    return found
