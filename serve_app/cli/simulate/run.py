"""One arm, run: its world and a load in, its figures out. Nothing here reads a clock or a file.

Invariant: every arm sees the same requests at the same moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from autoscaling.policies import POLICIES
from autoscaling.simulator import (
    ModelPlan,
    RequestEnd,
    RunSeries,
    SimulatedRequest,
    Simulation,
    Summary,
    step_for,
)
from serve_app.cli.simulate.arms import Arm
from serve_app.cli.simulate.figures import ArmResult, ClassResult, MissedRequests, ModelResult, SeriesResult
from serve_app.types import Outcome, RequestClass

PARTS = 200  # of the load's span: after each the progress is told


@dataclass(frozen=True, slots=True)
class _EndedRun:
    """A run whose requests have all ended."""

    simulation: Simulation
    summary: Summary
    series: RunSeries


def run_arm(
    arm: Arm,
    load: Sequence[SimulatedRequest],
    wanted_attainment: float,
    on_progress: Callable[[float], None],
) -> ArmResult:
    """Simulate one arm.

    Args:
        load: in order; not empty.
        on_progress: called with the part of the load's span that is over; above 1 while the last requests end.
    """
    summary = Summary()
    span_s = load[-1].at_s
    series = RunSeries(step_for(span_s))

    def consume(end: RequestEnd) -> None:
        summary.add(end)
        series.add(end)

    simulation = Simulation(arm.world, load, consume, lambda _: POLICIES[arm.policy]())
    series.watch(simulation)
    part_s = max(1.0, span_s / PARTS)
    while not simulation.is_over():
        simulation.run(part_s)
        on_progress((simulation.clock.now - simulation.began_s) / max(part_s, span_s))
    return _figures(arm, _EndedRun(simulation, summary, series), wanted_attainment)


def _figures(arm: Arm, run: _EndedRun, wanted_attainment: float) -> ArmResult:
    models = tuple(_of_model(plan, run) for plan in arm.world.models)
    classes = tuple(_of_class(each, arm, run) for each in sorted(run.summary.by_class, reverse=True))
    judged = [each.attainment for each in classes if each.level_s is not None and each.attainment is not None]
    return ArmResult(
        arm.name,
        arm.policy,
        arm.what_if,
        replicas_mean=sum(each.replicas_mean for each in models),
        replicas_peak=_peak(arm, run, by_gpus=False),
        gpus_mean=sum(each.replicas_mean * each.gpus_per_replica for each in models),
        gpus_peak=_peak(arm, run, by_gpus=True),
        gpu_hours=sum(each.gpu_hours for each in models),
        cost=sum(each.cost for each in models),
        refused=sum(each.refused for each in classes),
        changes=sum(each.changes for each in models),
        meets=all(part >= wanted_attainment for part in judged) if judged else None,
        models=models,
        classes=classes,
        series=_over_time(run),
    )


def _of_model(plan: ModelPlan, run: _EndedRun) -> ModelResult:
    use = next(each for each in run.simulation.use() if each.model == plan.name)
    gpus = plan.profile.gpus
    return ModelResult(
        plan.name,
        gpus,
        plan.profile.start_s,
        plan.scaling.max_replicas,
        replicas_mean=run.simulation.fleet.replica_s(plan.name) / run.simulation.clock.now,
        replicas_peak=max(look.placed for look in run.series.looks[plan.name]),
        gpu_hours=use.gpu_hours,
        cost=use.cost,
        changes=len(use.changes),
    )


def _peak(arm: Arm, run: _EndedRun, *, by_gpus: bool) -> int:
    """The most replicas, or GPUs, of all models at one moment."""
    weights = [(plan.name, plan.profile.gpus if by_gpus else 1) for plan in arm.world.models]
    columns = ([weight * look.placed for look in run.series.looks[name]] for name, weight in weights)
    return max(map(sum, zip(*columns, strict=True)))


def _of_class(request_class: RequestClass, arm: Arm, run: _EndedRun) -> ClassResult:
    found = run.summary.by_class[request_class]
    plan = arm.world.classes.get(request_class)
    missed = run.series.obstacles(request_class)
    return ClassResult(
        request_class.label,
        None if plan is None else plan.ttft_slo_s,
        found.offered,
        found.attainment,
        found.first_token.quantile(0.5),
        found.first_token.quantile(0.99),
        found.outcomes[Outcome.REFUSED],
        tuple(MissedRequests(why.value, model, count) for (why, model), count in missed.most_common()),
    )


def _over_time(run: _EndedRun) -> SeriesResult:
    series = run.series
    steps = [series.steps.get(number) for number in range(series.count)]
    classes = sorted(run.summary.by_class, reverse=True)
    per_minute = 60.0 / series.step_s

    def quantiles(share: float) -> dict[str, list[float | None]]:
        return {
            each.label: [None if step is None else step.quantile(each, share) for step in steps] for each in classes
        }

    def means(column: str) -> dict[str, list[float]]:
        return {
            name: [_mean(getattr(look, column) for look in looks) for looks in series.looks_by_step(name)]
            for name in series.looks
        }

    return SeriesResult(
        series.step_s,
        arrivals_per_minute={
            each.label: [0.0 if step is None else step.arrivals[each] * per_minute for step in steps]
            for each in classes
        },
        running=means("running"),
        starting=means("starting"),
        waiting=means("waiting"),
        ttft_p50_s=quantiles(0.5),
        ttft_p99_s=quantiles(0.99),
    )


def _mean(values: Iterable[float]) -> float:
    return round(fmean(values), 3)
