"""Which of the places that fit is the best: a policy gives a room (a node's free amounts) and its devices a score.

    best_fit    the node left with least, the devices with least that is enough
    ours        least fragment for a workload it learns, and what CPU and memory strand: learned_policy.py

Rules
- The lowest score wins, ties go to the node that came first.
- A score depends on the room, the demand and the policy's `epoch` alone, so it may be kept until one of them changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from serve_app.core.placing.fragmentation import Workload
from serve_app.core.placing.placement import Demand, Room

Choice = tuple[float, tuple[int, ...]]  # a score and the devices it is for


class Policy(Protocol):
    """What ranks the places that fit."""

    epoch: int

    def seen(self, demand: Demand) -> None:
        """A demand has been asked for, whether it fits or not."""

    def choose(self, room: Room, demand: Demand, eligible: Sequence[int]) -> Choice:
        """The best devices of a room that one group fits on, `eligible` being those a rank fits on."""


class BestFit:
    """The node left with least: the mean of CPU and device amounts left, each a share of the largest node's."""

    epoch = 0

    def __init__(self, largest_cpu_milli: int, largest_amount: int) -> None:
        self._cpu, self._amount = max(1, largest_cpu_milli), max(1, largest_amount)

    def seen(self, demand: Demand) -> None:
        """Nothing is learned."""

    def choose(self, room: Room, demand: Demand, eligible: Sequence[int]) -> Choice:
        devices = tightest(room, demand, eligible)
        taken = sum(room.total[i] for i in devices) if demand.whole else demand.amount * demand.ranks
        left = (sum(room.free) - taken) / self._amount + (room.cpu - demand.cpu_milli) / self._cpu
        return left / 2, devices


def tightest(room: Room, demand: Demand, eligible: Sequence[int]) -> tuple[int, ...]:
    """The devices with least that is enough."""
    free = room.free
    return tuple(sorted(eligible, key=lambda i: free[i])[: demand.ranks])


def least_fragment(workload: Workload, room: Room, demand: Demand, eligible: Sequence[int]) -> Choice:
    """The increase of expected fragment, and the devices where it is least.

    A group of several ranks, or of whole devices, takes the tightest ones; one rank tries each amount there is.
    """
    usable, free, model = workload.usable, room.free, room.model
    cpu, memory = room.cpu - demand.cpu_milli, room.memory - demand.memory_bytes
    before = usable(free, room.total, room.cpu, room.memory, model)
    if demand.ranks == 1 and not demand.whole:
        tries: list[tuple[int, ...]] = [(i,) for i in {free[i]: i for i in reversed(eligible)}.values()]
    else:
        tries = [tightest(room, demand, eligible)]
    best: Choice | None = None
    for devices in tries:
        after = free.copy()
        for i in devices:
            after[i] -= room.total[i] if demand.whole else demand.amount
        taken = sum(free) - sum(after)
        score = before - usable(after, room.total, cpu, memory, model) - taken
        if best is None or score < best[0]:
            best = (score, devices)
    assert best is not None  # one group fits here
    return best
