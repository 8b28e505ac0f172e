"""The nodes of the cluster: which replica gets which GPUs, and how many nodes there are.

Rules
- A replica takes whole GPUs of one node: of those with room the fullest one, as Serve packs them.
- What has no place demands nodes, as many as would hold it, up to `NodePlan.most`; each comes after `start_s`.
- A node beyond `NodePlan.least` that has had no replica for `idle_s` is given back.

Invariant: no GPU has two replicas at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoscaling.simulator.clock import Clock
from autoscaling.simulator.world import NodePlan
from serve_app.core.memory import Device

LOOK_S = 5.0  # between looks for idle nodes


@dataclass(frozen=True, slots=True)
class GpuPlace:
    """GPUs of a node, by number."""

    node: str
    gpus: tuple[int, ...]


@dataclass(slots=True)
class _Node:
    name: str
    free: list[int]
    replicas: int = 0
    empty_since: float = 0.0


class Nodes:
    """See the module. O(nodes) per call."""

    def __init__(self, plan: NodePlan, clock: Clock) -> None:
        self._plan = plan
        self._clock = clock
        self._nodes: dict[str, _Node] = {}
        self._numbers = 0
        self._coming = 0
        self._counted_at = 0.0
        self._node_s = 0.0
        self.has_changed = False  # since this was set to False
        for _ in range(plan.least):
            self._add()
        if plan.most > plan.least:
            clock.every(LOOK_S, self._give_back)

    @property
    def node_s(self) -> float:
        """Seconds of all nodes so far."""
        return self._node_s + len(self._nodes) * (self._clock.now - self._counted_at)

    def devices(self) -> list[Device]:
        """The GPUs of all nodes."""
        return [
            Device(name, number, self._plan.gpu_bytes, 0) for name in self._nodes for number in range(self._plan.gpus)
        ]

    def replicas_on(self, node: str) -> int:
        return self._nodes[node].replicas

    def place(self, gpus: int) -> GpuPlace | None:
        """Take so many GPUs of one node; None: no node has them free."""
        rooms = [node for node in self._nodes.values() if len(node.free) >= gpus]
        if not rooms:
            return None
        node = min(rooms, key=lambda room: len(room.free))
        taken = tuple(node.free[:gpus])
        del node.free[:gpus]
        node.replicas += 1
        return GpuPlace(node.name, taken)

    def room(self, gpus: int) -> int:
        """How many replicas of so many GPUs have a place now."""
        return sum(len(node.free) // gpus for node in self._nodes.values())

    def leave(self, place: GpuPlace) -> None:
        """The GPUs of a replica are free again."""
        node = self._nodes[place.node]
        node.free = sorted([*node.free, *place.gpus])
        node.replicas -= 1
        node.empty_since = self._clock.now

    def demand(self, unplaced: list[int]) -> None:
        """So many replicas have no place; each entry is its GPUs."""
        nodes = math.ceil(sum(unplaced) / self._plan.gpus)
        while self._coming < nodes and len(self._nodes) + self._coming < self._plan.most:
            self._coming += 1
            self._clock.after(self._plan.start_s, self._arrive)

    def _arrive(self) -> None:
        self._coming -= 1
        self._add()

    def _add(self) -> None:
        self._count()
        self._numbers += 1
        name = f"node-{self._numbers}"
        self._nodes[name] = _Node(name, list(range(self._plan.gpus)), empty_since=self._clock.now)
        self.has_changed = True

    def _give_back(self) -> None:
        for node in list(self._nodes.values()):
            is_idle = not node.replicas and self._clock.now - node.empty_since >= self._plan.idle_s
            if is_idle and len(self._nodes) > self._plan.least:
                self._count()
                del self._nodes[node.name]
                self.has_changed = True

    def _count(self) -> None:
        self._node_s = self.node_s
        self._counted_at = self._clock.now
