"""Berths: device memory kept for engines that have not started, so that they start where there is room.

Rules
- A berth is for the next start of its model, or, once Serve has named it, for one replica.
- It is taken over by an engine of its model that speaks from its node: that engine's lease takes its place at once.
- Nobody renews it: it ends. One kept until an engine leaves (`after`) is renewed for as long as that one is there.

Invariant: a berth is taken over once, or ends; what it held is never given to two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from dataclasses import dataclass
from typing import TYPE_CHECKING

from serve_app.core.memory.leases import Hold, Kind
from serve_app.core.memory.ledger import Ledger

if TYPE_CHECKING:
    from serve_app.core.memory.reports import EngineReport

BERTH_TTL_S = 10.0  # the controller renews every second; a new one is there within that time after a crash
# Serve looks at its replicas every 5 s and starts another for one that has ended; a busy controller takes its time.
RESTART_TTL_S = 30.0


@dataclass(frozen=True, slots=True)
class Berth:
    """Memory kept for a start.

    Args:
        name: of its lease and that lease's owner.
        model: what will be served there.
        hold: the device and bytes.
        replica: whose it is; none: the next start's of its model.
        after: the engine that has to leave first, which this start is to replace.
    """

    name: str
    model: str
    hold: Hold
    replica: str = ""
    after: str = ""

    @property
    def node(self) -> str:
        return self.hold.on.rpartition("/")[0]


class Berths:
    """All berths there are, the oldest first."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._berths: dict[str, Berth] = {}
        self._changed: dict[str, Berth | None] = {}  # since `take_changes`; None: it has ended

    def take_changes(self) -> dict[str, Berth | None]:
        """The berths that have changed since the last time, by name; None: it has ended."""
        changed, self._changed = self._changed, {}
        return changed

    def all(self) -> list[Berth]:
        return list(self._berths.values())

    def of(self, model: str) -> list[Berth]:
        return [berth for berth in self._berths.values() if berth.model == model]

    def add(self, model: str, hold: Hold, now: float, *, replica: str = "", after: str = "") -> Berth:
        """Keep memory. Raises InsufficientMemory, LeaseNotFound (no such device); nothing has changed then."""
        number = next(n for n in range(len(self._berths) + 1) if f"berth:{model}:{n}" not in self._berths)
        berth = Berth(f"berth:{model}:{number}", model, hold, replica, after)
        self.restore(berth, now, RESTART_TTL_S if after else BERTH_TTL_S)
        return berth

    def restore(self, berth: Berth, now: float, ttl_s: float) -> None:
        """Keep what was kept before. Raises as `add`."""
        self._ledger.join(berth.name, ttl_s, now)
        try:
            self._ledger.reserve(berth.name, Kind.BERTH, berth.name, (berth.hold,))
        except Exception:
            self._ledger.leave(berth.name)
            raise
        self._put(berth)

    def renew(self, berth: Berth, now: float) -> None:
        """It is wanted still."""
        self._ledger.join(berth.name, BERTH_TTL_S, now)

    def bind(self, berth: Berth, replica: str, now: float) -> Berth:
        """It is for this replica from now on."""
        self.renew(berth, now)
        bound = dataclasses.replace(berth, replica=replica)
        self._put(bound)
        return bound

    def end(self, berth: Berth) -> None:
        """Its memory is free."""
        self._ledger.leave(berth.name)
        self.forget(berth.name)

    def forget(self, name: str) -> None:
        """The ledger has ended it; another lease's name changes nothing."""
        if self._berths.pop(name, None) is not None:
            self._changed[name] = None

    def keep_restarts(self, engines: set[str], now: float) -> None:
        """Time has passed, and these engines are there: what is kept until one of them leaves is kept."""
        for berth in self._berths.values():
            if berth.after in engines:
                self._ledger.join(berth.name, RESTART_TTL_S, now)

    def for_engine(self, told: EngineReport, engines: Container[str]) -> Berth | None:
        """The berth that an engine which asks for memory takes over. What was kept for it elsewhere ends: it did not
        start there.

        Args:
            engines: those there are: what is kept until one of them leaves is nobody's yet.
        """
        if len(told.ranks) != 1 or told.ranks[0].device is not None:
            return None
        here = told.ranks[0].node
        mine = [berth for berth in self.of(told.model) if berth.replica == told.owner]
        for berth in mine:
            if berth.node == here:
                return berth
            self.end(berth)
        free = (berth for berth in self.of(told.model) if not berth.replica and berth.after not in engines)
        return next((berth for berth in free if berth.node == here), None)

    def _put(self, berth: Berth) -> None:
        self._berths[berth.name] = self._changed[berth.name] = berth
