"""Memory grants of engines: which engine gets device memory, which waits, and which may load.

An engine periodically reports its full state and receives what it may have. A lost, repeated or late message needs no
repair: the next report has everything again.

Rules
- An engine requests bytes on devices of its nodes, between a wanted and a least amount. Requests are served in FIFO
  order; a later one passes only on devices that no earlier one could use.
- Ranks with a fixed device (placed by Ray) get that device or wait; the others get, on their node, the devices that
  leave most space for the demands observed so far (`core.placement`).
- Memory may be reserved for an engine before it starts (`core.memory.reservations`): its first report takes it over.
- On one device engines load one at a time, and not while an ended engine still has memory there: vLLM measures free
  memory while it starts. An engine that does not measure may load at any time and delays no other.
- A silent engine keeps its memory until it was observed free.
- An engine that exceeds its grant for `OVERUSE_S`, and was within it before, drains and restarts, at most one per model
  in `RESTART_INTERVAL_S`. One that never fitted would not fit after a restart: its grant is too small, as its alarm
  shows.

Invariant: no engine loads before its memory is reserved on every device it will use. Two ranks of an engine are never
on one device, and each rank gets at least `least_bytes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from math import inf
from operator import itemgetter

from serve_app.core.memory.checkpoint import Checkpoint
from serve_app.core.memory.crash_loops import KILLED, CrashLoops
from serve_app.core.memory.drains import Drains
from serve_app.core.memory.leases import Hold, Lease, LeaseKind, Phase
from serve_app.core.memory.ledger import Ledger
from serve_app.core.memory.reports import EngineReply, EngineReport
from serve_app.core.memory.reservations import Reservations
from serve_app.core.placement import Demand, PlacementPolicy
from serve_app.core.times import LOADING_TTL_S, OWNER_TTL_S
from serve_app.errors import InsufficientMemory, LeaseConflict, LeaseNotFound, ServeAppError

OVERUSE_SHARE = 0.05  # above the grant: pages shared by an engine's processes are counted in each
OVERUSE_S = 30.0  # a large prefill or a compilation returns its memory within seconds
RESTART_INTERVAL_S = 600.0  # loading takes minutes; a model that always exceeds its grant still serves most of the time


@dataclass(frozen=True, slots=True)
class BlockedEngine:
    """An engine that waits for memory."""

    owner: str
    model: str
    ranks: int
    wanted_bytes: int
    least_bytes: int
    waits_s: float
    why: str


@dataclass(frozen=True, slots=True)
class OveruseAlarm:
    """An engine that uses more of a device than it was granted."""

    replica: str
    model: str
    device: str
    granted_bytes: int
    measured_bytes: int


@dataclass(slots=True)
class _Engine:
    report: EngineReport
    first_reported_at: float
    reported_at: float
    ran_since: float | None = None
    why: str = ""
    is_loading: bool = False
    has_fitted: bool = False  # it was within its grant once
    overuse_since: float | None = None


class EngineGrants:
    """The engines and their grants. A report costs O(leases on its devices), and while engines wait O(those) too."""

    def __init__(self, ledger: Ledger, checkpoint: Checkpoint) -> None:
        self._ledger = ledger
        self._engines: dict[str, _Engine] = {}  # in order of their first report
        self._restarted: dict[str, float] = {}  # by model: when an engine was last drained for overuse
        # by model: wanted and least bytes of its last engine without a fixed device
        self.last_requests: dict[str, tuple[int, int]] = {}
        self.policy = PlacementPolicy()
        self.reservations = Reservations(ledger, checkpoint)
        self.drains = Drains()
        self.crash_loops = CrashLoops()

    def report(
        self, report: EngineReport, now: float, *, frozen: bool = False, unreported: Set[str] = frozenset()
    ) -> EngineReply:
        """Process the report of an engine that has not ended; returns what it may have.

        Args:
            frozen: grant no memory (while other engines' holds are unknown).
            unreported: engines that may be loading: they have not reported to this actor.

        Raises:
            LeaseConflict, InsufficientMemory: its reported holds belong to another engine by now, and it must end.
            LeaseNotFound: they are on an unknown device.
            In each case nothing is known of it afterwards.
        """
        owner = report.owner
        self._ledger.join(owner, OWNER_TTL_S if report.kv_tokens or not report.holds else LOADING_TTL_S, now)
        try:
            self._lease_reported_holds(report)
        except ServeAppError:
            self.forget(owner, memory_gone=False)
            raise
        engine = self._engines.get(owner)
        if engine is None:
            engine = self._engines[owner] = _Engine(report, now, now)
            for demand in unplaced_demands(report):
                self.policy.observe(demand)  # once per engine, not per report
        engine.report = report
        engine.reported_at = now
        if report.failed:
            self.crash_loops.record_failure(report.model, report.failed, now)
        if engine.ran_since is None and report.kv_tokens:
            engine.ran_since = now
        engine.is_loading = engine.is_loading or (report.loading and not report.kv_tokens)
        if len(report.ranks) == 1 and report.ranks[0].device is None:
            self.last_requests[report.model] = (report.wanted_bytes, report.least_bytes)
        if owner not in self._ledger and not frozen:
            self._grant_waiting()
        if owner not in self._ledger:
            return EngineReply(why=engine.why or "the ledger is being rebuilt")
        lease = self._ledger.lease(owner)
        if report.kv_tokens and lease.phase is Phase.RESERVED:
            lease = self._ledger.commit(owner, report.kv_tokens)
            engine.is_loading = False
        if lease.phase is Phase.RESERVED:
            self._ledger.join(owner, LOADING_TTL_S, now)  # it may begin to load with this answer
        self._check_overuse(engine, lease, now)
        turn, why = self._may_load(engine, lease, unreported, now)
        left_s = self.drains.on_report(report, now)
        return EngineReply(lease.holds, may_load=turn, why=why, drain=left_s is not None, drain_s=left_s or 0.0)

    def forget(self, owner: str, *, memory_gone: bool) -> list[Lease]:
        """An engine is gone; `memory_gone`: its memory is free already. Returns the leases that ended."""
        self.lease_lost(owner)
        ended = self._ledger.end(owner, memory_gone=memory_gone) if owner in self._ledger else []
        return ended + self._ledger.leave(owner)

    def on_crash(self, owner: str, now: float) -> None:
        """An engine has ended unasked; call this before `forget` and `lease_lost`."""
        engine = self._engines.get(owner)
        if engine is not None and owner in self._ledger and owner not in self.drains:
            if not engine.report.failed:
                self.crash_loops.record_failure(engine.report.model, KILLED, now)
            ran_since = now if engine.ran_since is None else engine.ran_since
            self.crash_loops.on_crash(engine.report.model, ran_since - engine.first_reported_at, now - ran_since, now)

    def lease_lost(self, owner: str) -> None:
        """Remove an engine whose lease has ended, or that has none."""
        self._engines.pop(owner, None)

    def drain(self, owner: str, why: str, now: float, within_s: float | None = None) -> None:
        """Let an engine finish its requests within this time (None: its `drain_s`) and end. Raises LeaseNotFound."""
        if owner not in self._engines:
            raise LeaseNotFound(f"there is no engine {owner!r}")
        report = self._engines[owner].report
        self.drains.begin(report, why, now + (report.drain_s if within_s is None else within_s))

    def blocked(self, now: float) -> list[BlockedEngine]:
        """Engines that wait for memory, in FIFO order."""
        waiting = [(engine.report, now - engine.first_reported_at, engine.why) for engine in self._waiting()]
        return [
            BlockedEngine(
                report.owner, report.model, len(report.ranks), report.wanted_bytes, report.least_bytes, waits_s, why
            )
            for report, waits_s, why in waiting
        ]

    def alarms(self) -> list[OveruseAlarm]:
        """Engines above their grant by the last measurement."""
        return [
            OveruseAlarm(owner, engine.report.model, hold.on, hold.amount, measured)
            for owner, engine in self._engines.items()
            if owner in self._ledger
            for hold, measured in zip(self._ledger.lease(owner).holds, engine.report.measured_bytes, strict=False)
            if measured is not None and measured > hold.amount
        ]

    def last_report(self, owner: str) -> EngineReport | None:
        """The last report of an engine; None: unknown."""
        engine = self._engines.get(owner)
        return None if engine is None else engine.report

    def silent(self, since: float) -> list[EngineReport]:
        """The last reports of engines without a report since then, waiting ones included."""
        return [engine.report for engine in self._engines.values() if engine.reported_at <= since]

    def owners(self) -> list[str]:
        """All engines that have a grant or wait for one."""
        return list(self._engines)

    def running(self, model: str) -> list[str]:
        """The running engines of a model that do not drain."""
        return [
            owner
            for owner, engine in self._engines.items()
            if engine.report.model == model and engine.report.kv_tokens and owner in self._ledger
            if owner not in self.drains
        ]

    def fingerprint(self, owner: str) -> str | None:
        """What an engine has reported of its model; None: nothing."""
        engine = self._engines.get(owner)
        return None if engine is None else engine.report.fingerprint

    def fingerprints(self, model: str) -> set[str | None]:
        """Those of a model's engines that run or start, and do not drain. O(engines)."""
        reports = (engine.report for owner, engine in self._engines.items() if owner not in self.drains)
        return {report.fingerprint for report in reports if report.model == model}

    def expected(self) -> dict[str, Demand]:
        """By model, the least that its next engine probably needs: as its last one reported."""
        found = {model: Demand(1, least) for model, (_, least) in self.last_requests.items()}
        for engine in self._engines.values():
            nodes = {rank.node for rank in engine.report.ranks}
            found[engine.report.model] = Demand(
                len(engine.report.ranks) // len(nodes), engine.report.least_bytes, groups=len(nodes)
            )
        return found

    def free_for_new(self) -> dict[str, int]:
        """Free bytes by device, zero if a waiting engine could use it."""
        free = self._ledger.free_bytes()
        for engine in self._waiting():
            free |= dict.fromkeys(usable_devices(engine.report, free), 0)
        return free

    def _lease_reported_holds(self, report: EngineReport) -> None:
        """Lease what an engine holds that is unknown here, or was declared gone while it stood still."""
        owner = report.owner
        if owner not in self._ledger:
            if report.holds:
                self._ledger.reserve(owner, LeaseKind.ENGINE, owner, report.holds)
        elif self._ledger.phase(owner) is Phase.ENDING:
            if tuple(report.holds) != self._ledger.lease(owner).holds:
                raise LeaseConflict(f"a part of the memory of {owner} is gone with its node")
            self._ledger.revive(owner)

    def _waiting(self) -> list[_Engine]:
        return [engine for owner, engine in self._engines.items() if owner not in self._ledger]

    def _take_reservation(self, engine: _Engine) -> None:
        """Give an engine its reservation; a reservation that is too small ends."""
        report = engine.report
        reserved = self.reservations.take_for_engine(engine.report, self._engines)
        if reserved is None:
            return
        self.reservations.end(reserved.name)
        if reserved.hold.amount >= report.least_bytes:
            hold = Hold(reserved.hold.on, min(report.wanted_bytes, reserved.hold.amount))
            self._ledger.reserve(report.owner, LeaseKind.ENGINE, report.owner, (hold,))
            engine.why = ""

    def _grant_waiting(self) -> None:
        """Grant reservations first, then what is free, in FIFO order."""
        for engine in self._waiting():
            if self._ledger.knows(engine.report.owner):
                self._take_reservation(engine)
        free = self._ledger.free_bytes()
        for engine in self._waiting():
            owner = engine.report.owner
            try:
                holds = choose_devices(engine.report, free, self.policy)
                self._ledger.reserve(owner, LeaseKind.ENGINE, owner, holds)
            except InsufficientMemory as error:
                engine.why = error.message
                # kept for this engine, so that later ones cannot starve it
                free |= dict.fromkeys(usable_devices(engine.report, free), 0)
                continue
            except LeaseNotFound:  # expired owner; `expire` will remove it
                continue
            engine.why = ""
            for hold in holds:
                free[hold.on] -= hold.amount

    def _may_load(self, engine: _Engine, lease: Lease, unreported: Set[str], now: float) -> tuple[bool, str]:
        """Whether an engine may load, and otherwise the reason."""
        if lease.phase is not Phase.RESERVED:
            return False, ""
        pause_s = 0.0 if engine.is_loading else self.crash_loops.pause_s(engine.report.model, now)
        if pause_s:
            return False, f"engines of {engine.report.model} crash soon after their start: {pause_s:.0f} s of pause"
        waits = engine.report.measures and not engine.is_loading
        why = self._load_conflict(lease, unreported) if waits else ""
        engine.is_loading = not why
        return engine.is_loading, why

    def _load_conflict(self, lease: Lease, unreported: Set[str]) -> str:
        """What else changes the free memory on an engine's devices; empty: nothing."""
        leases = [one for hold in lease.holds for one in self._ledger.leases_on(hold.on)]
        for neighbour in leases:
            other = self._engines.get(neighbour.lease_id)
            if other is None or not other.report.measures:
                continue
            if other.is_loading or (neighbour.lease_id in unreported and not other.report.kv_tokens):
                return f"{other.report.model} loads on the same device"
        ending = any(one.phase is Phase.ENDING for one in leases)
        return "an engine that has ended still has memory of the same device" if ending else ""

    def _check_overuse(self, engine: _Engine, lease: Lease, now: float) -> None:
        measured = zip(lease.holds, engine.report.measured_bytes, strict=False)
        use = [(size, hold.amount) for hold, size in measured if size is not None]
        engine.has_fitted |= engine.report.kv_tokens > 0 and any(size <= granted for size, granted in use)
        if not (engine.has_fitted and any(size > granted * (1 + OVERUSE_SHARE) for size, granted in use)):
            engine.overuse_since = None
            return
        engine.overuse_since = now if engine.overuse_since is None else engine.overuse_since
        model = engine.report.model
        due = max(engine.overuse_since + OVERUSE_S, self._restarted.get(model, -inf) + RESTART_INTERVAL_S)
        if now >= due and engine.report.owner not in self.drains:
            self._restarted[model] = now
            self.drain(engine.report.owner, "it uses more memory than it was granted", now)


def unplaced_demands(report: EngineReport) -> list[Demand]:
    """The ranks of an engine without a fixed device, one demand per node."""
    ranks = Counter(rank.node for rank in report.ranks if rank.device is None)
    return [Demand(count, report.wanted_bytes) for count in ranks.values()]


def usable_devices(report: EngineReport, free: dict[str, int]) -> list[str]:
    """Keys of the devices that an engine can use."""
    fixed = {f"{rank.node}/{rank.device}" for rank in report.ranks if rank.device is not None}
    nodes = {rank.node for rank in report.ranks if rank.device is None}
    return [key for key in free if key in fixed or key.rpartition("/")[0] in nodes]


def choose_devices(report: EngineReport, free: dict[str, int], policy: PlacementPolicy) -> list[Hold]:
    """A device for each rank, and the same bytes on all: the wanted amount, or what is free down to the least.

    Raises:
        InsufficientMemory: names the node or device and the missing amount.
    """
    chosen = {index: f"{rank.node}/{rank.device}" for index, rank in enumerate(report.ranks) if rank.device is not None}
    for key in chosen.values():
        if free.get(key, -1) < report.least_bytes:
            raise InsufficientMemory(_shortage(report, key, free.get(key)))
    for node in {rank.node for rank in report.ranks if rank.device is None}:
        ranks = [index for index, rank in enumerate(report.ranks) if rank.node == node and rank.device is None]
        free_there = {key: free[key] for key in free if key.rpartition("/")[0] == node and key not in chosen.values()}
        devices = best_devices(len(ranks), report.wanted_bytes, report.least_bytes, free_there, (node,), policy)
        if devices is None:
            where = f"{len(ranks)} devices of {node}" if len(ranks) > 1 else f"any device of {node}"
            raise InsufficientMemory(_shortage(report, where, max(free_there.values(), default=None)))
        chosen |= dict(zip(ranks, devices, strict=True))
    amount = min(report.wanted_bytes, *(free[key] for key in chosen.values()))
    return [Hold(chosen[index], amount) for index in range(len(report.ranks))]


def best_devices(
    ranks: int, wanted: int, least: int, free: Mapping[str, int], nodes: Sequence[str], policy: PlacementPolicy
) -> list[str] | None:
    """Devices for the ranks of an engine on one of these nodes: the policy's choice for the wanted bytes, else those
    with most free; None: too few have the least.

    Args:
        nodes: one, if there are several ranks.
    """
    by_node: dict[str, list[str]] = {node: [] for node in nodes}
    for key in free:
        node = key.rpartition("/")[0]
        if node in by_node:
            by_node[node].append(key)
    choices = [
        (found[0], [keys[index] for index in found[1]])
        for keys in by_node.values()
        if (found := policy.choose([free[key] for key in keys], ranks, wanted)) is not None
    ]
    if choices:
        return min(choices, key=itemgetter(0))[1]
    enough = (key for keys in by_node.values() for key in keys if free[key] >= least)
    most = sorted(enough, key=lambda key: -free[key])[:ranks]
    return most if len(most) == ranks else None


def _shortage(report: EngineReport, where: str, free: int | None) -> str:
    if free is None:
        return f"{where} is not known"
    return f"{where}: at least {report.least_bytes / 1e9:.2f} GB needed, {max(0, free) / 1e9:.2f} GB free"
