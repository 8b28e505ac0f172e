"""The tables and the JSON object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.run import FOREIGN_LIMIT_CORES
from benchmarks.common.stats import shorten
from benchmarks.strategies.figures import Figures, cheapest, cost_per_million
from benchmarks.strategies.measure import Offline
from benchmarks.strategies.strategy import (
    CONTINUOUS,
    SLOTS,
    SORTED_ORACLE,
    SORTED_PROMPT,
    STATIC,
    complexity,
    strategies,
)

REPORTED = (
    "tokens_per_s", "requests_per_s", "latency_mean_ms", "latency_p50_ms", "latency_p95_ms", "latency_p99_ms",
    "padding_ratio", "batch_mean", "slot_use",
)  # fmt: skip
# the bars
BOUND_SHARE = 0.9
MEAN_RATIO = 1.0
SUCCESS_SHARE = 0.997
BARS = {"over_bound": BOUND_SHARE, "latency_mean_ratio": MEAN_RATIO, "success_share": SUCCESS_SHARE}
PUBLISHED_RATIO = (4.7, 7.06)
PUBLISHED = {
    "continuous_over_static": PUBLISHED_RATIO,
    "slot_use": {"static": [0.55], "continuous": [0.85, 0.95]},
    "write_up_latency_ms": {"static": 340, "continuous": 47},
    "gpu_use": [0.22, 0.96],  # from the least to the most of the write-ups' strategies
}
NOT_MEASURED = "not measured"
WHY = (
    "Why ours differs from the published {low} to {high}: they compare with rows padded to the longest answer, on GPUs "
    "where a step takes about the same with one row as with 32, at lengths that spread more. Here a step takes "
    "{base:.2f} ms + {each:.3f} ms a row: a row that has ended costs static batches its slot and no time. With these "
    "lengths an engine that pads would give {padded:.2f}, and one whose step always takes the same {flat:.2f}."
)


def headline(found: Offline, success: Figures, price: float) -> dict[str, Any]:
    """The keys of the issue, and what explains them."""
    figures = found.figures
    base_s, each_s = found.times.fit()
    return {
        "continuous_over_static_tokens_per_s": shorten(
            found.median(lambda measured: measured.ratio(lambda f: f.tokens_per_s))
        ),
        "bound": shorten(found.median(lambda measured: measured.predicted.bound)),
        "latency_mean_ratio": shorten(found.median(lambda measured: measured.ratio(lambda f: f.latency_mean_ms))),
        "success_share": shorten(success.success_share),
        "strategies": {name: {key: one.as_json()[key] for key in REPORTED} for name, one in figures.items()},
        "bound_padded": shorten(found.median(lambda measured: measured.predicted.bound_padded)),
        "bound_flat": shorten(found.median(lambda measured: measured.predicted.bound_flat)),
        "predicted": {key: shorten(value) for key, value in asdict(found.rounds[0].predicted).items()},
        "step_ms": {size: shorten(1000 * span_s) for size, span_s in found.step_s.items()},
        "step_fit_ms": [shorten(1000 * base_s), shorten(1000 * each_s)],
        "prompt_token_us": shorten(1e6 * found.times.prompt_token_s),
        "write_up_latency_ms": {name: shorten(one.write_up_ms) for name, one in figures.items()},
        "cost_per_million_tokens": {
            name: shorten(cost_per_million(one.tokens_per_s, price)) for name, one in figures.items()
        },
        "gpu_use": {name: NOT_MEASURED if one is None else shorten(one) for name, one in found.gpu_shares.items()},
        "best": best_of(figures),
        "foreign_cores": {name: shorten(one.foreign_cores) for name, one in figures.items()},
        "batch_sizes": found.rounds[0].sizes,
        "under_load": success.as_json(),
        "bars": BARS,
        "published": PUBLISHED,
    }


def best_of(figures: Mapping[str, Figures]) -> dict[str, str]:
    """The cheapest strategy, and that with the shortest mean latency."""
    return {"cost": cheapest(figures), "latency": min(figures, key=lambda name: figures[name].latency_mean_ms)}


def show_headline(console: Console, result: Mapping[str, Any], figures: Mapping[str, Figures], price: float) -> None:
    columns = ("strategy", "tokens/s", "requests/s", "latency mean", "p50", "p95", "p99 ms", "p99 - p50", "padding",
               "batch", "slots used", "GPU used (published 22% to 96%)", "write-ups' latency ms",
               f"cost a million, at {price:g} an hour", "complexity")  # fmt: skip
    policies = {name: one.policy for name, one in strategies(SLOTS).items()}
    table = Table(*columns, title="all requests at once")
    for name, row in sorted(figures.items(), key=lambda pair: -pair[1].tokens_per_s):
        spans = (row.latency_mean_ms, row.latency_p50_ms, row.latency_p95_ms, row.latency_p99_ms, row.jitter_ms)
        gpu = result["gpu_use"][name]
        used = gpu if isinstance(gpu, str) else f"{gpu:.0%}"
        shares = (
            f"{row.padding_ratio:.2f}",
            f"{row.batch_mean:.1f}",
            f"{row.slot_use:.0%}",
            used,
            f"{row.write_up_ms:.1f}",
        )
        cost = f"{result['cost_per_million_tokens'][name]:.3f}"
        speeds = f"{row.tokens_per_s:.0f}", f"{row.requests_per_s:.1f}"
        table.add_row(name, *speeds, *(f"{span:.0f}" for span in spans), *shares, cost, complexity(policies[name]))
    console.print(table)
    steps = ", ".join(f"{size}: {span:.2f}" for size, span in result["step_ms"].items())
    base, each = result["step_fit_ms"]
    console.print(f"ms of a step by its rows: {steps}; fit {base:.2f} + {each:.3f} n; "
                  f"a prompt token {result['prompt_token_us']:.1f} us")  # fmt: skip
    ratio = result["continuous_over_static_tokens_per_s"]
    bound = result["bound"]
    share = ratio / bound
    padded = result["bound_padded"]
    console.print(
        f"continuous over static: {ratio:.2f} times the tokens/s, {share:.2f} of the bound {bound:.2f} "
        f"(bar {BOUND_SHARE}: {met(share >= BOUND_SHARE)}); padded bound {padded:.2f}; published {PUBLISHED_RATIO}"
    )
    low, high = PUBLISHED_RATIO
    console.print(WHY.format(low=low, high=high, base=base, each=each, padded=padded, flat=result["bound_flat"]))
    mean = result["latency_mean_ratio"]
    success = result["success_share"]
    console.print(
        f"mean latency {mean:.2f} of static's (bar below 1: {met(mean < MEAN_RATIO)}); "
        f"success under load {success:.2%} (bar 99.7%: {met(success >= SUCCESS_SHARE)})"
    )
    static = figures[STATIC]
    continuous = figures[CONTINUOUS]
    console.print(
        "latency of static and continuous as the write-ups have it, the time of a batch over its requests: "
        f"{static.write_up_ms:.1f} and {continuous.write_up_ms:.1f} ms (theirs 340 and 47); of a request: "
        f"{static.latency_mean_ms:.0f} and {continuous.latency_mean_ms:.0f} ms"
    )
    _show_notes(console, result["batch_sizes"], figures)
    console.print(f"the best configuration: by cost {result['best']['cost']}, by latency {result['best']['latency']}")


def _show_notes(console: Console, sizes: Mapping[str, Sequence[int]], figures: Mapping[str, Figures]) -> None:
    """What the table alone does not say, of the strategies that were run."""
    if "predictive" in sizes:
        texts = ", ".join(map(str, sizes["predictive"][:16]))
        console.print(f"predictive, sizes of its batches: {texts}, ...: 0.9 of its own mean shrinks to its minimum")
    if {SORTED_PROMPT, SORTED_ORACLE} <= figures.keys():
        pair = [f"{figures[name].padding_ratio:.2f}" for name in (SORTED_PROMPT, SORTED_ORACLE)]
        console.print(
            f"{SORTED_PROMPT} has what a service knows, {SORTED_ORACLE} is an oracle: padding {' and '.join(pair)}, "
            f"without sorting {figures[STATIC].padding_ratio:.2f}"
        )
    foreign = max(one.foreign_cores for one in figures.values())
    if foreign > FOREIGN_LIMIT_CORES:
        console.print(f"other processes used up to {foreign:.2f} cores in a run: ratios are noise", style="yellow")


def met(holds: bool) -> str:
    return "met" if holds else "MISSED"
