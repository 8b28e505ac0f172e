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
from benchmarks.openb.pods import Node, Placement, Pod, Room
from serve_app.core.keyed_heap import KeyedHeap
from serve_app.core.placement import Demand, PlacementPolicy

MAX_RANKINGS = 512  # demands whose scores are kept: a heap of all nodes each, about 200 bytes a node


class _Ranking:
    """The nodes a pod fits on by score, as of a point in the log of changes."""

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
        self._rooms = {node.node_id: Room(node, index) for index, node in enumerate(nodes)}
        if len(self._rooms) < len(nodes):
            raise ValueError("a node is there twice")
        self.rankings: dict[Pod, _Ranking] = {}
        self._changes = list(self._rooms)  # node ids, oldest first
        self._dropped = 0  # changes forgotten from the front

    def nodes(self) -> list[Node]:
        """All nodes with what is free of them now."""
        return [room.as_node() for room in self._rooms.values()]

    def place(self, pod: Pod) -> Placement | None:
        """Where a pod goes; None: nowhere. Nothing is taken."""
        self._policy.seen(pod)
        top = self._top(self._ranking(pod), pod)
        if top is None:
            return None
        return top.placement(pod, self._policy.choose(top, pod, top.eligible(pod))[1])

    def take(self, placement: Placement) -> None:
        """Raises ValueError when it does not fit (any more), KeyError for an unknown node; nothing has changed then."""
        self._rooms[placement.node_id].take(placement)
        self._changed(placement.node_id)

    def give_back(self, placement: Placement) -> None:
        """Raises ValueError when it was not taken, KeyError for an unknown node; nothing has changed then."""
        self._rooms[placement.node_id].give_back(placement)
        self._changed(placement.node_id)

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

    def _top(self, ranking: _Ranking, pod: Pod) -> Room | None:
        """The best node, after a look at what changed."""
        stale: Iterable[str]
        if ranking.epoch != self._policy.epoch or ranking.position < self._dropped:
            stale = self._rooms
            ranking.heap = KeyedHeap()
        else:
            stale = set(self._changes[ranking.position - self._dropped :])
        for node_id in stale:
            room = self._rooms[node_id]
            eligible = room.eligible(pod)
            if len(eligible) < pod.ranks:
                ranking.heap.discard(node_id)
            else:
                ranking.heap.set(node_id, (self._policy.choose(room, pod, eligible)[0], room.index))
        ranking.epoch = self._policy.epoch
        ranking.position = self._dropped + len(self._changes)
        top = ranking.heap.peek()
        return None if top is None else self._rooms[top[1]]


class Ours:
    """Production's policy."""

    def __init__(self) -> None:
        self._policy = PlacementPolicy()
        self.epoch = 0

    def seen(self, pod: Pod) -> None:
        """Learn from a pod."""
        before = self._policy.workload
        self._policy.observe(Demand(pod.ranks, pod.amount, 1))
        self.epoch += self._policy.workload is not before

    def choose(self, room: Room, pod: Pod, eligible: Sequence[int]) -> Choice:
        """The devices of a room that the pod fits on."""
        free = room.free
        if pod.whole:  # a part of a device that is in use is nothing to it
            free = [free[index] if index in eligible else 0 for index in range(len(free))]
        found = self._policy.choose(free, pod.ranks, pod.amount)
        assert found is not None  # it is asked only where the pod fits
        return found
