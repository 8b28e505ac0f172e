"""The policies that ours is compared with: first fit, best fit, and FGD with the trace's own distribution.

FGD ("Beware of Fragmentation", Weng et al., USENIX ATC'23): for a demand m drawn from the workload, all of a node's
free GPU amount is fragment when m does not fit there, and of a node where it does, the devices too small for a rank of
m. The pod goes where that grows least.

A policy gives a room (a node's free amounts) and its devices a score: the lowest wins, ties go to the node that came
first. A score depends on the room, the pod and the policy's `epoch` alone.

Invariant: the fragment of a node is between zero and what is free of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from benchmarks.openb.pods import Node, Pod, Room

Choice = tuple[float, tuple[int, ...]]  # a score and the devices it is for


class PodPolicy(Protocol):
    """What ranks the places that fit."""

    @property
    def epoch(self) -> int: ...

    def seen(self, pod: Pod) -> None:
        """A pod has been asked for, whether it fits or not."""

    def choose(self, room: Room, pod: Pod, eligible: Sequence[int]) -> Choice:
        """The best devices of a room that the pod fits on, `eligible` being those a rank fits on."""


class Unlearning:
    """What a policy has that learns nothing."""

    epoch = 0

    def seen(self, pod: Pod) -> None:
        """Nothing is learned."""


class FirstFit(Unlearning):
    """The first node in the cluster's order."""

    def choose(self, room: Room, pod: Pod, eligible: Sequence[int]) -> Choice:
        return 0.0, tuple(eligible[: pod.ranks])


class BestFit(Unlearning):
    """The node left with least."""

    def choose(self, room: Room, pod: Pod, eligible: Sequence[int]) -> Choice:
        devices = tightest(room, pod, eligible)
        taken = sum(room.total[i] for i in devices) if pod.whole else pod.amount * pod.ranks
        return float(sum(room.free) - taken), devices


def tightest(room: Room, pod: Pod, eligible: Sequence[int]) -> tuple[int, ...]:
    """The devices with least that is enough."""
    free = room.free
    return tuple(sorted(eligible, key=lambda i: free[i])[: pod.ranks])


class Fgd(Unlearning):
    """Fragmentation Gradient Descent: the place that adds least to the fragment expected of the workload, which is
    given.

    A pod of several ranks, or of whole devices, takes the tightest ones; one rank tries each amount there is.
    """

    def __init__(self, workload: TraceWorkload) -> None:
        self._workload = workload

    def choose(self, room: Room, pod: Pod, eligible: Sequence[int]) -> Choice:
        """The increase of expected fragment, and the devices where it is least."""
        usable = self._workload.usable
        free = room.free
        before = usable(free, room.total)
        if pod.ranks == 1 and not pod.whole:
            tries: list[tuple[int, ...]] = [(i,) for i in {free[i]: i for i in reversed(eligible)}.values()]
        else:
            tries = [tightest(room, pod, eligible)]
        best: Choice | None = None
        for devices in tries:
            after = free.copy()
            for i in devices:
                after[i] -= room.total[i] if pod.whole else pod.amount
            taken = sum(free) - sum(after)
            score = before - usable(after, room.total) - taken
            if best is None or score < best[0]:
                best = (score, devices)
        assert best is not None  # the pod fits here
        return best


class TraceWorkload:
    """The pods to expect and how likely each is; immutable.

    Args:
        weights: of pods, any sum above zero.
    """

    def __init__(self, weights: Mapping[Pod, float]) -> None:
        total = sum(weights.values())
        single: dict[int, float] = {}
        whole: dict[int, float] = {}
        groups: dict[tuple[int, bool], dict[int, float]] = {}
        for pod, weight in weights.items():
            key = pod.amount if pod.ranks == 1 else pod.ranks
            by_key = whole if pod.whole else single
            if pod.ranks > 1:
                by_key = groups.setdefault((pod.amount, pod.whole), {})
            by_key[key] = by_key.get(key, 0.0) + weight / total
        # pods of one rank: their amounts, and the weight of those up to each
        self._amounts = sorted(single)
        self._wholes = sorted(whole)
        self._single = _cumulative(single[amount] for amount in self._amounts)
        self._whole = _cumulative(whole[amount] for amount in self._wholes)
        # more ranks: amount, whole, weight by devices there are
        self._groups = [
            (amount, is_whole, _cumulative(by.get(n + 1, 0.0) for n in range(max(by))))
            for (amount, is_whole), by in groups.items()
        ]

    def usable(self, free: Sequence[int], total: Sequence[int]) -> float:
        """The expected amount of a node's free devices that is no fragment."""
        sum_ = 0.0
        for have, size in zip(free, total, strict=True):
            if have:
                weight = self._single[bisect_right(self._amounts, have)]
                if have == size:
                    weight += self._whole[bisect_right(self._wholes, have)]
                sum_ += have * weight
        for amount, is_whole, weights in self._groups:
            fits = [f for f, t in zip(free, total, strict=True) if f >= amount and (f == t or not is_whole)]
            sum_ += sum(fits) * weights[min(len(fits), len(weights) - 1)]
        return sum_

    def fragment(self, node: Node) -> float:
        """F_n(M) of the paper: the expected amount of a node's free devices that is fragment."""
        return sum(node.free) - self.usable(node.free, node.total)


def _cumulative(weights: Iterable[float]) -> tuple[float, ...]:
    """Sums of the first none, one, two, ... of them."""
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    return tuple(sums)
