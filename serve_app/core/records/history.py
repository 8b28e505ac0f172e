"""Adds up the minutes of routers and nodes, as a question asks for them.

Invariant: a row of several minutes has the sketch of all their requests. Of waiting requests it has the most that any
minute had, of each minute the sum of the routers' own largest numbers, which is never too low.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.core.records.book import own_view
from serve_app.core.records.minutes import COUNTS, MINUTE_S, OUTCOMES, Counts, Group, Grouping, MakeSketch
from serve_app.core.usage import OTHER

RowKey = tuple[int, str]  # the first minute of a row, and its name


@dataclass(frozen=True, slots=True)
class HistoryQuestion:
    """A question.

    Args:
        since, until: bounds in seconds since 1970; `until` is excluded, and None is none.
        step_s: of a row, whole minutes; 0: a row is of the whole time, and has the time of its first minute.
        tenant, model, request_class: only theirs; None or empty: of all.
        asked_model: only what asked for this name, of `routes` or of a model.
    """

    since: float
    until: float | None = None
    step_s: int = MINUTE_S
    by: Grouping = Grouping.TOTAL
    tenant: str | None = None
    model: str = ""
    request_class: str = ""
    asked_model: str = ""

    def has(self, minute: int) -> bool:
        """Whether a minute is wanted."""
        at = minute * MINUTE_S
        return at + MINUTE_S > self.since and (self.until is None or at < self.until)

    def first_minute(self, minute: int) -> int:
        """The first minute of the row that has a minute."""
        if not self.step_s:
            return int(self.since // MINUTE_S)
        steps = self.step_s // MINUTE_S
        return minute // steps * steps

    def has_group(self, group: Group) -> bool:
        """Whether a group is wanted."""
        return (
            (self.tenant is None or group.tenant == self.tenant)
            and (not self.model or group.model == self.model)
            and (not self.asked_model or group.asked_name == self.asked_model)
            and (not self.request_class or group.request_class == self.request_class)
        )


class HistorySum:
    """The rows of an answer."""

    def __init__(self, question: HistoryQuestion, make_sketch: MakeSketch) -> None:
        self._question = question
        self._make_sketch = make_sketch
        self.has_others = False  # whether tenants without a name were counted
        self._rows: dict[RowKey, Counts] = {}
        self._peaks: dict[tuple[int, str], dict[str, int]] = {}  # by minute and row: each router's
        self._other_peaks: dict[RowKey, int] = {}  # of other nodes, by row

    def add_minute(self, plain: Mapping[str, Any], router: str) -> None:
        """Add a line of a router."""
        question = self._question
        minute = plain["minute"]
        if minute is None or not question.has(minute):
            return
        first = question.first_minute(minute)
        for *names, counts in plain["groups"]:
            group = Group(*names)
            self.has_others = self.has_others or group.tenant == OTHER
            if question.has_group(group):
                self._row((first, group.name(question.by))).merge(counts)
        for name, count in self._peaks_of(plain["peaks"]).items():
            peaks = self._peaks.setdefault((minute, name), {})
            peaks[router] = max(count, peaks.get(router, 0))

    def add_rows(self, plain: Mapping[str, Any]) -> None:
        """Add the rows of another node."""
        self.has_others = self.has_others or plain["has_others"]
        for first, name, counts, peak in plain["rows"]:
            self._row((first, name)).merge(counts)
            self._other_peaks[first, name] = self._other_peaks.get((first, name), 0) + peak

    def plain(self) -> dict[str, Any]:
        """The rows, in a form that another sum adds."""
        peaks = self._row_peaks()
        for key in peaks:
            self._row(key)
        rows = [[*key, row.plain(), peaks.get(key, 0)] for key, row in sorted(self._rows.items())]
        return {"rows": rows, "has_others": self.has_others}

    def rows(self) -> Iterable[dict[str, Any]]:
        """The rows in order of their time. `time`: in seconds since 1970. By names, what has ended has arrived."""
        peaks = self._row_peaks()
        is_by_name = bool(self._question.asked_model) or self._question.by is Grouping.NAME
        for key in peaks:
            self._row(key)
        for (first, name), row in sorted(self._rows.items()):
            counts = dict(zip(COUNTS, row.counts, strict=True))
            if is_by_name:
                counts["arrivals"] = sum(counts[outcome] for outcome in OUTCOMES)
                if not any(counts.values()) and not peaks.get((first, name)):
                    continue  # only arrivals of requests to another name were counted here
            yield {
                "time": first * MINUTE_S,
                "name": name,
                **counts,
                "waiting_max": peaks.get((first, name), 0),
                "first_token_p50_s": row.first_token.quantile(0.5),
                "first_token_p95_s": row.first_token.quantile(0.95),
                "request_p50_s": row.request.quantile(0.5),
                "request_p95_s": row.request.quantile(0.95),
                "wait_p95_s": row.wait.quantile(0.95),
                "waits": row.waits,
            }

    def _peaks_of(self, peaks: Mapping[str, Mapping[str, int]]) -> Mapping[str, int]:
        """The largest numbers of a minute, by row."""
        question = self._question
        if question.model or question.request_class or question.asked_model:
            return {}  # not counted by several at once
        if question.tenant is None:
            return peaks.get(question.by, {})
        if question.by in (Grouping.TOTAL, Grouping.TENANT):
            found = peaks.get(Grouping.TENANT, {}).get(question.tenant, 0)
            return {(question.by.value if question.by is Grouping.TOTAL else question.tenant): found} if found else {}
        begin = f"{question.tenant}\0"
        own = peaks.get(own_view(question.by), {})
        return {name.removeprefix(begin): count for name, count in own.items() if name.startswith(begin)}

    def _row_peaks(self) -> dict[RowKey, int]:
        found: dict[RowKey, int] = {}
        for (minute, name), peaks in self._peaks.items():
            key = self._question.first_minute(minute), name
            found[key] = max(found.get(key, 0), sum(peaks.values()))
        for key, peak in self._other_peaks.items():
            found[key] = found.get(key, 0) + peak
        return found

    def _row(self, key: RowKey) -> Counts:
        found = self._rows.get(key)
        if found is None:
            found = self._rows[key] = Counts.empty(self._make_sketch)
        return found
