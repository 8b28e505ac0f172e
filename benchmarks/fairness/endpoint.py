"""Is any endpoint fair to its tenants: `python -m benchmarks.fairness --url URL --model NAME --key a=KEY --key b=KEY`.

VTC's two experiments, by what clients can see (`benchmarks.fairness.metric` names the paper). Each load is sent twice:
with the own key of every tenant, and with the key of the first tenant for all. With one key the endpoint sees one
tenant; if it serves a tenant in order of arrival, this is first come, first served. The capacity of the endpoint is
measured first, in a closed loop, or given (`--rate`).

    backlogged  2.6 times the capacity. The k-th tenant asks k times as often as the first. When the load ends,
                requests without a first token leave, others run to their end. With `--closed` it is a closed loop:
                the k-th tenant has k times as many clients as the first
    skewed      1.25 times the capacity, the last tenant asks most (`benchmarks.fairness.trace.zipf`). All requests
                run to their end. A tenant is light if it asks for less than an equal part of the capacity

Keys of the JSON object that is the last line; `not_measured` says why one is null:

    service_ratio         backlogged: the service of the best served tenant over that of the worst served. Service is
                          prompt tokens plus twice the output tokens, as `usage` counts them, spread evenly between
                          the first and the last token of a request
    max_service_diff      backlogged: VTC's largest difference of service between two tenants that both have requests
                          waiting, in input tokens
    max_diff_over_rate    backlogged: VTC's difference in windows of 60 s, over the rate of service of all. The prompt
                          tokens of a request without usage are its words, times the tokens a word of the others
    throughput_over_one_key  backlogged: tokens/s over those with one key
    light_ttft_p99_gain   skewed: p99 of the first token of light tenants with one key, over that with their own keys.
                          It is null if one in a hundred of their requests got no token. `light_ttft_p50_gain`: p50

`loads` has each load by key: first tokens by tenant, how requests ended, and how late the clients themselves were
(`generator_late_ms`). A time counts from the moment at which its request was due.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common.conditions import here
from benchmarks.common.output import write_json
from benchmarks.common.stats import lower_quantile, shorten
from benchmarks.endpoint.size import Size, size_of
from benchmarks.endpoint.target import Target, target_of
from benchmarks.endpoint.traffic import Seen, Traffic, as_conditions, first_token_s, worst_lateness_ms
from benchmarks.fairness.metric import (
    WINDOW_S,
    Answer,
    Flags,
    Floats,
    Span,
    accumulated,
    clients_of,
    judge,
    largest_difference,
    light_clients,
    service_of,
    service_ratio,
    tokens_per_s,
    worth,
)
from benchmarks.fairness.plot import plot
from benchmarks.fairness.trace import BACKLOG, SKEW, Lengths, arrivals, zipf
from benchmarks.overload.answers import quantiles
from benchmarks.overload.offered_load import Offer
from benchmarks.overload.open_loop_client import Ended, Flight
from serve_app.core.queue import INPUT_WEIGHT, OUTPUT_WEIGHT

BACKLOGGED = "backlogged"
SKEWED = "skewed"
OWN_KEYS = "own keys"
ONE_KEY = "one key"
SECONDS = 75.0  # a window of VTC's after the warm-up
QUICK_SECONDS = 20.0
WARM_SHARE = 0.2  # of a load, until its batch is full and waits have built up
CAPACITY_SHARE = 0.2  # of a load: the closed loop before it
MOMENTS = 121  # of a span, at which service is compared: every half second of a minute
NO_USAGE = "{finished_without_usage} finished answers have no usage"
NONE_LIGHT = "no tenant is light"
NOT_HALF = "half of the light tenants' requests got no first token"
NOT_ALL = "over 1% of the light tenants' requests got no first token"


@dataclass(frozen=True, slots=True)
class EndpointPlan:
    """What is done to an endpoint. Spans in seconds; `rate` in requests a second, None: it is measured."""

    target: Target
    size: Size
    seed: int
    seconds: float = SECONDS
    closed: bool = False
    rate: float | None = None

    @property
    def span(self) -> Span:
        return Span(WARM_SHARE * self.seconds, self.seconds)

    @property
    def lengths(self) -> list[Lengths]:
        return [Lengths(prompt, output) for prompt, output in self.size.lengths(self.seed)]

    def traffic(self, arm: str) -> Traffic:
        tenants = self.target.tenants
        keys = {} if arm == OWN_KEYS else dict.fromkeys(tenants, tenants[0])
        return Traffic(self.target, self.size, self.seed, keys)

    def demands(self, load: str) -> dict[str, float]:
        """How often each tenant asks, relative to the others."""
        tenants = self.target.tenants
        if load == BACKLOGGED:
            return {tenant: float(number) for number, tenant in enumerate(tenants, 1)}
        return dict(zip(reversed(tenants), zipf(len(tenants)).values(), strict=True))

    def clients(self) -> dict[str, int]:
        """Of the closed loop, by tenant."""
        demands = self.demands(BACKLOGGED)
        return {
            tenant: max(1, round(self.size.clients * part / sum(demands.values()))) for tenant, part in demands.items()
        }

    def offers(self, load: str, rate: float) -> list[Offer]:
        """The requests of an open load."""
        tenants = self.target.tenants
        requests = arrivals(self.seed, self.lengths, self.demands(load), rate, self.seconds)
        return [
            Offer(number, each.at_s, "", tenants.index(each.tenant), each.prompt_tokens, each.output_tokens)
            for number, each in enumerate(requests)
        ]

    def endless(self) -> Iterator[Offer]:
        """Requests of a closed loop, of each tenant in turn, who is its group."""
        draw = random.Random(self.seed)
        lengths = self.lengths
        tenants = self.target.tenants
        for number in count():
            tenant = number % len(tenants)
            shape = draw.choice(lengths)
            yield Offer(number, 0.0, tenants[tenant], tenant, shape.prompt, shape.output)


def answers_of(seen: Seen, tenants: Sequence[str]) -> list[Answer]:
    """The requests as the metric takes them: served as `usage` says, at the earliest from their first token on."""
    counted = [flight for flight in seen.flights if flight.usage is not None]
    words = sum(flight.offer.prompt_tokens for flight in counted)
    per_word = sum(flight.usage.prompt_tokens for flight in counted if flight.usage) / words if words else 1.0

    def answer(flight: Flight) -> Answer:
        client = tenants[flight.offer.tenant]
        arrived_s = flight.due - seen.began
        if flight.usage is None:
            return Answer(client, arrived_s, round(flight.offer.prompt_tokens * per_word), flight.offer.output_tokens)
        served = flight.usage.completion_tokens
        asked = served if flight.outcome is Ended.FINISHED else flight.offer.output_tokens
        first_s = (flight.first or flight.ended) - seen.began
        seen_s = (flight.last or flight.ended) - seen.began
        return Answer(client, arrived_s, flight.usage.prompt_tokens, asked, first_s, seen_s, served)

    return [answer(flight) for flight in seen.flights]


def waits_of(seen: Seen, tenants: Sequence[str], moments: Floats) -> Flags:
    """Whether each tenant has a request that waits for its first token, at each moment. Rows are in order of names."""
    row = {tenant: number for number, tenant in enumerate(sorted({tenants[f.offer.tenant] for f in seen.flights}))}
    found = np.zeros((len(row), len(moments)), dtype=np.bool_)
    for flight in seen.flights:
        until_s = (flight.first or flight.ended) - seen.began
        found[row[tenants[flight.offer.tenant]]] |= (flight.due - seen.began <= moments) & (moments < until_s)
    return found


def service_figures(seen: Seen, plan: EndpointPlan) -> tuple[dict[str, float | None], dict[str, str]]:
    """Of a backlogged load: the figures of service, and why one is None."""
    tenants = plan.target.tenants
    names = ("service_ratio", "max_service_diff", "max_diff_over_rate", "tokens_per_s")
    found: dict[str, float | None] = dict.fromkeys(names)
    uncounted = seen.uncounted()
    if uncounted["finished_without_usage"]:
        return found, dict.fromkeys(names, NO_USAGE.format(**uncounted))
    answers = answers_of(seen, tenants)
    try:
        ratio = service_ratio(answers, plan.span)
    except ValueError as error:
        return found, dict.fromkeys(names, str(error))
    found["tokens_per_s"] = tokens_per_s(answers, plan.span)
    moments = np.linspace(plan.span.begin_s, plan.span.end_s, MOMENTS)
    found["max_service_diff"] = largest_difference(accumulated(answers, moments), waits_of(seen, tenants, moments))
    reasons = {}
    if math.isfinite(ratio):
        found["service_ratio"] = ratio
    else:
        reasons["service_ratio"] = "a tenant got no service"
    if plan.span.length_s >= WINDOW_S:
        found["max_diff_over_rate"] = judge(answers, plan.span).max_diff_over_rate
    else:
        reasons["max_diff_over_rate"] = f"the load is shorter than its warm-up and a window of {WINDOW_S:g} s"
    return {name: None if value is None else shorten(value) for name, value in found.items()}, reasons


def load_figures(seen: Seen, tenants: Sequence[str]) -> dict[str, Any]:
    """Of every load: first tokens by tenant, and how its requests ended."""
    waits = {
        tenant: [first_token_s(f) for f in seen.flights if tenants[f.offer.tenant] == tenant] for tenant in tenants
    }
    first_tokens = {
        tenant: quantiles([wait_s * 1e3 for wait_s in some if math.isfinite(wait_s)]) | {"asked": len(some)}
        for tenant, some in waits.items()
    }
    return {"first_token_ms": first_tokens, **seen.clients_figures()}


def light_tenants(plan: EndpointPlan, offers: Sequence[Offer]) -> frozenset[str]:
    """Who asks for less than an equal part of what can be served; of a closed loop, who has fewer clients."""
    tenants = plan.target.tenants
    if plan.closed:
        clients = plan.clients()
        return frozenset(tenant for tenant in tenants if clients[tenant] * len(tenants) < sum(clients.values()))
    asked = [Answer(tenants[o.tenant], o.at_s, o.prompt_tokens, o.output_tokens) for o in offers]
    whole = sum(worth(offer.prompt_tokens, offer.output_tokens) for offer in offers)
    return light_clients(asked, plan.seconds, whole / SKEW / plan.seconds)


def gain(own: Seen, shared: Seen, light: frozenset[str], tenants: Sequence[str], q: float) -> float | None:
    """How many times sooner a quantile of the light tenants' first tokens comes with their own keys than with one."""

    def at(seen: Seen) -> float:
        waits = [first_token_s(f) for f in seen.flights if tenants[f.offer.tenant] in light]
        found = lower_quantile(waits, q)
        return math.inf if found is None else found

    sooner = at(own)
    later = at(shared)
    return shorten(later / sooner) if math.isfinite(later) and 0 < sooner < math.inf else None


@dataclass(frozen=True, slots=True)
class Played:
    """The loads of one endpoint, by load and arm; `offers` of the load that shows the light tenants' gain."""

    rate: float | None
    seen: dict[str, dict[str, Seen]]
    offers: Sequence[Offer]


def play_all(plan: EndpointPlan, console: Console) -> Played:
    """Every load with either key.

    Raises:
        BenchmarkError: the endpoint does not answer, or serves nothing.
    """
    plan.traffic(OWN_KEYS).probe()
    if plan.closed:
        spans = {"warmup_s": plan.span.begin_s, "window_s": plan.span.length_s, "staying": plan.clients()}
        seen = {arm: plan.traffic(arm).closed(plan.endless(), **spans) for arm in (ONE_KEY, OWN_KEYS)}
        return Played(None, {BACKLOGGED: seen}, ())
    rate = plan.rate
    if rate is None:
        rate, _ = plan.traffic(ONE_KEY).capacity(plan.endless(), max(1.0, CAPACITY_SHARE * plan.seconds))
    console.print(f"  {plan.target.url} serves {rate:.2f} requests/s", markup=False)
    found: dict[str, dict[str, Seen]] = {}
    offers: list[Offer] = []
    for load, factor in ((BACKLOGGED, BACKLOG), (SKEWED, SKEW)):
        offers = plan.offers(load, factor * rate)
        found[load] = {}
        for arm in (ONE_KEY, OWN_KEYS):
            found[load][arm] = plan.traffic(arm).open(offers, window_s=plan.seconds, leave_at_end=load == BACKLOGGED)
            plan.traffic(arm).probe()  # the next load begins once a request gets through
            console.print(f"  {load}, {arm}: {len(offers)} requests", markup=False)
    return Played(rate, found, offers)


def build(played: Played, plan: EndpointPlan, conditions: dict[str, Any]) -> dict[str, Any]:
    """The result object."""
    tenants = plan.target.tenants
    backlogged = played.seen[BACKLOGGED]
    services = {arm: service_figures(seen, plan) for arm, seen in backlogged.items()}
    own, reasons = services[OWN_KEYS]
    shared, shared_reasons = services[ONE_KEY]
    gains = played.seen.get(SKEWED, backlogged)
    light = light_tenants(plan, played.offers)
    p99_gain, p50_gain = (gain(gains[OWN_KEYS], gains[ONE_KEY], light, tenants, q) for q in (0.99, 0.5))
    if p99_gain is None:
        reasons["light_ttft_p99_gain"] = NOT_ALL if light else NONE_LIGHT
    if p50_gain is None:
        reasons["light_ttft_p50_gain"] = NOT_HALF if light else NONE_LIGHT
    speeds = own["tokens_per_s"], shared["tokens_per_s"]
    loads = {
        load: {arm: load_figures(seen, tenants) for arm, seen in arms.items()} for load, arms in played.seen.items()
    }
    for arm, (figures, _) in services.items():
        loads[BACKLOGGED][arm] |= figures | {"service_per_s": service_by_tenant(backlogged[arm], plan)}
    every = [figures for arms in loads.values() for figures in arms.values()]
    return {
        "service_ratio": own["service_ratio"],
        "one_key_service_ratio": shared["service_ratio"],
        "max_service_diff": own["max_service_diff"],
        "max_diff_over_rate": own["max_diff_over_rate"],
        "throughput_over_one_key": shorten(speeds[0] / speeds[1]) if speeds[0] and speeds[1] else None,
        "light_ttft_p99_gain": p99_gain,
        "light_ttft_p50_gain": p50_gain,
        "light_tenants": sorted(light),
        "refusals": sum(figures["refusals"] for figures in every),
        "failed": sum(figures["failed"] for figures in every),
        "generator_late_p99_ms": worst_lateness_ms(every),
        "not_measured": shared_reasons | reasons,
        "loads": loads,
        "conditions": conditions | {"requests_per_s": played.rate and shorten(played.rate)},
    }


def service_by_tenant(seen: Seen, plan: EndpointPlan) -> dict[str, float] | None:
    """Input tokens a second of each tenant; None: they were not counted, or nobody was served."""
    answers = answers_of(seen, plan.target.tenants)
    if seen.uncounted()["finished_without_usage"] or not any(answer.first_s is not None for answer in answers):
        return None
    try:
        service = service_of(answers, plan.span, INPUT_WEIGHT, OUTPUT_WEIGHT)
    except ValueError:
        return None
    served = zip(clients_of(answers), service, strict=True)
    return {tenant: shorten(float(got) / plan.span.length_s) for tenant, got in served}


def show(console: Console, result: dict[str, Any]) -> None:
    """A table of the loads, the figures, and what was not measured."""
    columns = ("load", "keys", "tenant", "first token p50 ms", "p99 ms", "with one, of asked", "service/s", "ended")
    table = Table(*columns, title=result["conditions"]["endpoint"]["url"])
    for load, arms in result["loads"].items():
        for arm, figures in arms.items():
            services = figures.get("service_per_s") or {}
            for tenant, first in figures["first_token_ms"].items():
                cells = [_cell(first["p50"]), _cell(first["p99"]), f"{first['n']} of {first['asked']}"]
                ended = " ".join(f"{name} {number}" for name, number in figures["outcomes"].items())
                table.add_row(load, arm, tenant, *cells, _cell(services.get(tenant)), ended)
    console.print(table)
    for name, value in result.items():
        if name not in ("loads", "conditions", "not_measured"):
            reason = result["not_measured"].get(name)
            console.print(f"  {name}: {value if reason is None else f'not measured: {reason}'}", markup=False)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def measure(plan: EndpointPlan, console: Console) -> tuple[dict[str, Any], Played]:
    """The result object of one endpoint, and what it is made of. BenchmarkError: there is none."""
    conditions = here(**as_conditions(plan.target, plan.size, plan.seed, seconds=plan.seconds, closed=plan.closed))
    played = play_all(plan, console)
    return build(played, plan, conditions), played


def plan_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> EndpointPlan:
    """The plan of a command line with `--url`."""
    return EndpointPlan(
        target_of(parser, options, tenants=2),
        size_of(options),
        options.seed,
        seconds_of(options),
        options.closed,
        options.rate,
    )


def seconds_of(options: argparse.Namespace) -> float:
    """Of each load, by the command line."""
    return float(options.seconds or (QUICK_SECONDS if options.quick else SECONDS))


def run(plan: EndpointPlan, options: argparse.Namespace, console: Console) -> int:
    """0: there are figures. BenchmarkError: there are none."""
    result, played = measure(plan, console)
    show(console, result)
    if options.plot is not None and result["service_ratio"] is not None:
        tenants = plan.target.tenants
        panels = {arm: answers_of(seen, tenants) for arm, seen in played.seen[BACKLOGGED].items()}
        title = f"service (prompt + 2 x output tokens), ratio {result['service_ratio']:g}"
        plot(panels, 0.0, plan.seconds, title, options.plot)
    write_json(result)
    return 0
