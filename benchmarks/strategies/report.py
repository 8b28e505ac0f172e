"""The tables and the JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.run import FOREIGN_LIMIT_CORES
from benchmarks.common.stats import shorten
from benchmarks.strategies.figures import Figures
from benchmarks.strategies.measure import Offline
from benchmarks.strategies.strategy import SLOTS, complexity, strategies

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
WHY = (
    "Why ours differs from the published {low} to {high}: they compare with rows padded to the longest answer, on GPUs "
    "where a step takes about the same with one row as with 32, at lengths that spread more. Here a step takes "
    "{base:.2f} ms + {each:.3f} ms a row: a row that has ended costs static batches its slot and no time. With these "
    "lengths an engine that pads would give {padded:.2f}, and one whose step always takes the same {flat:.2f}."
)


def headline(found: Offline, success: Figures) -> dict[str, Any]:
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
        "foreign_cores": {name: shorten(one.foreign_cores) for name, one in figures.items()},
        "batch_sizes": found.rounds[0].sizes,
        "under_load": success.as_json(),
        "bars": BARS,
        "published": PUBLISHED_RATIO,
    }


def show_headline(console: Console, result: Mapping[str, Any], figures: Mapping[str, Figures]) -> None:
    columns = ("strategy", "tokens/s", "requests/s", "latency mean", "p50", "p95", "p99 ms", "p99 - p50", "padding",
               "batch", "slots used", "complexity")  # fmt: skip
    policies = {name: one.policy for name, one in strategies(SLOTS).items()}
    table = Table(*columns, title="all requests at once")
    for name, row in sorted(figures.items(), key=lambda pair: -pair[1].tokens_per_s):
        spans = (row.latency_mean_ms, row.latency_p50_ms, row.latency_p95_ms, row.latency_p99_ms, row.jitter_ms)
        shares = (f"{row.padding_ratio:.2f}", f"{row.batch_mean:.1f}", f"{row.slot_use:.0%}")
        speeds = f"{row.tokens_per_s:.0f}", f"{row.requests_per_s:.1f}"
        table.add_row(name, *speeds, *(f"{span:.0f}" for span in spans), *shares, complexity(policies[name]))
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
    foreign = max(one.foreign_cores for one in figures.values())
    if foreign > FOREIGN_LIMIT_CORES:
        console.print(f"other processes used up to {foreign:.2f} cores in a run: ratios are noise", style="yellow")


def met(holds: bool) -> str:
    return "met" if holds else "MISSED"
