"""Counts the minutes of one router: what has been counted since the last part is a line of its own.

Invariant: each request is in exactly one line. A line has at most a minute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from serve_app.core.receipts import Receipt
from serve_app.core.records.minutes import MINUTE_S, Counts, Group, Grouping, MakeSketch
from serve_app.core.usage import NamedTenants

OWN = (Grouping.CLASS, Grouping.MODEL, Grouping.NAME)  # of which a tenant's own rows have what waits


class MinuteBook:
    """The present minute.

    Args:
        named_tenants: how many tenants have rows of their own, those of most use.
    """

    def __init__(self, make_sketch: MakeSketch, named_tenants: int = 0) -> None:
        self._make_sketch = make_sketch
        self.tenants = NamedTenants(named_tenants)
        self.minute: int | None = None  # the present one: seconds since 1970 over 60; None: nothing is counted
        self._groups: dict[Group, Counts] = {}
        self._peaks: dict[str, dict[str, int]] = {}

    @property
    def has_counts(self) -> bool:
        return bool(self._groups or self._peaks)

    def is_over(self, now: float) -> bool:
        """Whether the counted minute has ended."""
        return self.minute is not None and int(now // MINUTE_S) != self.minute

    def arrived(self, model: str, request_class: str, tenant: str, at: float) -> None:
        """Count an arrival."""
        self._group(model, request_class, tenant, at).count("arrivals")

    def ended(self, receipt: Receipt, now: float) -> None:
        """Count an ended request."""
        self.tenants.add(receipt.tenant, 1 + (receipt.prompt_tokens or 0) + (receipt.output_tokens or 0))
        trace = receipt.trace
        asked_model = "" if trace.is_shadow else trace.asked_model or ""
        place = receipt.request_class.label, receipt.tenant, now, asked_model
        self._group(receipt.model, *place).add(receipt)
        for model, _ in trace.hops:
            self._group(model, *place).count("left")

    def waiting(self, groups: Iterable[Group], now: float) -> None:
        """Note the requests that wait now; each has its tenant itself."""
        counts: dict[str, Counter[str]] = {by: Counter() for by in Grouping}
        for waits in groups:
            group = waits._replace(tenant=self.tenants.label(waits.tenant))
            for by in Grouping:
                counts[by][group.name(by)] += 1
            for by in OWN:
                counts.setdefault(own_view(by), Counter())[f"{group.tenant}\0{group.name(by)}"] += 1
        if not counts[Grouping.TOTAL]:
            return
        self.minute = int(now // MINUTE_S) if self.minute is None else self.minute
        for view, found in counts.items():
            peaks = self._peaks.setdefault(view, {})
            for name, count in found.items():
                peaks[name] = max(count, peaks.get(name, 0))

    def take(self, now: float) -> dict[str, Any]:
        """What was counted since the last call, in plain form. The names of tenants are chosen anew."""
        groups = [[*_plain(group), counts.plain()] for group, counts in self._groups.items()]
        plain = {"minute": self.minute, "groups": groups, "peaks": self._peaks}
        self.minute = None
        self._groups = {}
        self._peaks = {}
        self.tenants.choose(now)
        return plain

    def _group(self, model: str, request_class: str, tenant: str, now: float, asked_model: str = "") -> Counts:
        if self.minute is None:
            self.minute = int(now // MINUTE_S)
        group = Group(model, request_class, self.tenants.label(tenant), asked_model)
        found = self._groups.get(group)
        if found is None:
            found = self._groups[group] = Counts.empty(self._make_sketch)
        return found


def _plain(group: Group) -> Iterable[str]:
    return group if group.asked_model else group[:-1]


def own_view(by: Grouping) -> str:
    """The view of `peaks` that has a tenant's own rows."""
    return f"own {by.value}"
