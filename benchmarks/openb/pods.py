"""Pods and nodes of a published trace: what fits on one node, by devices, CPU, host memory and model of GPU.

A pod is `groups` groups of `ranks` ranks each. Amounts of a device are thousandths of a GPU.

Rules
- The ranks of a group are on one node; groups may be on different nodes.
- The ranks of one pod are on distinct devices, whatever is free on a device.
- A rank takes an amount of a device, or (`whole`) a device nobody has anything of, all of it.
- Every group needs its CPU and host memory on its node, and a GPU model the pod allows.

Invariant: what is taken of a device, of CPU or of host memory is never more than was free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Node:
    """A machine and what is free of it.

    Args:
        node_id: unique in the cluster.
        cpu_milli: thousandths of a core that are free.
        memory_bytes: host memory that is free.
        free: of each device, by its index.
        total: of each device what leases can have at all.
        model: of its devices; one model a node.

    Raises:
        ValueError: less than nothing is free, or more than there is.
    """

    node_id: str
    cpu_milli: int
    memory_bytes: int
    free: tuple[int, ...]
    total: tuple[int, ...]
    model: str = ""

    def __post_init__(self) -> None:
        if len(self.free) != len(self.total):
            raise ValueError(f"node {self.node_id}: {len(self.free)} devices are free of {len(self.total)}")
        if any(not 0 <= free <= total for free, total in zip(self.free, self.total, strict=True)):
            raise ValueError(f"node {self.node_id}: {self.free} is free of {self.total}")
        if min(self.cpu_milli, self.memory_bytes) < 0:
            raise ValueError(f"node {self.node_id}: cpu_milli {self.cpu_milli}, memory_bytes {self.memory_bytes}")


@dataclass(frozen=True, slots=True)
class Pod:
    """What a pod needs.

    Args:
        ranks: of a tensor-parallel group, each on a device of its own; 0: CPU and memory alone.
        amount: of a device, for each rank; with `whole` the least a device must have in total.
        groups: pipeline stages.
        cpu_milli: thousandths of a core, for each group.
        memory_bytes: host memory, for each group.
        whole: each rank takes a device that is free from end to end.
        models: the GPU models allowed; none named: all.

    Raises:
        ValueError: a negative amount, no group, or a rank that needs nothing of its device.
    """

    ranks: int
    amount: int
    groups: int = 1
    cpu_milli: int = 0
    memory_bytes: int = 0
    whole: bool = False
    models: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if min(self.ranks, self.amount, self.cpu_milli, self.memory_bytes) < 0 or self.groups < 1:
            raise ValueError(f"{self} has a negative amount, or no group")
        if self.ranks and not (self.amount or self.whole):
            raise ValueError(f"{self}: a rank needs an amount of its device")

    def allows(self, model: str) -> bool:
        return not self.models or model in self.models


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one group is: its node, the devices of its ranks and what it takes of each."""

    node_id: str
    devices: tuple[int, ...]
    amounts: tuple[int, ...]
    cpu_milli: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an engine is: a slot for each of its groups."""

    slots: tuple[Slot, ...]


class Room:
    """What is free of a node, as it changes. `index` is the node's place in the order of the cluster."""

    __slots__ = ("cpu", "free", "index", "memory", "model", "node_id", "total")

    def __init__(self, node: Node, index: int = 0) -> None:
        self.index = index
        self.node_id = node.node_id
        self.model = node.model
        self.cpu = node.cpu_milli
        self.memory = node.memory_bytes
        self.free = list(node.free)
        self.total = node.total

    def holds(self, demand: Pod) -> bool:
        """Whether one group fits, devices apart."""
        return self.cpu >= demand.cpu_milli and self.memory >= demand.memory_bytes and demand.allows(self.model)

    def eligible(self, demand: Pod) -> list[int]:
        """The devices one rank fits on."""
        amount = demand.amount
        if demand.whole:
            return [i for i, free in enumerate(self.free) if free and free == self.total[i] and free >= amount]
        return [i for i, free in enumerate(self.free) if free >= amount]

    def slot(self, demand: Pod, devices: Sequence[int]) -> Slot:
        """One group on these devices."""
        amounts = tuple(self.total[i] if demand.whole else demand.amount for i in devices)
        return Slot(self.node_id, tuple(devices), amounts, demand.cpu_milli, demand.memory_bytes)

    def fits(self, demand: Pod) -> bool:
        """Whether one group fits."""
        return self.holds(demand) and len(self.eligible(demand)) >= demand.ranks

    def refusal(self, slot: Slot) -> str | None:
        """Why a slot cannot be taken; None: it can."""
        if slot.cpu_milli > self.cpu or slot.memory_bytes > self.memory:
            return f"cpu_milli {slot.cpu_milli} of {self.cpu}, memory_bytes {slot.memory_bytes} of {self.memory}"
        if len(set(slot.devices)) < len(slot.devices):
            return f"devices {slot.devices} are not distinct"
        for device, amount in zip(slot.devices, slot.amounts, strict=True):
            if not 0 <= device < len(self.free) or amount > self.free[device]:
                return f"device {device}: {amount} of {self.free[device : device + 1]}"
        return None

    def take(self, slot: Slot) -> None:
        """Raises ValueError when it does not fit; nothing has changed then."""
        refusal = self.refusal(slot)
        if refusal is not None:
            raise ValueError(f"node {self.node_id}: {refusal}")
        self.cpu -= slot.cpu_milli
        self.memory -= slot.memory_bytes
        for device, amount in zip(slot.devices, slot.amounts, strict=True):
            self.free[device] -= amount

    def give_back(self, slot: Slot) -> None:
        """Raises ValueError when a device would be freer than it is large; nothing has changed then."""
        for device, amount in zip(slot.devices, slot.amounts, strict=True):
            if self.free[device] + amount > self.total[device]:
                raise ValueError(f"node {self.node_id}: {slot} was not taken")
        self.cpu += slot.cpu_milli
        self.memory += slot.memory_bytes
        for device, amount in zip(slot.devices, slot.amounts, strict=True):
            self.free[device] += amount

    def as_node(self) -> Node:
        return Node(self.node_id, self.cpu, self.memory, tuple(self.free), self.total, self.model)
