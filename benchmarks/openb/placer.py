"""A simulated cluster's free amounts, and the decision where a pod goes.

Rules
- `place` decides and changes nothing; `take` and `give_back` change, all of it or nothing.
- A pod gets no place only when there is none.
- The scores of a pod that has been asked for before are kept: a decision looks only at nodes that changed since.

Invariant: nothing is taken that was not free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.openb.fgd import Choice, PodPolicy
from benchmarks.openb.pods import Node, Placement, Pod, Room, Slot
from serve_app.core.keyed_heap import KeyedHeap
from serve_app.core.placement import Demand, PlacementPolicy

MAX_RANKINGS = 512  # demands whose scores are kept: a heap of all nodes each, about 200 bytes a node


class _Ranking:
    """The nodes one group of a pod fits on by score, as of a point in the log of changes."""

    __slots__ = ("epoch", "heap", "position")

    def __init__(self) -> None:
        self.heap = KeyedHeap()
        self.position = -1
        self.epoch = 0


class Placer:
    """Nodes, what is free of them, and a policy.

    Args:
        nodes: in the order in which ties are broken.

    Raises:
        ValueError: two nodes of one id.
    """

    def __init__(self, nodes: Sequence[Node], policy: PodPolicy) -> None:
        self._policy = policy
        self._rooms: dict[str, Room] = {}
        self.rankings: dict[Pod, _Ranking] = {}
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

    def place(self, pod: Pod) -> Placement | None:
        """Where a pod goes; None: nowhere. Nothing is taken."""
        self._policy.seen(pod)
        ranking = self._ranking(pod)
        slots: list[Slot] = []
        held: list[tuple[Room, list[int], Slot]] = []
        try:
            for _ in range(pod.groups):
                top = self._top(ranking, pod)
                if top is None:
                    return None
                room, slot = top
                slots.append(slot)
                if len(slots) < pod.groups:
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

    def _ranking(self, pod: Pod) -> _Ranking:
        ranking = self.rankings.pop(pod, None) or _Ranking()
        self.rankings[pod] = ranking  # the last one asked for is the last one dropped
        if len(self.rankings) > MAX_RANKINGS:
            del self.rankings[next(iter(self.rankings))]
        return ranking

    def _top(self, ranking: _Ranking, pod: Pod) -> tuple[Room, Slot] | None:
        """The best place for one group, after a look at what changed."""
        stale: Iterable[str]
        if ranking.epoch != self._policy.epoch or ranking.position < self._dropped:
            stale = self._rooms
            ranking.heap = KeyedHeap()
        else:
            stale = set(self._changes[ranking.position - self._dropped :])
        for node_id in stale:
            room = self._rooms[node_id]
            eligible = room.eligible(pod) if room.holds(pod) else None
            if eligible is None or len(eligible) < pod.ranks:
                ranking.heap.discard(node_id)
            else:
                ranking.heap.set(node_id, (self._policy.choose(room, pod, eligible)[0], room.index))
        ranking.epoch = self._policy.epoch
        ranking.position = self._dropped + len(self._changes)
        top = ranking.heap.peek()
        if top is None:
            return None
        room = self._rooms[top[1]]
        devices = self._policy.choose(room, pod, room.eligible(pod))[1]
        return room, room.slot(pod, devices)


class ByAmounts:
    """What production's placement knows of a pod: Ray finds the nodes that have the CPU, the host memory and the GPU
    model, the choice among them is by free amounts alone. A pod without a GPU is Ray's: best fit."""

    def __init__(self, policy: PodPolicy, for_ray: PodPolicy) -> None:
        self._policy = policy
        self._for_ray = for_ray

    @property
    def epoch(self) -> int:
        """That of the policy for pods with a GPU."""
        return self._policy.epoch

    def seen(self, pod: Pod) -> None:
        """Learn from a pod with GPUs."""
        if pod.ranks:
            self._policy.seen(pod)

    def choose(self, room: Room, pod: Pod, eligible: Sequence[int]) -> Choice:
        """The devices of a room that the pod fits on."""
        return (self._policy if pod.ranks else self._for_ray).choose(room, pod, eligible)


class Ours:
    """Production's policy, for pods with a GPU."""

    def __init__(self) -> None:
        self._policy = PlacementPolicy()
        self.epoch = 0

    def seen(self, pod: Pod) -> None:
        """Learn from a pod."""
        before = self._policy.workload
        self._policy.observe(Demand(pod.ranks, pod.amount, pod.groups))
        self.epoch += self._policy.workload is not before

    def choose(self, room: Room, pod: Pod, eligible: Sequence[int]) -> Choice:
        """The devices of a room that the pod fits on."""
        free = room.free
        if pod.whole:  # a part of a device that is in use is nothing to it
            free = [free[index] if index in eligible else 0 for index in range(len(free))]
        found = self._policy.choose(free, pod.ranks, pod.amount)
        assert found is not None  # it is asked only where the pod fits
        return found
