"""From what the clients and the stack say to the result and its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table

from benchmarks.chaos.answers import duplicated
from benchmarks.chaos.clients import Counts, Different, Paused
from benchmarks.chaos.near_tie import Teacher
from benchmarks.chaos.plan import BARS, MIGRATIONS_BAR, NEAR_TIE_BAR, ON_ENGINES, Fault, gap_bar_ms
from benchmarks.chaos.questions import Api
from benchmarks.chaos.victims import Hit, Victims
from benchmarks.common.stats import lower_quantile

MIGRATIONS = "serve_app_migrations_total"
NOT_CONTINUABLE = "serve_app_not_continuable_total"
LATEST_S = 20.0  # after a fault on an engine, in which its streams have paused
SHOWN = 6  # differences that are shown
KEYS = (
    "requests",
    "kills",
    "failed",
    "hung",
    "mismatched",
    "duplicated_tokens",
    "leaked_leases",
    "near_tie",
    "edge_retries",
    "not_continuable",
    "migrations",
    "migration_gap_ms_p99",
)


@dataclass(slots=True)
class RouterCounts:
    """The routers' own counts, each read last before its router was killed: what it counted after that look is lost."""

    _last: dict[tuple[str, str, str], float] = field(default_factory=dict)

    def look(self, metrics: str) -> None:
        """Take in what GET /metrics says now."""
        for family in text_string_to_metric_families(metrics):
            for sample in family.samples:
                if sample.name in (MIGRATIONS, NOT_CONTINUABLE):
                    key = (sample.name, sample.labels["router"], sample.labels.get("reason", ""))
                    self._last[key] = max(self._last.get(key, 0.0), sample.value)

    def of(self, name: str) -> int:
        return round(sum(value for key, value in self._last.items() if key[0] == name))


def fault_of(gap: tuple[float, float], hits: Sequence[Hit]) -> Hit | None:
    """The fault on an engine that made a stream pause: the last one before the end of its pause."""
    begin, pause_s = gap
    found = [hit for hit in hits if hit.fault in ON_ENGINES and hit.at <= begin + pause_s]
    return found[-1] if found and begin <= found[-1].at + LATEST_S else None


def longest_pauses(streams: Sequence[Paused], hits: Sequence[Hit]) -> dict[Fault, list[float]]:
    """The longest pause of each stream as its client saw it, in ms, by the fault."""
    found: dict[Fault, list[float]] = {}
    for stream in streams:
        gap = max(stream.gaps, key=lambda pause: pause[1])
        hit = fault_of(gap, hits)
        if hit is not None:
            found.setdefault(hit.fault, []).append(gap[1] * 1000.0)
    return found


def p99(values: Sequence[float]) -> float:
    return lower_quantile(values, 0.99) or 0.0


def judged(different: Sequence[Different], teacher: Teacher | None) -> tuple[list[Different], int]:
    """The answers that are wrong, and how many others are near ties. Without a teacher, all are wrong."""
    wrong = [one for one in different if teacher is None or not _is_near_tie(one, teacher)]
    return wrong, len(different) - len(wrong)


def _is_near_tie(difference: Different, teacher: Teacher) -> bool:
    question = difference.question
    got = difference.got
    if len(got.texts) != len(question.prompts) or got.usage[0] != difference.expected.usage[0]:
        return False
    return all(
        teacher.is_near_tie(
            teacher.prompt(prompt, chat=question.api is not Api.COMPLETION),
            text,
            got.usage[1] if len(got.texts) == 1 else question.tokens,
            stopped=end == "stop",
        )
        for prompt, text, end in zip(question.prompts, got.texts, got.ends, strict=True)
    )


def result(
    counts: Counts, hits: Sequence[Hit], routers: RouterCounts, pauses: Mapping[Fault, Sequence[float]],
    leaked: int, teacher: Teacher | None,
) -> dict[str, Any]:  # fmt: skip
    """The result object; its keys are `KEYS`."""
    wrong, near = judged(counts.different, teacher)
    for difference in wrong[:SHOWN]:
        counts.sample(
            f"mismatch {difference.request_id}: {difference.question.body}\n  {difference.expected}\n  {difference.got}"
        )
    repeated = [duplicated(one.expected, one.got) for one in wrong]
    values = (
        counts.requests,
        len(hits),
        sum(counts.failed.values()),
        counts.hung,
        len(wrong),
        sum(len(text.split()) if teacher is None else teacher.count(text) for text in repeated if text),
        leaked,
        near,
        counts.edge_retries,
        routers.of(NOT_CONTINUABLE),
        routers.of(MIGRATIONS),
        {fault.value: round(p99(values), 1) for fault, values in pauses.items()},
    )
    return dict(zip(KEYS, values, strict=True))


def missed(found: Mapping[str, Any], at_edge: int) -> list[str]:
    """The figures that miss their bar. `at_edge`: requests in flight at the deaths of edge processes."""
    names = [name for name, bar in BARS.items() if found[name] > bar]
    if found["migrations"] < MIGRATIONS_BAR:
        names.append("migrations")
    if found["near_tie"] > NEAR_TIE_BAR * found["requests"]:
        names.append("near_tie")
    if found["edge_retries"] > at_edge:
        names.append("edge_retries")
    gaps = found["migration_gap_ms_p99"].items()
    return names + [f"gap of {name}" for name, gap_ms in gaps if gap_ms > gap_bar_ms(Fault(name))]


def tables(
    found: Mapping[str, Any], at_edge: int, victims: Victims, pauses: Mapping[Fault, Sequence[float]]
) -> list[Table]:
    """The figures with their bars, and the faults with what they took."""
    bars = {name: f"{bar:g}" for name, bar in BARS.items()} | {
        "migrations": f">= {MIGRATIONS_BAR}",
        "near_tie": f"<= {NEAR_TIE_BAR:.1%} of the requests",
        "edge_retries": f"<= {at_edge}, in flight at the deaths of routers and HAProxy",
    }
    late = missed(found, at_edge)
    figures = Table("figure", "value", "bar", title="under faults")
    for name in KEYS[:-1]:
        verdict = f"{bars[name]}: {'MISSED' if name in late else 'met'}" if name in bars else ""
        figures.add_row(name, str(found[name]), verdict)
    faults = Table(
        "fault", "done", "ended after, s", "all back after, s", "streams moved", "their pause p50, p99, ms", "bar",
        title="by kind of fault",
    )  # fmt: skip
    for fault in Fault:
        done = sum(hit.fault is fault for hit in victims.hits)
        if not done:
            continue
        own = sorted(pauses.get(fault, ()))
        verdict = f"{gap_bar_ms(fault):g}: {'MISSED' if p99(own) > gap_bar_ms(fault) else 'met'}" if own else ""
        spans = (_span(victims.gone_s[fault]), _span(victims.back_s[fault]))
        faults.add_row(fault.value, str(done), *spans, str(len(own)), _middle(own), verdict)
    return [figures, faults]


def _middle(ordered: Sequence[float]) -> str:
    return f"{ordered[len(ordered) // 2]:.0f}, {p99(ordered):.0f}" if ordered else ""


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.1f} to {max(values):.1f}" if values else ""
