"""Who ran when: the slots of each model over the day, by people and by rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.batch_day.plan import FIRST_HOUR, HOUR_S
from benchmarks.batch_day.world import BIN_S, DAY_S, Minute, Model
from benchmarks.common.figure import save

AVERAGED = 5  # bins a point: finer than the eye sees over a day
PEOPLE = "#1b6ca8"
ROWS = "#f2a65a"
READY = "#444444"
PANEL_INCHES = (9.0, 2.6)


def series(model: Model) -> tuple[list[float], list[float], list[float], list[float]]:
    """Hours of the clock (beyond 24 after midnight), and slots on average: ready, used by people, used by rows."""
    moments = list[float]()
    ready = list[float]()
    people = list[float]()
    rows = list[float]()
    for first in range(0, round(DAY_S / BIN_S), AVERAGED):
        bins = [model.minutes.get(at, Minute()) for at in range(first, first + AVERAGED)]
        span_s = BIN_S * AVERAGED
        moments.append(FIRST_HOUR + (first + AVERAGED / 2) * BIN_S / HOUR_S)
        ready.append(sum(one.slots for one in bins) / span_s)
        people.append(sum(one.people for one in bins) / span_s)
        rows.append(sum(one.rows for one in bins) / span_s)
    return moments, ready, people, rows


def plot(models: Mapping[str, Model], file: Path) -> None:
    """A panel for each model.

    Raises:
        ValueError: there is no model.
    """
    if not models:
        raise ValueError("there is nothing to draw")
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width, height * len(models)), layout="constrained")
    panels = figure.subplots(len(models), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (name, model) in zip(panels, models.items(), strict=True):
        moments, ready, people, rows = series(model)
        panel.stackplot(moments, people, rows, labels=("people", "rows of batches"), colors=(PEOPLE, ROWS))
        panel.step(moments, ready, where="mid", color=READY, linewidth=1.0, label="slots of ready replicas")
        panel.set_title(name, fontsize=10)
        panel.set_ylabel("slots")
        panel.set_ylim(bottom=0)
        panel.grid(True, alpha=0.3)
    panels[0].legend(fontsize=8, loc="upper left")
    ticks = range(FIRST_HOUR, FIRST_HOUR + 25, 2)
    panels[-1].set_xticks(list(ticks), [f"{hour % 24:02d}:00" for hour in ticks], fontsize=8)
    panels[-1].set_xlim(FIRST_HOUR, FIRST_HOUR + 24)
    save(figure, file)
