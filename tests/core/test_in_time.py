"""How many waiting requests start within their class's level."""

from __future__ import annotations

import pytest

from serve_app.core.queue import Backlog
from serve_app.core.receipts import ServiceLevel
from serve_app.core.shared_queue.class_counts import forecast_s, starts_in_time
from serve_app.core.shared_queue.messages import ClassQueueFigures, QueueFigures
from serve_app.types import RequestClass

NORMAL = RequestClass.NORMAL


def figures(slots: int, slots_per_s: float | None) -> QueueFigures:
    """A queue in which the requests of the normal class wait for so many slots."""
    waiting = ClassQueueFigures(slots, False, Backlog(0, slots, 1.0, 0.0, slots_per_s), None)
    none = ClassQueueFigures(0, False, Backlog(0, 0, 0.0, 0.0, slots_per_s), None)
    return QueueFigures(1, "m", tuple(waiting if level is NORMAL else none for level in RequestClass))


@pytest.mark.parametrize(
    ("rate", "level_s", "expected"), [(10.0, 5.0, 8.0), (10.0, 4.0, 8.0), (10.0, 2.0, 4.0), (10.0, 1.0, 2.0)]
)
def test_of_a_class_that_drains_evenly_the_first_part_is_in_time(rate: float, level_s: float, expected: float) -> None:
    """The last of 40 starts after four seconds; eight of them wait at this router."""
    wait_s = forecast_s(figures(40, rate), NORMAL)
    assert wait_s == 4.0
    assert starts_in_time(8, wait_s, ServiceLevel(level_s)) == pytest.approx(expected)


def test_what_is_not_known_counts_as_late() -> None:
    assert forecast_s(None, NORMAL) is None
    assert forecast_s(figures(40, None), NORMAL) is None
    assert starts_in_time(8, None, ServiceLevel(5.0)) == 0.0
    assert starts_in_time(8, 0.4, None) == 0.0
    assert starts_in_time(8, 0.4, ServiceLevel(None, 0.1)) == 0.0
