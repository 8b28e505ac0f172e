"""Which node and device a demand gets, and how a fragmented cluster is repaired.

Decides: a placement for a demand, and the cheapest plan of moves that frees enough memory for one.
In: nodes, demands, replicas. Out: placements and plans.
Never: changes a ledger; `core.memory` carries plans out.

Placement: an engine gets those devices where the expected fragment of FGD grows least, for a workload learned by use.
A fragment is free memory that is unusable for a demand. A single device has none: any of its free bytes serve any rank.
Free bytes are unusable on devices that have too few of them for a rank, so the fragment depends on the demand: four
empty GPUs are fully usable for a model of one GPU, and the free halves of four half-empty GPUs are unusable for a model
that needs three quarters of one.

The expectation is that of FGD ("Beware of Fragmentation", Weng et al., USENIX ATC'23): for a demand m drawn from the
workload, all free bytes of a node are fragment if m does not fit there; if it fits, those of the devices too small for
a rank of m are. CPU and host memory are left to Ray, which offers only nodes that have enough of them. FGD is given its
workload; this policy learns it from demands. Before the first is learned, the policy is best fit: the node with least
left over, the smallest free devices that are enough.

Invariant: the fragment of a node is between zero and its free bytes.

Defragmentation: which replicas to drain, and where each restarts, so that an engine fits on a node; fewest bytes.

A step drains one replica and restarts it elsewhere. The memory of its old copy is released before the new one is
placed, so the new one may use it. Each replica that leaves the node is placed elsewhere in one step; no replica of
another node is moved for that (docs/decisions/memory.md).

Invariant: each step fits in order, and after the last one the engine fits; no steps if no plan is found.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

RELEARN_GROWTH = 2.0  # the workload is learned again when demands have doubled: a share is off by half at worst
MEMORY_DEMANDS = 16_384  # then all counts are halved: old demands fade, and a share is still known to 1%
MAX_SUBSETS = 256  # of the replicas on the node, by bytes: all of them for eight replicas

ScoredDevices = tuple[float, tuple[int, ...]]  # the score of devices (the lowest is the best), and the devices

FreeBytes = Sequence[int]  # free bytes of each device of a node


@dataclass(frozen=True, slots=True)
class Demand:
    """What an engine needs: on one node, `ranks` devices with `amount` bytes free; `groups` times (pipeline stages).

    Raises:
        ValueError: a figure that is not above zero.
    """

    ranks: int
    amount: int
    groups: int = 1

    def __post_init__(self) -> None:
        if min(self.ranks, self.amount, self.groups) < 1:
            raise ValueError(f"out of range: {self}")


class Workload:
    """The expected demands and their probabilities; immutable.

    Args:
        weights: of demands, with any sum; a pipeline counts once per group. If none is above zero, no demand is
            expected.
    """

    def __init__(self, weights: Mapping[Demand, float]) -> None:
        total = sum(weight * demand.groups for demand, weight in weights.items())
        by_ranks: dict[int, dict[int, float]] = {}  # weights by amount
        for demand, weight in weights.items():
            if weight > 0:
                amounts = by_ranks.setdefault(demand.ranks, {})
                amounts[demand.amount] = amounts.get(demand.amount, 0.0) + weight * demand.groups / total
        single = sorted(by_ranks.pop(1, {}).items())
        self._amounts = [amount for amount, _ in single]
        # Sum of the weights of the first 0, 1, 2, ... amounts.
        self._cumulative_weights = list(accumulate((weight for _, weight in single), initial=0.0))
        self._groups = [(ranks, *one) for ranks, amounts in by_ranks.items() for one in amounts.items()]

    def __bool__(self) -> bool:
        return bool(self._amounts or self._groups)

    def usable(self, free: FreeBytes) -> float:
        """The expected free bytes of a node that are no fragment."""
        sum_ = 0.0
        for have in free:
            sum_ += have * self._cumulative_weights[bisect_right(self._amounts, have)]
        for ranks, amount, weight in self._groups:
            wide = [have for have in free if have >= amount]
            if len(wide) >= ranks:
                sum_ += sum(wide) * weight
        return sum_

    def fragmentation(self, nodes: Sequence[FreeBytes]) -> float:
        """The part of the nodes' free bytes that the expected demand cannot use; 0 if nothing is free or no demand is
        expected."""
        free = sum(map(sum, nodes))
        return 1 - sum(map(self.usable, nodes)) / free if free and self else 0.0


class PlacementPolicy:
    """The demands so far, and the choice of devices that follows from them."""

    def __init__(self) -> None:
        self.workload = Workload({})
        self._counts: dict[Demand, float] = {}
        self._relearn_at = 1.0

    def observe(self, demand: Demand) -> None:
        """Learn the workload from all earlier demands if enough of them are new, then count this demand."""
        count = sum(self._counts.values())
        if count >= self._relearn_at:
            if count >= MEMORY_DEMANDS:
                self._counts = {old: had / 2 for old, had in self._counts.items() if had >= 1.0}
                count = sum(self._counts.values())
            self._relearn_at = min(count * RELEARN_GROWTH, MEMORY_DEMANDS)
            self.workload = Workload(self._counts)
        self._counts[demand] = self._counts.get(demand, 0.0) + 1.0

    def choose(self, free: FreeBytes, ranks: int, amount: int) -> ScoredDevices | None:
        """The best devices of a node for `ranks` ranks of `amount` bytes; None: they do not fit there.

        Several ranks take the tightest devices; for one rank, each distinct amount of free bytes is tried.
        """
        devices = tightest_fit(free, ranks, amount)
        if devices is None:
            return None
        if not self.workload:
            return float(sum(free) - ranks * amount), devices
        if ranks > 1:
            return self._fragment_growth(free, devices, amount), devices
        tries = {have: (index,) for index, have in reversed(list(enumerate(free))) if have >= amount}
        return min(
            ((self._fragment_growth(free, one, amount), one) for one in tries.values()), key=lambda choice: choice[0]
        )

    def _fragment_growth(self, free: FreeBytes, devices: Sequence[int], amount: int) -> float:
        """By how many bytes the expected fragment grows if these devices are taken."""
        after = list(free)
        for index in devices:
            after[index] -= amount
        return self.workload.usable(free) - self.workload.usable(after) - len(devices) * amount


def tightest_fit(free: FreeBytes, ranks: int, amount: int) -> tuple[int, ...] | None:
    """The `ranks` devices with the fewest free bytes that are enough; None: there are too few of them."""
    fits = sorted((index for index, have in enumerate(free) if have >= amount), key=lambda index: free[index])
    return tuple(fits[:ranks]) if len(fits) >= ranks else None


@dataclass(frozen=True, slots=True)
class PlacedReplica:
    """An engine replica on one node. `devices`: their keys, `node/index`; `amount`: its bytes on each."""

    replica_id: str
    model: str
    devices: tuple[str, ...]
    amount: int

    @property
    def bytes_to_move(self) -> int:
        """The bytes that a restart loads."""
        return self.amount * len(self.devices)


@dataclass(frozen=True, slots=True)
class Move:
    """One step: drain an engine, release its memory, start it on its target devices. `source`: its devices now."""

    owner: str
    model: str
    source: tuple[str, ...]
    target: tuple[str, ...]
    bytes_to_move: int


def plan_moves(
    free: Mapping[str, int], movable: Sequence[PlacedReplica], node: str, ranks: int, amount: int
) -> tuple[Move, ...]:
    """The steps after which `ranks` ranks of an engine, with `amount` bytes each, fit on a node.

    Args:
        free: free bytes by device key.
        movable: replicas that may be drained.

    Returns:
        No steps if the ranks fit already, or if no plan is found.
    """
    nodes: dict[str, list[str]] = {}
    for key in free:
        nodes.setdefault(key.rpartition("/")[0], []).append(key)
    of_node = set(nodes.get(node, ()))  # a node that has left has no devices
    enough: list[set[str]] = []
    for leaving in _subsets([replica for replica in movable if of_node.issuperset(replica.devices)]):
        names = {replica.replica_id for replica in leaving}
        if any(fewer <= names for fewer in enough):
            continue
        after = dict(free)
        for replica in leaving:
            _take(after, replica.devices, -replica.amount)
        devices = _fit(after, nodes.get(node, ()), ranks, amount)
        if devices is None:
            continue
        enough.append(names)
        _take(after, devices, amount)
        moves = _relocate(nodes.values(), dict(free), after, leaving)
        if moves is not None:
            return moves
    return ()


def _subsets(replicas: Sequence[PlacedReplica]) -> Iterator[tuple[PlacedReplica, ...]]:
    """Subsets by bytes to move, the empty one first, at most `MAX_SUBSETS`."""
    ordered = sorted(replicas, key=lambda replica: (replica.bytes_to_move, replica.replica_id))
    heap: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    for _ in range(MAX_SUBSETS):
        if not heap:
            return
        bytes_to_move, chosen = heapq.heappop(heap)
        yield tuple(ordered[index] for index in chosen)
        for index in range(chosen[-1] + 1 if chosen else 0, len(ordered)):  # members in rising order: each subset once
            heapq.heappush(heap, (bytes_to_move + ordered[index].bytes_to_move, (*chosen, index)))


def _relocate(
    nodes: Collection[Sequence[str]], now: dict[str, int], after: dict[str, int], leaving: Sequence[PlacedReplica]
) -> tuple[Move, ...] | None:
    """A target for each leaving replica, in one step and clear of the engine's devices; largest replica first, fullest
    node first. `after`: free bytes when all have left and the engine is placed."""
    moves: list[Move] = []
    for replica in sorted(leaving, key=lambda replica: -replica.bytes_to_move):
        _take(now, replica.devices, -replica.amount)
        both = {key: min(now[key], after[key]) for key in now}
        fullest_first = sorted(nodes, key=lambda keys: sum(both[key] for key in keys))
        fits = (_fit(both, keys, len(replica.devices), replica.amount) for keys in fullest_first)
        target = next((devices for devices in fits if devices is not None), None)
        if target is None:
            return None
        _take(now, target, replica.amount)
        _take(after, target, replica.amount)
        moves.append(Move(replica.replica_id, replica.model, replica.devices, target, replica.bytes_to_move))
    return tuple(moves)


def _fit(free: Mapping[str, int], keys: Sequence[str], ranks: int, amount: int) -> tuple[str, ...] | None:
    """`tightest_fit` on these devices."""
    found = tightest_fit([free[key] for key in keys], ranks, amount)
    return None if found is None else tuple(keys[index] for index in found)


def _take(free: dict[str, int], devices: Sequence[str], amount: int) -> None:
    for key in devices:
        free[key] -= amount
