"""Reservations: device memory for engines that have not started, so that they start where memory is free.

Rules
- A reservation is for the next start of its model, or, once Serve has named the replica, for that replica.
- An engine of its model that reports from its node takes it over: the engine's lease replaces it at once.
- Without renewal it ends. One that waits for an engine to leave (`replaces`) is renewed while that engine exists.

Invariant: a reservation is taken over once, or ends; its memory is never given to two engines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from dataclasses import dataclass

from serve_app.core.memory.checkpoint import Checkpoint, EntryKind
from serve_app.core.memory.leases import Hold, LeaseKind
from serve_app.core.memory.ledger import Ledger
from serve_app.core.memory.reports import EngineReport
from serve_app.core.times import RESERVATION_TTL_S, RESTART_TTL_S


@dataclass(frozen=True, slots=True)
class Reservation:
    """Memory reserved for a start.

    Args:
        name: of its lease and that lease's owner.
        model: the model to start.
        hold: the device and bytes.
        replica: the replica it is for; empty: the next start of its model.
        replaces: the engine that must leave first, which this start replaces.
    """

    name: str
    model: str
    hold: Hold
    replica: str = ""
    replaces: str = ""

    @property
    def node(self) -> str:
        return self.hold.on.rpartition("/")[0]


class Reservations:
    """All reservations, the oldest first."""

    def __init__(self, ledger: Ledger, checkpoint: Checkpoint) -> None:
        self._ledger = ledger
        self._checkpoint = checkpoint
        self._reservations: dict[str, Reservation] = {}

    def all(self) -> list[Reservation]:
        return list(self._reservations.values())

    def of(self, model: str) -> list[Reservation]:
        return [reservation for reservation in self._reservations.values() if reservation.model == model]

    def add(self, model: str, hold: Hold, now: float, *, replica: str = "", replaces: str = "") -> Reservation:
        """Reserve memory. Raises InsufficientMemory, LeaseNotFound (no such device); nothing has changed then."""
        number = next(n for n in range(len(self._reservations) + 1) if f"berth:{model}:{n}" not in self._reservations)
        reservation = Reservation(f"berth:{model}:{number}", model, hold, replica, replaces)
        self.restore(reservation, now, RESTART_TTL_S if replaces else RESERVATION_TTL_S)
        return reservation

    def restore(self, reservation: Reservation, now: float, ttl_s: float) -> None:
        """Restore a reservation. Raises as `add`."""
        self._ledger.reserve_alone(reservation.name, LeaseKind.RESERVATION, reservation.hold, ttl_s, now)
        self._put(reservation)

    def renew(self, reservation: Reservation, now: float) -> None:
        """Extend a reservation by `RESERVATION_TTL_S`."""
        self._ledger.join(reservation.name, RESERVATION_TTL_S, now)

    def bind(self, reservation: Reservation, replica: str, now: float) -> Reservation:
        """Assign a reservation to a replica."""
        self.renew(reservation, now)
        bound = dataclasses.replace(reservation, replica=replica)
        self._put(bound)
        return bound

    def end(self, name: str) -> None:
        """End a reservation and free its memory, if the ledger has not ended it; an unknown name changes nothing."""
        if self._reservations.pop(name, None) is not None:
            self._ledger.leave(name)
            self._checkpoint.forget((EntryKind.RESERVATION, name))

    def keep_restarts(self, engines: set[str], now: float) -> None:
        """Renew the reservations that replace one of these existing engines."""
        for reservation in self._reservations.values():
            if reservation.replaces in engines:
                self._ledger.join(reservation.name, RESTART_TTL_S, now)

    def take_for_engine(self, report: EngineReport, engines: Container[str]) -> Reservation | None:
        """The reservation that an engine takes over. Reservations for it on other nodes end: it did not start there.

        Args:
            engines: the existing engines; a reservation that replaces one of them is not available yet.
        """
        if len(report.ranks) != 1 or report.ranks[0].device is not None:
            return None
        here = report.ranks[0].node
        bound = [kept for kept in self.of(report.model) if kept.replica == report.owner]
        for kept in bound:
            if kept.node == here:
                return kept
            self.end(kept.name)
        free = (kept for kept in self.of(report.model) if not kept.replica and kept.replaces not in engines)
        return next((kept for kept in free if kept.node == here), None)

    def _put(self, reservation: Reservation) -> None:
        self._reservations[reservation.name] = reservation
        self._checkpoint.put((EntryKind.RESERVATION, reservation.name), reservation)
