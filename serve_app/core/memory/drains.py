"""Which engines drain, until when, and what becomes of their requests.

An engine drains since an operator says so (`serve-app drain`), its node leaves, defragmentation restarts it, or it uses
more memory than it was granted. It takes no new request. Those that it runs may finish until its deadline; the routers
move the rest to other engines, and then the engine ends.

Rules
- An engine of a node that leaves drains once its `drain_s` and `MOVE_S` are just left. Serve may have replaced it
  elsewhere by then; so long it serves.
- What an engine reports of its drain is also the memory of it: an actor that has just started knows it from there.

Invariant: an engine that drains ends, and its deadline never moves back.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace

from serve_app.core.memory.reports import DrainReport, EngineReport
from serve_app.core.messages import message
from serve_app.core.times import MOVE_S

KEPT_S = 600.0  # how long the figures of an ended drain can be asked for
RESUMED = "it drained before the quota actor started"


@message
@dataclass(frozen=True, slots=True)
class DrainRequest:
    """An operator's order to drain an engine. `within_s`: None: its model's `drain_s`."""

    replica: str
    within_s: float | None = None


@dataclass(frozen=True, slots=True)
class Drain:
    """One engine that drains, or has.

    Args:
        until: its deadline.
        progress: as it reported last.
        ended_at: None: it has not ended.
        is_final: it reported `progress` at its end; else it ended without a word, and what it ran then is not known.
    """

    replica: str
    model: str
    why: str
    until: float
    progress: DrainReport
    ended_at: float | None = None
    is_final: bool = False


class Drains:
    """See the module. All times are of one monotonic clock."""

    def __init__(self) -> None:
        self._drains: dict[str, Drain] = {}
        self._leaving: dict[str, float] = {}  # by node: when it is gone

    def begin(self, report: EngineReport, why: str, until: float) -> None:
        """An engine drains until then; if it does already, only an earlier deadline counts."""
        known = self._drains.get(report.owner)
        if known is None:
            self._drains[report.owner] = Drain(report.owner, report.model, why, until, DrainReport(0.0))
        elif until < known.until:
            self._drains[report.owner] = replace(known, until=until, why=why)

    def on_leaving_nodes(self, leaving: dict[str, float]) -> None:
        """The nodes that leave, and when each is gone."""
        self._leaving = leaving

    def on_report(self, report: EngineReport, now: float) -> float | None:
        """An engine has reported; returns the seconds that it has left to drain. None: it does not drain."""
        if report.drain is not None:
            if report.owner not in self._drains:
                self.begin(report, RESUMED, now + report.drain.left_s)
            self._drains[report.owner] = replace(self._drains[report.owner], progress=report.drain, ended_at=None)
        gone_at = min((self._leaving[rank.node] for rank in report.ranks if rank.node in self._leaving), default=None)
        if gone_at is not None and now >= gone_at - MOVE_S - report.drain_s:
            self.begin(report, "its node leaves", gone_at - MOVE_S)
        known = self._drains.get(report.owner)
        return None if known is None else max(0.0, known.until - now)

    def on_ended(self, owner: str, now: float, progress: DrainReport | None = None) -> None:
        """An engine has ended, with these last figures if it has said them."""
        known = self._drains.get(owner)
        if known is not None and (known.ended_at is None or progress is not None):
            final = progress or known.progress
            self._drains[owner] = replace(known, ended_at=now, progress=final, is_final=progress is not None)
        for name in [name for name, one in self._drains.items() if (one.ended_at or now) < now - KEPT_S]:
            del self._drains[name]

    def keep(self, owners: Set[str], now: float) -> None:
        """Of the engines that drain, only these are left."""
        for owner in self.active():
            if owner not in owners:
                self.on_ended(owner, now)

    def __contains__(self, owner: str) -> bool:
        return owner in self._drains

    def active(self) -> list[str]:
        """The engines that drain and have not ended."""
        return sorted(owner for owner, one in self._drains.items() if one.ended_at is None)

    def all(self) -> list[Drain]:
        """Those that drain, and those that ended in the last `KEPT_S`, oldest first."""
        return list(self._drains.values())
