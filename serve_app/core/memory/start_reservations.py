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

Invariant: a start has at most one reservation, and is placed on its node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from serve_app.core.memory.engine_grants import EngineGrants, best_devices
from serve_app.core.memory.leases import Hold
from serve_app.core.memory.ledger import Ledger
from serve_app.core.messages import message

Need = tuple[int, int]  # wanted and least bytes of one device

ASK_AGAIN = ""  # instead of a node: the replica has to ask again
SHORTAGE_TTL_S = 15.0  # a reason not renewed for this long is outdated


@message
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


@message
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


@message
@dataclass(frozen=True, slots=True)
class StartsReply:
    """The node of each replica, None: Ray chooses (replicas without an entry ask again); the number of further replicas
    with reserved memory, and in `why` what is missing for the rest. `need_known`: the model's memory need is known."""

    placements: Mapping[str, str | None] = field(default_factory=dict)
    reserved_replicas: int = 0
    why: str = ""
    need_known: bool = True


class StartPlanner:
    """Reservations for the controller's starts. O(devices + waiting engines) per start."""

    def __init__(self, ledger: Ledger, grants: EngineGrants) -> None:
        self._ledger = ledger
        self._grants = grants
        self._reservations = grants.reservations
        self._shortages: dict[str, tuple[str, float]] = {}  # by model: the reason, and until when it counts

    def plan(self, request: StartsRequest, now: float, *, frozen: bool = False) -> StartsReply:
        """Plan the starts of a model.

        Args:
            frozen: make no new reservations (while other engines' holds are unknown).
        """
        asked = request.requested_bytes
        need = self._grants.last_requests.get(request.model) if asked is None else (asked, asked)
        if need is None:
            return StartsReply({start.replica: None for start in request.starts}, need_known=False)
        nodes = {start.replica: self._place(request.model, start, need, now, frozen) for start in request.starts}
        held = self._reserve_further(request, need, now, frozen)
        why = ""
        if held < request.more:
            free = self._grants.free_for_new()
            most = max((size for key, size in free.items() if key.rpartition("/")[0] in request.nodes), default=0)
            why = f"memory: at least {need[1] / 1e9:.2f} GB needed on one device, {most / 1e9:.2f} GB free"
            self._shortages[request.model] = (why, now + SHORTAGE_TTL_S)
        elif request.more:
            self._shortages.pop(request.model, None)
        return StartsReply({replica: node for replica, node in nodes.items() if node != ASK_AGAIN}, held, why)

    def shortages(self, now: float) -> dict[str, str]:
        """Recent reasons why models have fewer replicas than the scaling policy wants, by model."""
        return {model: why for model, (why, until) in self._shortages.items() if now <= until}

    def _place(self, model: str, start: Start, need: Need, now: float, frozen: bool) -> str | None:
        """The node of one replica; None: Ray chooses."""
        bound = next((reserved for reserved in self._reservations.of(model) if reserved.replica == start.replica), None)
        if bound is not None and (start.placed or bound.node in start.nodes):
            self._reservations.renew(bound, now)
            return bound.node
        if bound is not None and bound.replaces:
            return ASK_AGAIN
        if bound is not None:
            self._reservations.end(bound.name)  # Ray has no resources left on that node
        if start.placed or self._grants.last_report(start.replica) is not None:
            return None
        free = [kept for kept in self._reservations.of(model) if not kept.replica]
        planned = [kept for kept in free if kept.replaces and self._grants.last_report(kept.replaces) is None]
        for kept in (*planned, *(kept for kept in free if not kept.replaces)):
            if kept.node in start.nodes:
                return self._reservations.bind(kept, start.replica, now).node
        if frozen or planned:
            return ASK_AGAIN
        hold = self._choose(need, start.nodes)
        if hold is not None:
            return self._reservations.add(model, hold, now, replica=start.replica).node
        # It waits as an engine, on the node with most free memory on a device that is large enough.
        devices = (use for use in self._ledger.devices() if use.device.node in start.nodes)
        fit = (use for use in devices if use.device.capacity_bytes >= need[1])
        best = max(fit, key=lambda use: use.free_bytes, default=None)
        return None if best is None else best.device.node

    def _reserve_further(self, request: StartsRequest, need: Need, now: float, frozen: bool) -> int:
        """Reserve memory for further starts; returns for how many."""
        free = [kept for kept in self._reservations.of(request.model) if not kept.replica and not kept.replaces]
        taken = [reserved for reserved in free if reserved.node in request.nodes][: request.more]
        for kept in taken:
            self._reservations.renew(kept, now)
        held = len(taken)
        while held < request.more and not frozen and (hold := self._choose(need, request.nodes)) is not None:
            self._reservations.add(request.model, hold, now)
            held += 1
        return held

    def _choose(self, need: Need, nodes: tuple[str, ...]) -> Hold | None:
        wanted, least = need
        free = self._grants.free_for_new()
        found = best_devices(1, wanted, least, free, nodes, self._grants.policy)
        return None if found is None else Hold(found[0], min(wanted, free[found[0]]))
