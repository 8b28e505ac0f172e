"""Placement of engine starts: the ledger chooses node and device before Ray does.

Serve's controller reports which replicas it is about to start, on which nodes Ray has resources for them, and how many
more the scaling policy wants. The reply has a node for each replica, and for how many more there is memory.

Rules
- A model needs what its settings say (`memory_gb`), else what its last engine requested; if neither is known, Ray
  places.
- Memory that a waiting engine could use is not reserved for a start: waiting engines come first.
- A start without free memory waits as an engine, on a node whose devices are large enough.
- A start that replaces a drained engine goes to its planned node; Ray may lack resources there while the reservation
  lasts.

Invariant: each placement with `is_reserved` is a lease in the ledger.
"""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.core.memory.device_choice import best_device
from serve_app.core.memory.engine_grants import EngineGrants
from serve_app.core.memory.leases import Hold
from serve_app.core.memory.ledger import Ledger
from serve_app.core.memory.reservations import Reservation

FAILURE_TTL_S = 600.0  # the next attempt may take as long to fail
SHORTAGE_TTL_S = 15.0  # a reason not renewed for this long is outdated


@dataclass(frozen=True, slots=True)
class Start:
    """A replica that Serve starts.

    Args:
        replica: its id.
        nodes: nodes where Ray has resources for it.
        placed: Ray has placed it already; its reservation is only renewed.
    """

    replica: str
    nodes: tuple[str, ...] = ()
    placed: bool = False


@dataclass(frozen=True, slots=True)
class StartsRequest:
    """The controller's request for a model.

    Args:
        model: its name.
        starts: the replicas to start.
        more: number of further replicas that the scaling policy wants.
        nodes: nodes where Ray has resources for one of those.
        requested_bytes: of the device, by the settings; None: not set.
    """

    model: str
    starts: tuple[Start, ...] = ()
    more: int = 0
    nodes: tuple[str, ...] = ()
    requested_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class StartPlacement:
    """The node of a replica; None: Ray chooses. `is_reserved`: memory is reserved for it there."""

    replica: str
    node: str | None
    is_reserved: bool


@dataclass(frozen=True, slots=True)
class StartsReply:
    """Placements of replicas (replicas without one ask again), the number of further replicas with reserved memory, and
    in `why` what is missing for the rest. `need_known`: the model's memory need is known."""

    placements: tuple[StartPlacement, ...] = ()
    reserved_replicas: int = 0
    why: str = ""
    need_known: bool = True


@dataclass(frozen=True, slots=True)
class _Need:
    wanted_bytes: int
    least_bytes: int


class StartPlanner:
    """Reservations for the controller's starts. O(devices + waiting engines) per start."""

    def __init__(self, ledger: Ledger, grants: EngineGrants) -> None:
        self._ledger, self._grants, self._reservations = ledger, grants, grants.reservations
        self._shortages: dict[str, tuple[str, float]] = {}  # by model: what was missing, and when
        self._failures: dict[str, tuple[str, float]] = {}  # by model: why its last engine failed to load, and when

    def plan(self, request: StartsRequest, now: float, *, frozen: bool = False) -> StartsReply:
        """Plan the starts of a model.

        Args:
            frozen: make no new reservations (while other engines' holds are unknown).
        """
        need = self._need(request)
        if need is None:
            return StartsReply(
                tuple(StartPlacement(start.replica, None, False) for start in request.starts), need_known=False
            )
        places = [self._place(request.model, start, need, now, frozen) for start in request.starts]
        held = self._reserve_further(request, need, now, frozen)
        why = self._shortage(need, request.nodes) if held < request.more else ""
        if why:
            self._shortages[request.model] = (why, now)
        elif request.more:
            self._shortages.pop(request.model, None)
        return StartsReply(tuple(place for place in places if place is not None), held, why)

    def record_failure(self, model: str, why: str, now: float) -> None:
        """An engine failed to load."""
        self._failures[model] = (why, now)

    def shortages(self, now: float) -> dict[str, str]:
        """Recent reasons why models have fewer replicas than the scaling policy wants, by model."""
        self._shortages = {model: note for model, note in self._shortages.items() if now - note[1] <= SHORTAGE_TTL_S}
        self._failures = {model: note for model, note in self._failures.items() if now - note[1] <= FAILURE_TTL_S}
        return {model: why for model, (why, _) in (self._shortages | self._failures).items()}

    def _need(self, request: StartsRequest) -> _Need | None:
        if request.requested_bytes is not None:
            return _Need(request.requested_bytes, request.requested_bytes)
        last = self._grants.last_request(request.model)
        return None if last is None else _Need(*last)

    def _place(self, model: str, start: Start, need: _Need, now: float, frozen: bool) -> StartPlacement | None:
        """The placement of one replica; None: it must ask again."""
        mine = next((berth for berth in self._reservations.of(model) if berth.replica == start.replica), None)
        if mine is not None and (start.placed or mine.node in start.nodes):
            self._reservations.renew(mine, now)
            return StartPlacement(start.replica, mine.node, True)
        if mine is not None and mine.replaces:
            return None
        if mine is not None:
            self._reservations.end(mine.name)  # Ray has no resources left on that node
        if start.placed or self._grants.last_report(start.replica) is not None:
            return StartPlacement(start.replica, None, False)
        free = [berth for berth in self._reservations.of(model) if not berth.replica]
        planned = [berth for berth in free if berth.replaces and self._grants.last_report(berth.replaces) is None]
        ready = [berth for berth in [*planned, *free] if berth in planned or not berth.replaces]
        for berth in ready:
            if berth.node in start.nodes:
                return StartPlacement(start.replica, self._reservations.bind(berth, start.replica, now).node, True)
        if frozen or planned:
            return None
        hold = self._choose(need, start.nodes)
        if hold is not None:
            berth = self._reservations.add(model, hold, now, replica=start.replica)
            return StartPlacement(start.replica, berth.node, True)
        return StartPlacement(start.replica, self._where_to_wait(need, start.nodes), False)

    def _reserve_further(self, request: StartsRequest, need: _Need, now: float, frozen: bool) -> int:
        """Reserve memory for further starts; returns for how many."""
        kept: list[Reservation] = [
            berth
            for berth in self._reservations.of(request.model)
            if not berth.replica and not berth.replaces and berth.node in request.nodes
        ][: request.more]
        for berth in kept:
            self._reservations.renew(berth, now)
        while len(kept) < request.more and not frozen:
            hold = self._choose(need, request.nodes)
            if hold is None:
                break
            kept.append(self._reservations.add(request.model, hold, now))
        return len(kept)

    def _choose(self, need: _Need, nodes: tuple[str, ...]) -> Hold | None:
        free = self._grants.free_for_new()
        return best_device(need.wanted_bytes, need.least_bytes, free, nodes, self._grants.policy)

    def _where_to_wait(self, need: _Need, nodes: tuple[str, ...]) -> str | None:
        """The node with most free memory on a device that is large enough; None: there is none."""
        there = (use for use in self._ledger.devices() if use.device.node in nodes)
        fit = (use for use in there if use.device.capacity_bytes >= need.least_bytes)
        best = max(fit, key=lambda use: use.free_bytes, default=None)
        return None if best is None else best.device.node

    def _shortage(self, need: _Need, nodes: tuple[str, ...]) -> str:
        free = self._grants.free_for_new()
        most = max((size for key, size in free.items() if key.rpartition("/")[0] in nodes), default=0)
        return f"memory: at least {_gb(need.least_bytes)} needed on one device, {_gb(most)} free"


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
