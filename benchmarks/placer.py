"""A simulated cluster's free amounts, and the decision where a demand goes; the policies that ours is compared with.

Rules
- `place` decides and changes nothing; `take` and `give_back` change, all of it or nothing.
- A demand gets no place only when there is none.
- The scores of a demand that has been asked for before are kept: a decision looks only at nodes that changed since.

Invariant: nothing is taken that was not free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from serve_app.core.heap import KeyedHeap
from serve_app.core.placing.fragmentation import Workload
from serve_app.core.placing.learned_policy import Learned
from serve_app.core.placing.placement import Demand, Node, Placement, Room, Slot
from serve_app.core.placing.placement_policies import Choice, Policy, least_fragment

MAX_RANKINGS = 512  # demands whose scores are kept: a heap of all nodes each, about 200 bytes a node


class _Ranking:
    """The nodes one group of a demand fits on by score, as of a point in the log of changes."""

    __slots__ = ("epoch", "heap", "position")

    def __init__(self) -> None:
        self.heap, self.position, self.epoch = KeyedHeap(), -1, 0


class Placer:
    """Nodes, what is free of them, and a policy.

    Args:
        nodes: in the order in which ties are broken.
        policy: None: `Learned`, beginning from these nodes.

    Raises:
        ValueError: two nodes of one id.
    """

    def __init__(self, nodes: Sequence[Node], policy: Policy | None = None) -> None:
        self._policy = policy or Learned(
            max((node.cpu_milli for node in nodes), default=0), max((sum(node.total) for node in nodes), default=0)
        )
        self._rooms: dict[str, Room] = {}
        self._rankings: dict[Demand, _Ranking] = {}
        self._changes: list[str] = []  # node ids, oldest first
        self._dropped = 0  # changes forgotten from the front
        self._added = 0
        for node in nodes:
            self.add_node(node)

    def add_node(self, node: Node) -> None:
        """A node is there, after all others in order. Raises ValueError when one of its id is."""
        if node.node_id in self._rooms:
            raise ValueError(f"node {node.node_id!r} is there twice")
        self._rooms[node.node_id] = Room(node, self._added)
        self._added += 1
        self._changed(node.node_id)

    def nodes(self) -> list[Node]:
        """All nodes with what is free of them now."""
        return [room.as_node() for room in self._rooms.values()]

    def place(self, demand: Demand) -> Placement | None:
        """Where a demand goes; None: nowhere. Nothing is taken."""
        self._policy.seen(demand)
        ranking = self._ranking(demand)
        slots: list[Slot] = []
        held: list[tuple[Room, list[int], Slot]] = []
        try:
            for _ in range(demand.groups):
                top = self._top(ranking, demand)
                if top is None:
                    return None
                room, slot = top
                slots.append(slot)
                if len(slots) < demand.groups:
                    held.append((room, room.free, slot))
                    self._hold(room, slot)
        finally:
            for room, free, slot in reversed(held):
                room.free = free
                room.cpu += slot.cpu_milli
                room.memory += slot.memory_bytes
                self._changed(room.node_id)
        return Placement(tuple(slots))

    def take(self, placement: Placement) -> None:
        """Raises ValueError when it does not fit (any more), KeyError for an unknown node; nothing has changed then."""
        taken: list[Slot] = []
        try:
            for slot in placement.slots:
                self._rooms[slot.node_id].take(slot)
                taken.append(slot)
        except (KeyError, ValueError):
            for slot in taken:
                self._rooms[slot.node_id].give_back(slot)
            raise
        for slot in placement.slots:
            self._changed(slot.node_id)

    def give_back(self, placement: Placement) -> None:
        """Raises ValueError when it was not taken, KeyError for an unknown node; nothing has changed then."""
        given: list[Slot] = []
        try:
            for slot in placement.slots:
                self._rooms[slot.node_id].give_back(slot)
                given.append(slot)
        except (KeyError, ValueError):
            for slot in given:
                self._rooms[slot.node_id].take(slot)
            raise
        for slot in placement.slots:
            self._changed(slot.node_id)

    def _hold(self, room: Room, slot: Slot) -> None:
        """Keep the devices of a group from the next ones of the same engine."""
        room.free = [0 if i in slot.devices else free for i, free in enumerate(room.free)]
        room.cpu -= slot.cpu_milli
        room.memory -= slot.memory_bytes
        self._changed(room.node_id)

    def _changed(self, node_id: str) -> None:
        self._changes.append(node_id)
        surplus = len(self._changes) - 2 * len(self._rooms)
        if surplus > len(self._rooms):  # a ranking older than that looks at every node anyway
            del self._changes[:surplus]
            self._dropped += surplus

    def _ranking(self, demand: Demand) -> _Ranking:
        ranking = self._rankings.pop(demand, None) or _Ranking()
        self._rankings[demand] = ranking  # the last one asked for is the last one dropped
        if len(self._rankings) > MAX_RANKINGS:
            del self._rankings[next(iter(self._rankings))]
        return ranking

    def _top(self, ranking: _Ranking, demand: Demand) -> tuple[Room, Slot] | None:
        """The best place for one group, after a look at what changed."""
        stale: Iterable[str]
        if ranking.epoch != self._policy.epoch or ranking.position < self._dropped:
            stale, ranking.heap = self._rooms, KeyedHeap()
        else:
            stale = set(self._changes[ranking.position - self._dropped :])
        for node_id in stale:
            room = self._rooms[node_id]
            eligible = room.eligible(demand) if room.holds(demand) else None
            if eligible is None or len(eligible) < demand.ranks:
                ranking.heap.discard(node_id)
            else:
                ranking.heap.set(node_id, (self._policy.choose(room, demand, eligible)[0], room.index))
        ranking.epoch, ranking.position = self._policy.epoch, self._dropped + len(self._changes)
        top = ranking.heap.peek()
        if top is None:
            return None
        room = self._rooms[top[1]]
        devices = self._policy.choose(room, demand, room.eligible(demand))[1]
        return room, room.slot(demand, devices)


class FirstFit:
    """The first node in the cluster's order."""

    epoch = 0

    def seen(self, demand: Demand) -> None:
        """Nothing is learned."""

    def choose(self, room: Room, demand: Demand, eligible: Sequence[int]) -> Choice:
        return 0.0, tuple(eligible[: demand.ranks])


class Fgd:
    """Fragmentation Gradient Descent: the place that adds least to the fragment expected of the workload."""

    epoch = 0

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def seen(self, demand: Demand) -> None:
        """The workload was given."""

    def choose(self, room: Room, demand: Demand, eligible: Sequence[int]) -> Choice:
        return least_fragment(self._workload, room, demand, eligible)
