"""Where engines start: the ledger picks the node and the device before Ray is asked for either.

Serve's controller says which replicas it is about to start, on which nodes Ray has room for them, and how many more
the scaling policy wants; it is told where each belongs, and for how many more there is memory.

Rules
- What a model needs is what its settings say (`memory_gb`), else what its last engine asked for; while neither is known
  Ray places.
- Memory that an engine before could use is not kept for a start: who waits goes first.
- A start for which there is no room goes to wait in the line, on a node whose devices are large enough.
- A start that replaces a drained engine goes where that was planned; Ray may be short there for as long as its berth is
  kept.

Invariant: a place that is said to be held is a lease in the ledger.
"""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.core.memory.device_choice import best_of_all
from serve_app.core.memory.engine_grants import Grants
from serve_app.core.memory.leases import Hold
from serve_app.core.memory.ledger import Ledger
from serve_app.core.memory.reservations import Berth

FAILED_S = 600.0  # the next try may take as long before it has failed, too
NOTE_S = 15.0  # a reason that nobody has renewed is one of yesterday


@dataclass(frozen=True, slots=True)
class Start:
    """A replica that Serve starts.

    Args:
        replica: its id.
        nodes: where Ray has room for it.
        placed: Ray has it already; what is kept for it is to be kept.
    """

    replica: str
    nodes: tuple[str, ...] = ()
    placed: bool = False


@dataclass(frozen=True, slots=True)
class StartsAsk:
    """What the controller says of a model.

    Args:
        model: its name.
        starts: the replicas it starts.
        more: how many besides them the scaling policy wants.
        nodes: where Ray has room for one of those.
        asked_bytes: of the device, by the settings; None: they do not say.
    """

    model: str
    starts: tuple[Start, ...] = ()
    more: int = 0
    nodes: tuple[str, ...] = ()
    asked_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a replica belongs: None: wherever Ray puts it. `held`: memory is kept for it there."""

    replica: str
    node: str | None
    held: bool


@dataclass(frozen=True, slots=True)
class StartsReply:
    """The places of replicas, of those that have one (the others ask again), for how many more there is memory, and
    what is missing for those beyond. `known`: what the model needs is."""

    places: tuple[Place, ...] = ()
    held: int = 0
    why: str = ""
    known: bool = True


@dataclass(frozen=True, slots=True)
class _Need:
    wanted_bytes: int
    least_bytes: int


class Starts:
    """Berths for what the controller is about to start. O(devices + engines that wait) per start."""

    def __init__(self, ledger: Ledger, grants: Grants) -> None:
        self._ledger, self._grants, self._berths = ledger, grants, grants.berths
        self._notes: dict[str, tuple[str, float]] = {}  # by model: what was missing, and when
        self._failed: dict[str, tuple[str, float]] = {}  # by model: why its last engine failed to load, and when

    def ask(self, ask: StartsAsk, now: float, *, frozen: bool = False) -> StartsReply:
        """The controller's word.

        Args:
            frozen: no memory is to be kept that is not kept already (while it is not known what others hold).
        """
        need = self._need(ask)
        if need is None:
            return StartsReply(tuple(Place(start.replica, None, False) for start in ask.starts), known=False)
        places = [self._place(ask.model, start, need, now, frozen) for start in ask.starts]
        held = self._further(ask, need, now, frozen)
        why = self._missing(need, ask.nodes) if held < ask.more else ""
        if why:
            self._notes[ask.model] = (why, now)
        elif ask.more:
            self._notes.pop(ask.model, None)
        return StartsReply(tuple(place for place in places if place is not None), held, why)

    def failed(self, model: str, why: str, now: float) -> None:
        """An engine ends while it loads."""
        self._failed[model] = (why, now)

    def notes(self, now: float) -> dict[str, str]:
        """Why models have fewer replicas than the scaling policy wants, for those of which there was a word lately."""
        self._notes = {model: note for model, note in self._notes.items() if now - note[1] <= NOTE_S}
        self._failed = {model: note for model, note in self._failed.items() if now - note[1] <= FAILED_S}
        return {model: why for model, (why, _) in (self._notes | self._failed).items()}

    def _need(self, ask: StartsAsk) -> _Need | None:
        if ask.asked_bytes is not None:
            return _Need(ask.asked_bytes, ask.asked_bytes)
        last = self._grants.last_ask(ask.model)
        return None if last is None else _Need(*last)

    def _place(self, model: str, start: Start, need: _Need, now: float, frozen: bool) -> Place | None:
        """Where one replica belongs; None: it is to ask again."""
        mine = next((berth for berth in self._berths.of(model) if berth.replica == start.replica), None)
        if mine is not None and (start.placed or mine.node in start.nodes):
            self._berths.renew(mine, now)
            return Place(start.replica, mine.node, True)
        if mine is not None and mine.after:
            return None
        if mine is not None:
            self._berths.end(mine)  # Ray has given the rest of that node to another
        if start.placed or self._grants.told(start.replica) is not None:
            return Place(start.replica, None, False)
        free = [berth for berth in self._berths.of(model) if not berth.replica]
        planned = [berth for berth in free if berth.after and self._grants.told(berth.after) is None]
        ready = [berth for berth in [*planned, *free] if berth in planned or not berth.after]
        for berth in ready:
            if berth.node in start.nodes:
                return Place(start.replica, self._berths.bind(berth, start.replica, now).node, True)
        if frozen or planned:
            return None
        hold = self._choose(need, start.nodes)
        if hold is not None:
            berth = self._berths.add(model, hold, now, replica=start.replica)
            return Place(start.replica, berth.node, True)
        return Place(start.replica, self._where_to_wait(need, start.nodes), False)

    def _further(self, ask: StartsAsk, need: _Need, now: float, frozen: bool) -> int:
        """Keep memory for as many more starts as are wanted; returns for how many."""
        kept: list[Berth] = [
            berth
            for berth in self._berths.of(ask.model)
            if not berth.replica and not berth.after and berth.node in ask.nodes
        ][: ask.more]
        for berth in kept:
            self._berths.renew(berth, now)
        while len(kept) < ask.more and not frozen:
            hold = self._choose(need, ask.nodes)
            if hold is None:
                break
            kept.append(self._berths.add(ask.model, hold, now))
        return len(kept)

    def _choose(self, need: _Need, nodes: tuple[str, ...]) -> Hold | None:
        free = self._grants.free_for_new()
        return best_of_all(need.wanted_bytes, need.least_bytes, free, nodes, self._grants.policy)

    def _where_to_wait(self, need: _Need, nodes: tuple[str, ...]) -> str | None:
        """The node with most free on a device that is large enough; None: there is none such."""
        there = (use for use in self._ledger.devices() if use.device.node in nodes)
        fit = (use for use in there if use.device.capacity_bytes >= need.least_bytes)
        best = max(fit, key=lambda use: use.free_bytes, default=None)
        return None if best is None else best.device.node

    def _missing(self, need: _Need, nodes: tuple[str, ...]) -> str:
        free = self._grants.free_for_new()
        most = max((size for key, size in free.items() if key.rpartition("/")[0] in nodes), default=0)
        return f"memory: at least {_gb(need.least_bytes)} needed on one device, {_gb(most)} free"


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
