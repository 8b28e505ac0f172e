"""Pods and nodes of a published trace: what fits on one node's GPUs. Amounts of a device are thousandths of a GPU.

Rules
- The ranks of a pod are on one node, on distinct devices, whatever is free on a device.
- A rank takes an amount of a device, or (`whole`) a device nobody has anything of, all of it.

Invariant: what is taken of a device is never more than was free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Node:
    """A machine and what is free of it.

    Args:
        node_id: unique in the cluster.
        free: of each device, by its index.
        total: of each device what pods can have at all.

    Raises:
        ValueError: less than nothing is free, or more than there is.
    """

    node_id: str
    free: tuple[int, ...]
    total: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.free) != len(self.total):
            raise ValueError(f"node {self.node_id}: {len(self.free)} devices are free of {len(self.total)}")
        if any(not 0 <= free <= total for free, total in zip(self.free, self.total, strict=True)):
            raise ValueError(f"node {self.node_id}: {self.free} is free of {self.total}")


@dataclass(frozen=True, slots=True)
class Pod:
    """What a pod needs.

    Args:
        ranks: each on a device of its own.
        amount: of a device, for each rank; with `whole` the least a device must have in total.
        whole: each rank takes a device that is free from end to end.

    Raises:
        ValueError: no rank, or one that needs nothing of its device.
    """

    ranks: int
    amount: int
    whole: bool = False

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.amount < 0 or not (self.amount or self.whole):
            raise ValueError(f"{self}: each of its ranks needs an amount of a device")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a pod is: its node, the devices of its ranks and what it takes of each."""

    node_id: str
    devices: tuple[int, ...]
    amounts: tuple[int, ...]


class Room:
    """What is free of a node, as it changes. `index` is the node's place in the order of the cluster."""

    __slots__ = ("free", "index", "node_id", "total")

    def __init__(self, node: Node, index: int = 0) -> None:
        self.index = index
        self.node_id = node.node_id
        self.free = list(node.free)
        self.total = node.total

    def eligible(self, pod: Pod) -> list[int]:
        """The devices one rank fits on."""
        amount = pod.amount
        if pod.whole:
            return [i for i, free in enumerate(self.free) if free and free == self.total[i] and free >= amount]
        return [i for i, free in enumerate(self.free) if free >= amount]

    def placement(self, pod: Pod, devices: Sequence[int]) -> Placement:
        """A pod on these devices."""
        amounts = tuple(self.total[i] if pod.whole else pod.amount for i in devices)
        return Placement(self.node_id, tuple(devices), amounts)

    def take(self, placement: Placement) -> None:
        """Raises ValueError when it does not fit; nothing has changed then."""
        pairs = list(zip(placement.devices, placement.amounts, strict=True))
        for device, amount in pairs:
            if not 0 <= device < len(self.free) or amount > self.free[device]:
                raise ValueError(f"device {device}: {amount} of {self.free[device : device + 1]}")
        for device, amount in pairs:
            self.free[device] -= amount

    def give_back(self, placement: Placement) -> None:
        """Raises ValueError when a device would be freer than it is large; nothing has changed then."""
        pairs = list(zip(placement.devices, placement.amounts, strict=True))
        if any(self.free[device] + amount > self.total[device] for device, amount in pairs):
            raise ValueError(f"{placement} was not taken")
        for device, amount in pairs:
            self.free[device] += amount

    def as_node(self) -> Node:
        return Node(self.node_id, tuple(self.free), self.total)
