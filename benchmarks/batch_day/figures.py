"""The figures of a day: by hour, and as a whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.batch_day.plan import FIRST_HOUR, HOUR_S
from benchmarks.batch_day.world import BIN_S, DAY_S, Model, Waited
from serve_app.types import RequestClass

LEVELS = (RequestClass.HIGH, RequestClass.NORMAL)
BINS_AN_HOUR = round(HOUR_S / BIN_S)


@dataclass(frozen=True, slots=True)
class Hour:
    """One hour of one model: slots on average, requests of people with their waits, and the rows that ended."""

    hour: int  # of the clock
    slots: float
    people: float
    rows: float
    asked: int
    wait_p99_s: float | None
    rows_ended: int

    @property
    def idle(self) -> float:
        return self.slots - self.people - self.rows


def quantile(values: Iterable[float], q: float) -> float | None:
    """The smallest value that at least this part does not exceed; None without a value."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else None


def hours(model: Model) -> list[Hour]:
    """All hours of the day."""
    found = []
    for number in range(round(DAY_S / HOUR_S)):
        bins = [model.minutes[at] for at in _bins(number) if at in model.minutes]
        waits = [one.wait_s for one in model.waited if number * HOUR_S <= one.at_s < (number + 1) * HOUR_S]
        found.append(
            Hour(
                hour=(FIRST_HOUR + number) % 24,
                slots=sum(one.slots for one in bins) / HOUR_S,
                people=sum(one.people for one in bins) / HOUR_S,
                rows=sum(one.rows for one in bins) / HOUR_S,
                asked=len(waits),
                wait_p99_s=quantile(waits, 0.99),
                rows_ended=sum(one.rows_ended for one in bins),
            )
        )
    return found


def _bins(hour: int) -> range:
    return range(hour * BINS_AN_HOUR, (hour + 1) * BINS_AN_HOUR)


def latency(waited: Sequence[Waited], since: float, until: float) -> dict[str, float | None]:
    """Latency and wait of people's requests that came in this span."""
    inside = [one for one in waited if since <= one.at_s < until]
    waits = {
        f"wait_p99_{level.name.lower()}_s": [one.wait_s for one in inside if one.level is level] for level in LEVELS
    }
    whole = quantile((one.wait_s + one.service_s for one in inside), 0.99)
    return {
        "latency_p99_s": _rounded(whole),
        **{name: _rounded(quantile(values, 0.99)) for name, values in waits.items()},
        "requests": len(inside),
    }


def summary(with_rows: Mapping[str, Model], without: Mapping[str, Model]) -> dict[str, Any]:
    """The whole day, beside the same day without batches."""
    batches = [batch for model in with_rows.values() for batch in model.batches.values()]
    begin = min(batch.plan.at_s for batch in batches)
    end = max((batch.ended_at or DAY_S) for batch in batches)
    return {
        "rows": sum(len(batch.plan.rows) for batch in batches),
        "rows_ended": sum(batch.ended for batch in batches),
        "rows_began": clock(begin),
        "rows_done": clock(end) if all(batch.ended_at is not None for batch in batches) else None,
        "models": {name: _of_model(model, without[name], begin, end) for name, model in with_rows.items()},
    }


def _of_model(model: Model, alone: Model, begin: float, end: float) -> dict[str, Any]:
    after = latency(model.waited, begin, end)
    before = latency(alone.waited, begin, end)
    p99s = after["latency_p99_s"], before["latency_p99_s"]
    return {
        "people": len(model.waited),
        "longest_wait_s": _rounded(max((one.wait_s for one in model.waited), default=None)),
        "rows": sum(batch.ended for batch in model.batches.values()),
        "idle_fill_share": round(model.filled_s / model.idle_s, 4) if model.idle_s else None,
        "interactive_p99_ratio": round(p99s[0] / p99s[1], 4) if p99s[0] and p99s[1] else None,
        "people_beside_rows": after,
        "people_alone": before,
        "replica_hours": round(sum(one.slots for one in model.minutes.values()) / model.plan.slots / HOUR_S, 2),
        "replica_hours_alone": round(sum(one.slots for one in alone.minutes.values()) / alone.plan.slots / HOUR_S, 2),
        "replicas": [[clock(at), count] for at, count in model.replica_changes],
    }


def clock(at_s: float) -> str:
    """A moment of the day as a clock shows it."""
    minutes = round(at_s / 60.0) + FIRST_HOUR * 60
    return f"{minutes // 60 % 24:02d}:{minutes % 60:02d}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
