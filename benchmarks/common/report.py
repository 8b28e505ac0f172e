"""From measured windows to the result object and its tables. Pure but for the printing.

Definitions. TTFT: from writing the request to the first event with tokens. ITL: the gap between successive events with
tokens of one answer, as read from the socket; an event may carry several tokens and one read may bring several events
(gaps of zero). A client count's CPU per token: CPU seconds of a role in the window over the tokens of the window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common import stats
from benchmarks.common.processes import API_SERVER, ENGINE_CORE, ENGINE_REPLICA, HAPROXY, ROUTER_REPLICA
from benchmarks.common.stats import Estimate, shorten

RATIO_GOAL = 1.0
RATIO_BARS: Mapping[int, float] = {1: 0.95, 8: 0.95, 32: 0.95, 64: 0.90}  # tokens/s of ours over vLLM's own server
CPU_BARS: Mapping[str, float] = {"cpu_ratio_engine_replica": 1.05, "cpu_ratio_router_haproxy": 0.4}  # from 8 clients up
US_PER_S = 1e6
P50 = 0.5
P99 = 0.99


@dataclass(frozen=True, slots=True)
class Window:
    """One measured window: the load generator's result, and CPU seconds by role of the arm under load.

    `foreign_cores` is what all processes that take no part used meanwhile, in cores: the noise of the machine.
    """

    arm: str
    clients: int
    round: int
    result: Mapping[str, Any]
    cpu_s: Mapping[str, float]
    foreign_cores: float

    @property
    def tokens_per_s(self) -> float:
        return float(self.result["tokens"]) / float(self.result["window_s"])

    def cpu_us_per_token(self, role: str | None = None) -> float:
        """Of one role; of all but EngineCore when None."""
        used = sum(s for name, s in self.cpu_s.items() if (name == role if role else name != ENGINE_CORE))
        return used / float(self.result["tokens"]) * US_PER_S


def progress_line(window: Window) -> str:
    """One line about a window that has just been measured."""
    return (
        f"round {window.round} {window.arm:>7} {window.clients:>3} clients: {window.tokens_per_s:6.0f} tokens/s, "
        f"{window.result['requests']} answers, {window.cpu_us_per_token():.0f} us CPU a token outside EngineCore, "
        f"others on this machine {window.foreign_cores:.2f} cores"
    )


class Analysis:
    """The windows of a whole run, by arm and client count. The first arm is the baseline, the second is compared."""

    def __init__(
        self,
        windows: Sequence[Window],
        arms: Sequence[str],
        clients: Sequence[int],
        *,
        seed: int,
        resamples: int = stats.RESAMPLES,
    ) -> None:
        self.windows = windows
        self.arms = arms
        self.clients = clients
        self._resamples = resamples
        self._rng = np.random.default_rng(seed)

    def of(self, arm: str, clients: int) -> list[Window]:
        return sorted((w for w in self.windows if w.arm == arm and w.clients == clients), key=lambda w: w.round)

    def rounds(self, arm: str, clients: int, key: str) -> list[stats.Samples]:
        return stats.as_rounds([w.result[key] for w in self.of(arm, clients)])

    def figures(self, arm: str, clients: int) -> dict[str, Any]:
        """Everything about one arm at one client count."""
        windows = self.of(arm, clients)
        gaps = [[np.asarray(g, dtype=np.float64) / 1000.0 for g in w.result["gaps_us"]] for w in windows]
        itl_p50, itl_p99 = stats.clustered_quantiles(gaps, [P50, P99], self._rng, resamples=self._resamples)
        roles = sorted({role for w in windows for role in w.cpu_s})
        return {
            "tokens_per_s": self._throughput(arm, clients).as_json(),
            "ttft_ms": {
                "p50": self._quantile(arm, clients, "ttft_ms", P50),
                "p99": self._quantile(arm, clients, "ttft_ms", P99),
            },
            "itl_ms": {"p50": itl_p50.as_json(), "p99": itl_p99.as_json()},
            "latency_ms": {"p50": self._quantile(arm, clients, "latency_ms", P50)},
            "cpu_us_per_token": {r: _median([w.cpu_us_per_token(r) for w in windows]) for r in roles},
            "loadgen_cpu_us_per_token": _median([w.result["cpu_s"] / w.result["tokens"] * US_PER_S for w in windows]),
            "requests": sum(w.result["requests"] for w in windows),
            "foreign_cores": _median([w.foreign_cores for w in windows]),
        }

    def _estimate(self, arms: Sequence[stats.Rounds], statistic: Callable[[Sequence[stats.Rounds]], float]) -> Estimate:
        return stats.estimate(arms, statistic, self._rng, resamples=self._resamples)

    def _throughput(self, arm: str, clients: int) -> Estimate:
        rounds = self.rounds(arm, clients, "tokens_per_s_slices")
        return self._estimate([rounds], lambda arms: stats.median_of_means(arms[0]))

    def _quantile(self, arm: str, clients: int, key: str, q: float) -> dict[str, Any]:
        return stats.quantile_estimate(
            self.rounds(arm, clients, key), q, self._rng, resamples=self._resamples
        ).as_json()

    def compare(self, clients: int) -> dict[str, Any]:
        """Second arm against first at one client count: throughput ratio, and TTFT added in milliseconds."""
        slices = [self.rounds(arm, clients, "tokens_per_s_slices") for arm in self.arms[:2]]
        ttft = [self.rounds(arm, clients, "ttft_ms") for arm in self.arms[:2]]
        return {
            "ratio": self._estimate(slices, stats.ratio_of_medians).as_json(),
            "ratio_paired": self._estimate(slices, stats.median_of_ratios).as_json(),
            "ttft_added_ms": self._estimate(ttft, stats.pooled_median_difference).as_json(),
        }

    def cpu_ratio(self, clients: int, roles: Sequence[str]) -> float | None:
        """CPU a token of these processes of the second arm over that of vLLM's API server in the first: the median over
        rounds of the quotient within a round."""
        pairs = zip(*(self.of(arm, clients) for arm in self.arms[:2]), strict=False)
        servers = [(ours, baseline.cpu_us_per_token(API_SERVER)) for baseline, ours in pairs]
        return _median([sum(map(ours.cpu_us_per_token, roles)) / server for ours, server in servers if server])

    def outside_engine(self, arm: str) -> Estimate:
        """CPU microseconds a token of all processes but EngineCore: each client count weighs the same."""
        by_count = [[w.cpu_us_per_token() for w in self.of(arm, c)] for c in self.clients]
        per_round = [[float(np.mean(values))] for values in zip(*by_count, strict=False)]
        return self._estimate([stats.as_rounds(per_round)], lambda arms: stats.median_of_means(arms[0]))


def _median(values: Sequence[float]) -> float | None:
    return shorten(float(np.median(values))) if values else None


def build(analysis: Analysis, conditions: Mapping[str, Any]) -> dict[str, Any]:
    """The result object; the same keys whatever the length of the run."""
    two = len(analysis.arms) == 2
    compared = {str(c): analysis.compare(c) for c in analysis.clients} if two else {}
    outside = {arm: analysis.outside_engine(arm).as_json() for arm in analysis.arms}
    return {
        "ratio": {c: e["ratio"]["value"] for c, e in compared.items()},
        "ttft_added_ms": {c: e["ttft_added_ms"]["value"] for c, e in compared.items()},
        "cpu_us_per_token_outside_engine": {arm: e["value"] for arm, e in outside.items()},
        "cpu_ratio_engine_replica": {c: analysis.cpu_ratio(int(c), [ENGINE_REPLICA]) for c in compared},
        "cpu_ratio_router_haproxy": {c: analysis.cpu_ratio(int(c), [ROUTER_REPLICA, HAPROXY]) for c in compared},
        "idle_cores": {arm: shorten(sum(roles.values())) for arm, roles in conditions.get("idle_cores", {}).items()},
        "intervals": {
            "ratio": {c: e["ratio"] for c, e in compared.items()},
            "ratio_paired": {c: e["ratio_paired"] for c, e in compared.items()},
            "ttft_added_ms": {c: e["ttft_added_ms"] for c, e in compared.items()},
            "cpu_us_per_token_outside_engine": outside,
        },
        "bars": {"ratio": {str(c): bar for c, bar in RATIO_BARS.items()}, "ratio_goal": RATIO_GOAL, **CPU_BARS},
        "arms": {arm: {str(c): analysis.figures(arm, c) for c in analysis.clients} for arm in analysis.arms},
        "windows": len(analysis.windows),
        "errors": sum(w.result["errors"] for w in analysis.windows),
        "conditions": dict(conditions),
    }


def cell(estimate: Mapping[str, Any], unit: str = "") -> str:
    """A figure with its interval, or a dash."""
    if estimate["value"] is None:
        return "-"
    ends = estimate["interval"]
    return f"{estimate['value']:g}{unit}" + (f" [{ends[0]:g}, {ends[1]:g}]" if ends else "")


def print_tables(console: Console, result: Mapping[str, Any]) -> None:
    """Speed, CPU by role, and the comparison with its bars."""
    speed = Table(title="speed (95% bootstrap intervals; p99 only from 1,000 samples on)")
    columns = ("clients", "arm", "tokens/s", "TTFT p50 ms", "ITL p50 ms", "ITL p99 ms", "answers")
    for column in columns:
        speed.add_column(column, justify="left" if column == "arm" else "right")
    arms: Mapping[str, Any] = result["arms"]
    for c in next(iter(arms.values())):
        for arm, by_count in arms.items():
            f = by_count[c]
            cells = [cell(x) for x in (f["tokens_per_s"], f["ttft_ms"]["p50"], f["itl_ms"]["p50"], f["itl_ms"]["p99"])]
            speed.add_row(c, arm, *cells, str(f["requests"]))
        speed.add_section()
    console.print(speed)
    console.print(_cpu_table(result))
    if result["ratio"]:
        console.print(_comparison_table(result))


def _cpu_table(result: Mapping[str, Any]) -> Table:
    table = Table(title="CPU microseconds per token by process (median over rounds)")
    counts = list(next(iter(result["arms"].values())))
    for column in ("arm", "process", *(f"{c} clients" for c in counts)):
        table.add_column(column, justify="left" if column in ("arm", "process") else "right")
    for arm, by_count in result["arms"].items():
        roles = sorted({r for f in by_count.values() for r in f["cpu_us_per_token"]})
        for role in roles:
            if not any(f["cpu_us_per_token"].get(role) for f in by_count.values()):
                continue  # helpers that never ran
            table.add_row(arm, role, *(f"{by_count[c]['cpu_us_per_token'].get(role, 0.0):g}" for c in counts))
        table.add_row(arm, "(load generator)", *(f"{by_count[c]['loadgen_cpu_us_per_token']:g}" for c in counts))
        outside = cell(result["intervals"]["cpu_us_per_token_outside_engine"][arm])
        table.add_row(arm, f"all but EngineCore, mean of counts: {outside}")
        table.add_section()
    return table


def _comparison_table(result: Mapping[str, Any]) -> Table:
    baseline, measured = list(result["arms"])
    table = Table(title=f"{measured} over {baseline}")
    columns = ("clients", "tokens/s ratio", "bar", "goal", "ratio, paired rounds", "TTFT added ms", *CPU_BARS)
    for column in columns:
        table.add_column(column, justify="right")
    intervals = result["intervals"]
    for c in result["ratio"]:
        bar = result["bars"]["ratio"].get(c)
        cells = [cell(intervals[key][c]) for key in ("ratio", "ratio_paired", "ttft_added_ms")]
        cpu = ["-" if result[key][c] is None else f"{result[key][c]:g}" for key in CPU_BARS]
        table.add_row(c, cells[0], f"{bar:g}" if bar else "-", f"{RATIO_GOAL:g}", cells[1], cells[2], *cpu)
    idle = ", ".join(f"{arm} {cores:g}" for arm, cores in result["idle_cores"].items())
    table.caption = f"CPU ratios: over vLLM's API server, a token. Idle, in cores: {idle}"
    return table
