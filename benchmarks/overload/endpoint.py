"""Overload and the classes of any endpoint: `python -m benchmarks.overload --url URL --model NAME --key a=KEY ...`.

A tenth of the requests is `high`, four tenths are `normal`, half are `low`; every tenant asks alike. `--priority` says
how the endpoint is asked for a class: `high=high`, or `high=0` if the endpoint serves lower numbers first. The loop is
open, at multiples of the capacity, which is what `--clients` in a closed loop get through (or `--rate`). With
`--closed` it is a closed loop of as many times `--clients`; a client that is refused asks again.

Levels are multiples of the first token and the gap that one client alone sees (or `--unloaded`). The factors are in
`benchmarks.overload.plan`, also those of the patience: a client of an open loop without a first token leaves then. No
deadline is sent.

Keys of the JSON object that is the last line; `not_measured` says why one is null:

    high_ttft_p99_ratio_4x  p99 of the first token of `high` at 4x over that at 0.5x, of all requests; `too_few` if
                            there are fewer than 300. `high_ttft_p90_ratio_4x`: p90, 30
    high_4x                 `high` at 4x: how many asked, how many were answered, and the median
    goodput_4x_over_peak    output tokens/s of requests that finished within both levels at 4x, over the best load
    attainment              by load and class: the share of all requests that finished within both levels
    low_token_share_4x      the share of `low` in the tokens of answers at 4x
    refusal_p99_ms          of requests that ended with a refusal: from when they were due to the answer

`windows` has each load: first tokens by class, goodput, and how late the clients themselves were. A client cannot see
the CPU, memory, queue and preemptions of the endpoint, nor its work on requests whose client has left.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.arms import BenchmarkError
from benchmarks.common.conditions import here
from benchmarks.common.output import write_json
from benchmarks.common.sse import Usage
from benchmarks.common.stats import lower_quantile
from benchmarks.endpoint.size import Size, size_of
from benchmarks.endpoint.target import Target
from benchmarks.endpoint.traffic import Seen, Traffic, as_conditions, worst_lateness_ms
from benchmarks.overload.answers import Window, quantiles
from benchmarks.overload.offered_load import GROUP_SHARES, GROUPS, HIGH, LOW, endless, offers
from benchmarks.overload.open_loop_client import Ended, Flight
from benchmarks.overload.plan import MULTIPLES, PEAK, QUICK_MULTIPLES, Levels
from benchmarks.overload.plot import plot
from benchmarks.overload.report import high_ratio, over_peak, summary_of

ENDPOINT = "endpoint"
SECONDS = 60.0
QUICK_SECONDS = 15.0
WARM_SHARE = 0.2  # of a load, before its window
TAIL_SHARE = 0.1  # of a load, after its window: what comes in the window has others beside it until its end
CLOSED_SHARE = 0.5  # of a load: each of the two closed loops before them
NO_USAGE = "{} finished answers have no usage"


@dataclass(frozen=True, slots=True)
class EndpointPlan:
    """What is done to an endpoint. Spans in seconds. `rate` (requests a second) and `unloaded` (in the units of
    `Levels`) are measured if they are None."""

    target: Target
    size: Size
    seed: int
    multiples: tuple[float, ...] = MULTIPLES
    seconds: float = SECONDS
    closed: bool = False
    rate: float | None = None
    unloaded: tuple[float, float] | None = None

    @property
    def traffic(self) -> Traffic:
        return Traffic(self.target, self.size, self.seed)

    def spans(self) -> dict[str, float]:
        """Of a load."""
        tail_s = 0.0 if self.closed else TAIL_SHARE * self.seconds
        warmup_s = WARM_SHARE * self.seconds
        return {"warmup_s": warmup_s, "window_s": self.seconds - warmup_s - tail_s, "tail_s": tail_s}

    def staying(self, multiple: float) -> dict[str, int]:
        """Clients of a closed loop, by class."""
        shares = zip(GROUPS, GROUP_SHARES, strict=True)
        return {group: max(1, round(multiple * self.size.clients * share)) for group, share in shares}


def find_levels(plan: EndpointPlan) -> Levels:
    """The unloaded latencies and the capacity, as far as they were not given. BenchmarkError: nothing was finished."""
    lengths = plan.size.lengths(plan.seed)
    tenants = len(plan.target.keys)
    span_s = max(1.0, CLOSED_SHARE * plan.seconds)
    plan.traffic.probe()
    unloaded = plan.unloaded
    if unloaded is None:
        alone = plan.traffic.closed(endless(lengths, plan.seed, tenants), clients=1, window_s=span_s)
        first_s = lower_quantile([flight.first - flight.due for flight in alone.finished if flight.first], 0.5)
        gap_ms = lower_quantile([gap for flight in alone.finished if (gap := gap_ms_of(flight)) is not None], 0.5)
        if first_s is None or gap_ms is None:
            raise BenchmarkError(f"one client alone got no answer of two tokens with usage: {alone.failures()}")
        unloaded = (first_s, gap_ms)
    rate = plan.rate
    if rate is None:
        rate, _ = plan.traffic.capacity(endless(lengths, plan.seed + 1, tenants), span_s)
    return Levels(*unloaded, rate)


def gap_ms_of(flight: Flight) -> float | None:
    """The mean gap between tokens; None: fewer than two, or nobody counted them."""
    if flight.usage is None or flight.usage.completion_tokens < 2:
        return None
    return (flight.last - flight.first) / (flight.usage.completion_tokens - 1) * 1e3


def seen_at(plan: EndpointPlan, levels: Levels, multiple: float) -> Seen:
    """One load. BenchmarkError: it is more than `max_requests`."""
    lengths = plan.size.lengths(plan.seed)
    seed = plan.seed * 1_000 + round(100 * multiple)
    tenants = len(plan.target.keys)
    spans = plan.spans()
    if plan.closed:
        return plan.traffic.closed(endless(lengths, seed, tenants), staying=plan.staying(multiple), **spans)
    requests = offers(lengths, multiple * levels.capacity_rps, sum(spans.values()), seed, tenants)
    patience_s = {group: levels.patience_s(group) for group in GROUPS}
    return plan.traffic.open(requests, patience_s=patience_s, **spans)


def window_of(plan: EndpointPlan, levels: Levels, multiple: float, seen: Seen) -> Window:
    """The load in the terms of this benchmark, without what only a server knows of itself; uncounted tokens are 0."""
    flights = [replace(flight, usage=flight.usage or Usage(0, 0)) for flight in seen.flights]
    raw = {
        "arm": ENDPOINT,
        "multiple": multiple,
        "rows": [flight.row(seen.began) for flight in flights],
        "decisions": [],
        "levels": astuple(levels),
        **plan.spans(),
    }
    return Window.of(raw)


def figures_of(window: Window, seen: Seen) -> tuple[dict[str, Any], str | None]:
    """What clients saw of one load, and why what depends on tokens is None; None: it does not."""
    found = window.seen_figures()
    found["token_share"] = found.pop("granted_share")
    silent = seen.uncounted()["finished_without_usage"]
    if silent:
        found |= dict.fromkeys(("itl_ms", "attainment", "goodput_tokens_per_s", "tokens_per_s", "token_share"))
    refused = [answer.ended_s * 1e3 for answer in window.inside if answer.outcome is Ended.REFUSED]
    clients = seen.clients_figures() | {"outcomes": found["outcomes"]}
    return found | clients | {"refusal_ms": quantiles(refused)}, NO_USAGE.format(silent) if silent else None


def build(
    windows: Mapping[float, tuple[Window, Seen]], levels: Levels, conditions: Mapping[str, Any]
) -> dict[str, Any]:
    """The result object."""
    by_multiple = {multiple: window for multiple, (window, _) in windows.items()}
    figures: dict[str, dict[str, Any]] = {}
    reasons: dict[str, str] = {}
    for multiple, (window, seen) in windows.items():
        figures[f"{multiple:g}"], why = figures_of(window, seen)
        if why is not None:
            reasons |= dict.fromkeys(("goodput_4x_over_peak", "attainment", "low_token_share_4x"), why)
    peak = by_multiple[PEAK]
    peak_figures = figures[f"{PEAK:g}"]
    ratio = high_ratio(by_multiple)[0]
    goodput = None if reasons else over_peak(by_multiple)
    if ratio is None:
        reasons["high_ttft_p99_ratio_4x"] = "over 1% of `high` got no first token"
    if goodput is None:
        reasons.setdefault("goodput_4x_over_peak", "no request was finished within both levels")
    refused = [a.ended_s * 1e3 for window in by_multiple.values() for a in window.inside if a.outcome is Ended.REFUSED]
    if not refused:
        reasons["refusal_p99_ms"] = "nobody was refused"
    return {
        "high_ttft_p99_ratio_4x": ratio,
        "high_ttft_p90_ratio_4x": high_ratio(by_multiple, 0.9)[0],
        "high_4x": summary_of(peak, HIGH),
        "goodput_4x_over_peak": goodput,
        "attainment": {multiple: one["attainment"] for multiple, one in figures.items()},
        "low_token_share_4x": (peak_figures["token_share"] or {}).get(LOW),
        "refusal_p99_ms": quantiles(refused)["p99"],
        "refusals": sum(one["refusals"] for one in figures.values()),
        "failed": sum(one["failed"] for one in figures.values()),
        "generator_late_p99_ms": worst_lateness_ms(figures.values()),
        "not_measured": reasons,
        "levels": shown(levels),
        "windows": {ENDPOINT: figures},
        "conditions": dict(conditions),
    }


def shown(levels: Levels) -> dict[str, Any]:
    """The levels without the deadlines, which are not sent here."""
    return {name: level for name, level in levels.as_json().items() if name != "deadline_ms"}


def measure(plan: EndpointPlan, console: Console) -> dict[str, Any]:
    """The result object of one endpoint. BenchmarkError: there is none."""
    spans = plan.spans() | {"closed": plan.closed, "multiples": plan.multiples}
    conditions = here(**as_conditions(plan.target, plan.size, plan.seed, **spans))
    levels = find_levels(plan)
    console.print_json(data=shown(levels))
    windows: dict[float, tuple[Window, Seen]] = {}
    for multiple in plan.multiples:
        seen = seen_at(plan, levels, multiple)
        windows[multiple] = window_of(plan, levels, multiple, seen), seen
        console.print(f"  {multiple:g}x: {len(seen.flights)} requests", highlight=False)
        plan.traffic.probe()  # the next load begins once a request gets through
    return build(windows, levels, conditions)


def show(console: Console, result: Mapping[str, Any]) -> None:
    """A table of the loads, the figures, and what was not measured."""
    columns = ("load", "class", "first token p50 ms", "p99 ms", "with one, of asked", "met", "good tokens/s", "ended")
    table = Table(*columns, title=result["conditions"]["endpoint"]["url"])
    for load, figures in result["windows"][ENDPOINT].items():
        for group in GROUPS:
            first = figures["ttft_ms"][group]
            met = (figures["attainment"] or {}).get(group)
            cells = [_cell(first["p50"]), _cell(first["p99"]), f"{first['n']} of {first['offered']}", _cell(met)]
            ended = " ".join(f"{name} {number}" for name, number in figures["outcomes"][group].items())
            table.add_row(f"{load}x", group, *cells, _cell(figures["goodput_tokens_per_s"]), ended)
    console.print(table)
    for name, value in result.items():
        if name not in ("windows", "conditions", "levels", "attainment", "not_measured"):
            reason = result["not_measured"].get(name)
            console.print(f"  {name}: {value if reason is None else f'not measured: {reason}'}", markup=False)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def plan_of(options: argparse.Namespace) -> EndpointPlan:
    """The plan of a command line with `--url`."""
    return EndpointPlan(
        options.target,
        size_of(options),
        options.seed,
        QUICK_MULTIPLES if options.quick else MULTIPLES,
        options.seconds or (QUICK_SECONDS if options.quick else SECONDS),
        options.closed,
        options.rate,
        options.unloaded,
    )


def run(plan: EndpointPlan, options: argparse.Namespace, console: Console) -> int:
    """0: there are figures. BenchmarkError: there are none."""
    result = measure(plan, console)
    show(console, result)
    if options.plot:
        plot(result, options.plot)
    write_json(result)
    return 0
