"""A day of the batch lane in virtual time: `python -m benchmarks.batch_day [--quick] [--seed 1] [--plot FILE]`.

The day is 24 hours from 06:00. In each hour people replay the Azure conversation trace, stretched to the hour, of which
a part is kept that follows the time of day; 200,000 rows in four batches of two tenants come in the evening. One model
keeps two replicas; the other is scaled to zero between its uses. The world is `autoscaling.simulator` with its batch
worker. Beside it the same day without batches.

Engines: `even`, whose steps take the same time whoever runs beside, so that what people lose by rows is their wait
alone (64 slots; 46 ms a token; a prompt takes no time).

Figures, by model: `idle_fill_share`, the part of the slots without people that rows used while rows were left;
`interactive_p99_ratio`, the p99 of people's latency while batches were there over that of the day without; replica
hours and the moments of each change of replicas. Slots are looked at every five seconds.

Prints conditions, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from autoscaling.simulator import (
    BatchPlan,
    EngineProfile,
    ModelPlan,
    NodePlan,
    RequestEnd,
    ScalingPlan,
    ServeDelays,
    SimulatedRequest,
    Simulation,
    World,
)
from benchmarks.common.conditions import here
from benchmarks.common.figure import save
from benchmarks.common.output import write_json
from benchmarks.common.run import CONSOLE_WIDTH
from benchmarks.common.stats import lower_quantile
from benchmarks.common.traces import AZURE_FILE, DATA, TraceMissingError, recorded
from benchmarks.common.worlds import PATIENT
from serve_app.types import RequestClass

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
FIRST_HOUR = 6  # of the clock, at second 0
# The part of the trace that people ask in each hour, from 06:00: office hours, a lunch, an evening, a night.
BY_HOUR = (
    *(0.15, 0.35, 0.7, 0.95, 1.0, 0.95, 0.75, 0.9, 1.0, 0.95, 0.85, 0.6),
    *(0.45, 0.4, 0.4, 0.35, 0.3, 0.2, 0.1, 0.06, 0.04, 0.03, 0.03, 0.06),
)
HIGH_SHARE = 0.2  # of people's requests; the others are `normal`
CHAT = "chat"
SUMMARIES = "summaries"
VISITS = {10: 0.03, 15: 0.03}  # hours of the clock in which people use the second model, and the part that does
REPLICAS = {CHAT: (2, 2), SUMMARIES: (0, 1)}
ROWS = 200_000
QUICK_ROWS = 20_000
QUICK_SHARE = 0.1  # of people
# When a batch comes (hour of the clock), its tenant, its model.
BATCHES = ((20.0, "research", CHAT), (20.0, "research", CHAT), (20.5, "reports", CHAT), (21.0, "reports", SUMMARIES))
SLOTS = 64
EVEN = EngineProfile("even", "every step takes as long", SLOTS, 10**6, 0.0462, 0.0, 0.0, 1e9, 60.0, 10**6)
TO_ZERO_S = 300.0  # without a request, after which the last replica is given up
QUEUE = replace(PATIENT, guard_slots_share=0.5)
LOOK_S = 5.0
AVERAGED = 60  # looks a point of the plot: finer than the eye sees over a day
BARS = {"interactive_p99_ratio": 1.1, "idle_fill_share": 0.9}


class Look(NamedTuple):
    """The slots of a model at one moment: ready, used by people, used by rows; and whether rows are left."""

    at_s: float
    slots: int
    people: int
    rows: int
    are_left: bool


class Waited(NamedTuple):
    """A request of people that has ended, in seconds."""

    at_s: float
    level: RequestClass
    wait_s: float
    latency_s: float


@dataclass(slots=True)
class ModelDay:
    """What one model did. `rows_ended`: the moments at which rows were answered."""

    looks: list[Look] = field(default_factory=list)
    waited: list[Waited] = field(default_factory=list)
    rows_ended: list[float] = field(default_factory=list)
    replicas: list[tuple[float, int]] = field(default_factory=list)  # each change


@dataclass(slots=True)
class Day:
    """A day. `done_s`: when the last batch was done; None: not on that day."""

    models: dict[str, ModelDay]
    batches: tuple[BatchPlan, ...]
    done_s: float | None


def clock_s(hour: float) -> float:
    """The second of the day at which this hour of the clock begins."""
    return (hour - FIRST_HOUR) % 24 * HOUR_S


def clock(at_s: float) -> str:
    """A moment of the day as a clock shows it."""
    minutes = round(at_s / 60.0) + FIRST_HOUR * 60
    return f"{minutes // 60 % 24:02d}:{minutes % 60:02d}"


def people(trace: Sequence[SimulatedRequest], seed: int, share: float = 1.0) -> list[SimulatedRequest]:
    """All requests of people, in order; `share` thins them out."""
    draw = random.Random(f"{seed} people")
    found = []
    stretch = HOUR_S / max(one.at_s for one in trace)
    for number, kept in enumerate(BY_HOUR):
        visits = VISITS.get((FIRST_HOUR + number) % 24, 0.0)
        for request in trace:
            if draw.random() < kept * share:
                model = SUMMARIES if draw.random() < visits else CHAT
                level = RequestClass.HIGH if draw.random() < HIGH_SHARE else RequestClass.NORMAL
                at_s = number * HOUR_S + request.at_s * stretch
                found.append(replace(request, at_s=at_s, tenant="people", model=model, request_class=level))
    return found


def batches(trace: Sequence[SimulatedRequest], seed: int, rows: int = ROWS) -> tuple[BatchPlan, ...]:
    """The batches of the night; their rows have lengths of the trace."""
    draw = random.Random(f"{seed} rows")
    lengths = [(one.prompt_tokens, one.output_tokens) for one in trace]
    each = rows // len(BATCHES)
    return tuple(
        BatchPlan(f"batch-{number}", clock_s(hour), tenant, model, draw.choices(lengths, k=each))
        for number, (hour, tenant, model) in enumerate(BATCHES, 1)
    )


def world(profile: EngineProfile, plans: tuple[BatchPlan, ...]) -> World:
    """The two models, with engines of a profile."""
    delays = ServeDelays(to_zero_s=TO_ZERO_S)
    scaling = ScalingPlan(target_ongoing=SLOTS, look_back_s=30.0, control_s=1.0, delays=delays)
    models = tuple(
        ModelPlan(name, profile, QUEUE, replace(scaling, min_replicas=least, max_replicas=most))
        for name, (least, most) in REPLICAS.items()
    )
    return World(models, NodePlan(gpus=8), batches=plans, routers=1)  # a day of three routers' reports takes minutes


def play(plan: World, asked: Sequence[SimulatedRequest], span_s: float = DAY_S) -> Day:
    """A day, or so many seconds of it."""
    found = {model.name: ModelDay() for model in plan.models}
    ends: list[RequestEnd] = []
    simulation = Simulation(plan, asked, ends.append)
    for name, model in found.items():
        simulation.clock.every(LOOK_S, partial(_look, simulation, name, model))
    simulation.run_for(span_s)
    began_s = simulation.began_s
    for end in ends:
        assert end.granted_s is not None, f"nobody is refused here: {end}"
        model = found[end.model]
        if end.request_class is RequestClass.LOW:
            model.rows_ended.append(end.ended_s - began_s)
        else:
            wait_s = end.granted_s - end.offered_s
            latency_s = end.ended_s - end.offered_s
            model.waited.append(Waited(end.offered_s - began_s, end.request_class, wait_s, latency_s))
    done = [batch.ended_s for batch in simulation.batches.batches]
    last = max((moment for moment in done if moment is not None), default=None)
    return Day(found, plan.batches, None if last is None or None in done else last - began_s)


def _look(simulation: Simulation, name: str, model: ModelDay) -> None:
    now = simulation.clock.now - simulation.began_s
    counts = simulation.fleet.counts(name)
    of_model = [batch for batch in simulation.batches.batches if batch.plan.model == name]
    are_left = any(batch.left for batch in of_model if batch.plan.at_s <= now)
    model.looks.append(Look(now, counts.running * SLOTS, counts.executing, counts.rows, are_left))
    if counts.running != (model.replicas[-1][1] if model.replicas else 0):
        model.replicas.append((now, counts.running))


def latency(waited: Sequence[Waited], since: float, until: float) -> dict[str, float | None]:
    """Latency and wait of people's requests that came in this span."""
    inside = [one for one in waited if since <= one.at_s < until]
    found = {"latency_p99_s": lower_quantile([one.latency_s for one in inside], 0.99)}
    for level in (RequestClass.HIGH, RequestClass.NORMAL):
        waits = [one.wait_s for one in inside if one.level is level]
        found[f"wait_p99_{level.label}_s"] = lower_quantile(waits, 0.99)
    rounded = {name: None if value is None else round(value, 3) for name, value in found.items()}
    return {**rounded, "requests": len(inside)}


def summary(beside: Day, alone: Day) -> dict[str, Any]:
    """The whole day, beside the same day without batches."""
    begin_s = min(plan.at_s for plan in beside.batches)
    end_s = beside.done_s or DAY_S
    return {
        "rows": sum(len(plan.rows) for plan in beside.batches),
        "rows_ended": sum(len(model.rows_ended) for model in beside.models.values()),
        "rows_began": clock(begin_s),
        "rows_done": None if beside.done_s is None else clock(beside.done_s),
        "models": {name: _of_model(one, alone.models[name], begin_s, end_s) for name, one in beside.models.items()},
    }


def _of_model(model: ModelDay, alone: ModelDay, begin_s: float, end_s: float) -> dict[str, Any]:
    after = latency(model.waited, begin_s, end_s)
    before = latency(alone.waited, begin_s, end_s)
    p99s = after["latency_p99_s"], before["latency_p99_s"]
    looks = [one for one in model.looks if one.are_left]
    idle = sum(one.slots - one.people for one in looks)
    return {
        "people": len(model.waited),
        "rows": len(model.rows_ended),
        "idle_fill_share": round(sum(one.rows for one in looks) / idle, 4) if idle else None,
        "interactive_p99_ratio": round(p99s[0] / p99s[1], 4) if p99s[0] and p99s[1] else None,
        "people_beside_rows": after,
        "people_alone": before,
        "replica_hours": replica_hours(model),
        "replica_hours_alone": replica_hours(alone),
        "replicas": [[clock(at_s), count] for at_s, count in model.replicas],
    }


def replica_hours(model: ModelDay) -> float:
    """Hours of ready replicas."""
    return round(sum(one.slots for one in model.looks) / SLOTS * LOOK_S / HOUR_S, 2)


def plot(models: Mapping[str, ModelDay], file: Path) -> None:
    """Who ran when: a panel for each model."""
    figure = Figure(figsize=(9.0, 2.6 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (name, model) in zip(panels, models.items(), strict=True):
        whole = len(model.looks) // AVERAGED * AVERAGED
        columns = np.array(model.looks[:whole], dtype=float).T.reshape(len(Look._fields), -1, AVERAGED).mean(axis=2)
        moments = FIRST_HOUR + columns[0] / HOUR_S
        labels = ("people", "rows of batches")
        panel.stackplot(moments, columns[2], columns[3], labels=labels, colors=("#1b6ca8", "#f2a65a"))
        panel.step(moments, columns[1], where="mid", color="#444444", linewidth=1.0, label="slots of ready replicas")
        panel.set_title(name, fontsize=10)
        panel.set_ylabel("slots")
        panel.set_ylim(bottom=0)
        panel.grid(True, alpha=0.3)
    panels[0].legend(fontsize=8, loc="upper left")
    ticks = range(FIRST_HOUR, FIRST_HOUR + 25, 2)
    panels[-1].set_xticks(list(ticks), [f"{hour % 24:02d}:00" for hour in ticks], fontsize=8)
    panels[-1].set_xlim(FIRST_HOUR, FIRST_HOUR + 24)
    save(figure, file)


def main(arguments: list[str] | None = None) -> int:
    """0 when every row has ended; 1 when not, or without the trace."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batch_day", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the people and of the rows")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--data", type=Path, default=DATA, help=f"the folder with {AZURE_FILE}")
    options = parser.parse_args(arguments)
    console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else CONSOLE_WIDTH)
    began = time.monotonic()
    rows, share = (QUICK_ROWS, QUICK_SHARE) if options.quick else (ROWS, 1.0)
    conditions = here(seed=options.seed, rows=rows, share_of_people=share, profile=EVEN.name)
    console.print(conditions)
    try:
        trace = recorded(options.data, AZURE_FILE)
    except TraceMissingError as missing:
        console.print(f"skipped: {missing}")
        return 1
    asked = people(trace, options.seed, share)
    beside = play(world(EVEN, batches(trace, options.seed, rows)), asked)
    alone = play(world(EVEN, ()), asked)
    if options.plot:
        plot(beside.models, options.plot)
    found = summary(beside, alone)
    write_json({**found, "bars": BARS, "seconds": round(time.monotonic() - began), "conditions": conditions})
    return 0 if found["rows_ended"] == found["rows"] else 1


if __name__ == "__main__":
    sys.exit(main())
