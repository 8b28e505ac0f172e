"""The batch curve: throughput and latency of N clients as factors over one client, its knee, and published rows.

Pure but for the printing. Definitions, for N clients in a closed loop (each has exactly one request in flight):

- tokens/s: output tokens that arrive in the window over its length. Latency p50: of the answers that end in the window.
  Both are the median over rounds of the round's figure: pooled, the answers of fast rounds would outnumber the others,
  and latency would no longer belong to the throughput beside it. The p99 is of all answers.
- Requests/s: answers that end in the windows over their length.
- Slot use: the time that requests spend between their first and their last token, as far as it lies in the window, over
  min(clients, slots of the engine) x length of the window. It is what clients can see of the engine: queue, prefill and
  the way back to the next request count as unused, also where the engine holds a slot for a prefill.
- Power: throughput over latency (Kleinrock 1979, "Power and deterministic rules of thumb for probabilistic problems in
  computer communications"). The knee is the batch of greatest power: beyond it a doubling multiplies latency by more
  than throughput. By Little's law, with answers of one length, throughput x g means latency x 2 / g, so a doubling
  beyond the knee gives less than sqrt(2) - 1 = 41% more throughput for more than 41% more latency.

Windows in which other processes of the machine used more than `FOREIGN_LIMIT_CORES` are left out of a row that has
quieter ones: which windows count depends on those processes alone, never on the figures of the window.

Invariant: a factor compares an arm with itself at one client, so machines and models of other speeds can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common import stats
from benchmarks.common.report import P99, Analysis, Window
from benchmarks.common.run import FOREIGN_LIMIT_CORES
from benchmarks.common.stats import shorten

PUBLISHED = "published"  # the name of its curve beside those of the arms
MIN_ANSWERS_P99 = 100  # below, no answer lies beyond the p99; the number of answers stands beside it
NEAR_SHARE = 0.05  # batches whose power is within this of the greatest are named too: runs differ by as much


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One batch of a curve; the unit of `latency` is the same along a curve."""

    batch: int
    tokens_per_s: float
    latency: float

    @property
    def power(self) -> float:
        return self.tokens_per_s / self.latency


# A 70B model (Hermes 3) on four A100, from a practitioner's textbook; latency in seconds.
PUBLISHED_POINTS = (
    CurvePoint(1, 45.0, 33.3),
    CurvePoint(4, 142.0, 42.5),
    CurvePoint(8, 248.0, 51.6),
    CurvePoint(16, 398.0, 64.5),
    CurvePoint(32, 587.0, 87.4),
    CurvePoint(64, 743.0, 110.2),
    CurvePoint(128, 821.0, 198.5),
)


def knee(points: Sequence[CurvePoint]) -> int | None:
    """The batch of greatest power, the smallest of equals; None where power still grows at the last batch."""
    if not points:
        return None
    ordered = sorted(points, key=lambda point: point.batch)
    best = max(ordered, key=lambda point: point.power)  # the first of equals
    return None if best is ordered[-1] else best.batch


def near_knee(points: Sequence[CurvePoint]) -> list[int]:
    """The batches whose power is within `NEAR_SHARE` of the greatest."""
    best = max(point.power for point in points)
    return [point.batch for point in points if point.power >= (1 - NEAR_SHARE) * best]


def factors(points: Sequence[CurvePoint]) -> dict[int, tuple[float, float]]:
    """Throughput and latency of each batch over those of batch 1; empty without a batch 1."""
    single = next((point for point in points if point.batch == 1), None)
    if single is None:
        return {}
    return {p.batch: (p.tokens_per_s / single.tokens_per_s, p.latency / single.latency) for p in points}


def quiet(windows: Sequence[Window]) -> Sequence[Window]:
    """The windows that other processes left alone; all of them where there is none."""
    return [w for w in windows if w.foreign_cores <= FOREIGN_LIMIT_CORES] or windows


def slot_use(windows: Sequence[Window], slots: int) -> float:
    """The used share of the slots that the clients could fill (see the module's definition)."""
    available_s = sum(min(w.clients, slots) * float(w.result["window_s"]) for w in windows)
    return sum(float(w.result["decoding_s"]) for w in windows) / available_s


def published_rows() -> dict[str, dict[str, float]]:
    """The published rows with their factors."""
    found = factors(PUBLISHED_POINTS)
    return {
        str(p.batch): {
            "tokens_per_s": p.tokens_per_s,
            "seconds": p.latency,
            "throughput_factor": shorten(found[p.batch][0]),
            "latency_factor": shorten(found[p.batch][1]),
        }
        for p in PUBLISHED_POINTS
    }


def _row(analysis: Analysis, arm: str, clients: int, slots: int) -> dict[str, Any]:
    """What one arm did under so many clients; latencies are None where no answer ended in a window."""
    measured = analysis.of(arm, clients)
    windows = quiet(measured)
    throughput = stats.as_rounds([w.result["tokens_per_s_slices"] for w in windows])
    rounds = stats.as_rounds([w.result["latency_ms"] for w in windows])
    answers = sum(map(len, rounds))
    p50 = float(np.median([np.median(latencies) for latencies in rounds])) if rounds else None
    p99 = float(np.quantile(np.concatenate(rounds), P99)) if answers >= MIN_ANSWERS_P99 else None
    length_s = sum(float(w.result["window_s"]) for w in windows)
    return {
        "tokens_per_s": shorten(stats.median_of_means(throughput)),
        "requests_per_s": shorten(sum(w.result["requests"] for w in windows) / length_s),
        "latency_ms_p50": None if p50 is None else shorten(p50),
        "latency_ms_p99": None if p99 is None else shorten(p99),
        "answers": answers,
        "windows": len(windows),
        "windows_left_out": len(measured) - len(windows),
        "slot_use": shorten(slot_use(windows, slots)),
        "foreign_cores_max": shorten(max(w.foreign_cores for w in windows), 2),
    }


def build(analysis: Analysis, slots: int) -> dict[str, Any]:
    """The curve of each arm, the published rows, and the knees; figures to four digits.

    Args:
        slots: sequences that one engine step runs (`max_num_seqs`).
    """
    curves = {arm: {str(c): _row(analysis, arm, c, slots) for c in analysis.clients} for arm in analysis.arms}
    knees: dict[str, int | None] = {}
    for arm, rows in curves.items():
        points = _points(rows, "latency_ms_p50")
        over_one = factors(points)
        for clients, row in rows.items():
            throughput, latency = over_one.get(int(clients), (None, None))
            row["throughput_factor"] = None if throughput is None else shorten(throughput)
            row["latency_factor"] = None if latency is None else shorten(latency)
        knees[arm] = knee(points)
    return {
        "curves": curves,
        "knee": {**knees, PUBLISHED: knee(PUBLISHED_POINTS)},
        PUBLISHED: published_rows(),
        "slots": slots,
    }


def _points(rows: Mapping[str, Any], latency: str) -> list[CurvePoint]:
    measured = [(int(batch), row["tokens_per_s"], row[latency]) for batch, row in rows.items()]
    return [CurvePoint(*point) for point in measured if point[2] is not None]


def points_of(curve: Mapping[str, Any]) -> dict[str, list[CurvePoint]]:
    """Each arm's curve (latency in ms) and the published one (in seconds), from what `build` gave."""
    arms = {arm: _points(rows, "latency_ms_p50") for arm, rows in curve["curves"].items()}
    return {**arms, PUBLISHED: _points(curve[PUBLISHED], "seconds")}


def print_curve(console: Console, curve: Mapping[str, Any]) -> None:
    """What was measured, its factors beside the published ones, and the knees."""
    for arm, rows in curve["curves"].items():
        console.print(_measured_table(arm, rows))
    console.print(_factor_table(points_of(curve)))
    for name, points in points_of(curve).items():
        console.print(f"  {knee_line(name, points)}")


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _measured_table(arm: str, rows: Mapping[str, Any]) -> Table:
    columns = ("clients", "tokens/s", "tokens/s a client", "requests/s", "slot use", "p50 ms", "p99 ms", "answers")
    table = _table(f"batch curve of {arm}: answers", (*columns, "windows", "others, cores"))
    for clients, row in rows.items():
        each = row["tokens_per_s"] / int(clients)
        p50 = row["latency_ms_p50"]
        p99 = row["latency_ms_p99"]
        measured = (row["tokens_per_s"], shorten(each), row["requests_per_s"], row["slot_use"], p50, p99)
        kept = f"{row['windows']} of {row['windows'] + row['windows_left_out']}"
        cells = (*map(_cell, measured), str(row["answers"]), kept, _cell(row["foreign_cores_max"]))
        table.add_row(clients, *cells)
    return table


def _factor_table(curves: Mapping[str, Sequence[CurvePoint]]) -> Table:
    """Throughput, latency and power over one client, side by side."""
    columns = [f"{what} x, {name}" for what in ("throughput", "latency", "power") for name in curves]
    table = _table("factors over one client", ("batch", *columns))
    over_one = {name: factors(points) for name, points in curves.items()}
    for batch in sorted({batch for found in over_one.values() for batch in found}):
        pairs = [found.get(batch) for found in over_one.values()]
        triples = [(None, None, None) if pair is None else (*pair, pair[0] / pair[1]) for pair in pairs]
        cells = [value if value is None else shorten(value, 3) for row in zip(*triples, strict=True) for value in row]
        table.add_row(str(batch), *map(_cell, cells))
    return table


def knee_line(name: str, points: Sequence[CurvePoint]) -> str:
    """One sentence about a knee: where, what the next batch gives, and which batches are as good."""
    at = knee(points)
    if at is None:
        return f"knee of {name}: none in this range, throughput over latency still grows"
    here = next(point for point in points if point.batch == at)
    after = min((point for point in points if point.batch > at), key=lambda point: point.batch)
    gain = after.tokens_per_s / here.tokens_per_s - 1
    growth = after.latency / here.latency - 1
    near = ", ".join(str(batch) for batch in near_knee(points) if batch != at)
    also = f"; within {NEAR_SHARE:.0%} of its power: {near}" if near else ""
    return f"knee of {name}: {at}; {after.batch} gives {gain:+.0%} throughput for {growth:+.0%} latency{also}"
