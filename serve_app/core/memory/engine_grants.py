"""Engines under grant: who gets device memory, who waits for it, and whose turn it is to load.

An engine says again and again what it is and what it has, and is told what it may have. So a message that is lost,
repeated or late needs no repair: the next one says everything again.

Rules
- An engine asks for bytes on devices of its nodes: as much as it wants, or as little as it can do with. Whoever asked
  first is served first; who asked later may pass only on devices that nobody before it could use.
- Ranks whose device is fixed (Ray has placed them) get that device or wait; the others get, on their node, the devices
  that leave most room for what is asked for here (`core.placement.policy`).
- Memory may be kept for an engine before it starts (`core.memory.reservations`): it takes that over with its first
  word.
- On one device engines load one at a time, and not while one that has ended still has memory there: vLLM measures what
  is free while it starts. One that measures nothing needs no turn, and holds up nobody.
- An engine that falls silent keeps its memory until that has been seen free.
- One that has outgrown its grant for a while, and was within it before, drains and starts anew, of a model one in
  `AGAIN_S`. One that never fitted would not fit after a restart: its grant is too small, which is told.

Invariant: no engine loads before its memory is reserved on every device it will use.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from math import inf

from serve_app.core.memory.device_choice import choose, could_use, demands
from serve_app.core.memory.leases import Hold, Kind, Lease, Phase
from serve_app.core.memory.ledger import Ledger
from serve_app.core.memory.reports import LOADING_TTL_S, OWNER_TTL_S, EngineReply, EngineReport
from serve_app.core.memory.reservations import Berths
from serve_app.core.placement import Demand, Policy
from serve_app.errors import InsufficientMemory, LeaseConflict, LeaseNotFound

OVER_SHARE = 0.05  # beyond the grant: pages that an engine's processes share are counted in each of them
OVER_S = 30.0  # what a large prefill or a compile takes for the moment is back within seconds
AGAIN_S = 600.0  # a model loads in minutes; one whose every load outgrows its grant serves most of the time


@dataclass(frozen=True, slots=True)
class Blocked:
    """An engine that waits for memory."""

    owner: str
    model: str
    ranks: int
    wanted_bytes: int
    least_bytes: int
    waits_s: float
    why: str


@dataclass(frozen=True, slots=True)
class Alarm:
    """An engine that uses more of a device than it was granted."""

    owner: str
    model: str
    device: str
    granted_bytes: int
    measured_bytes: int


@dataclass(slots=True)
class _Engine:
    told: EngineReport
    since: float
    heard_at: float
    why: str = ""
    loads: bool = False
    fitted: bool = False  # it ran within its grant once
    over_since: float | None = None


class Grants:
    """The engines and what they hold. O(engines that wait) per report while some do, else O(log n)."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._engines: dict[str, _Engine] = {}  # in the order they came
        self._alarms: dict[tuple[str, str], Alarm] = {}
        self._leaving: set[str] = set()
        self._restarted: dict[str, float] = {}  # by model: when the last one that outgrew its grant was drained
        self._asked: dict[str, tuple[int, int]] = {}  # by model: what its last engine without a device wanted, at least
        self.policy = Policy()
        self.berths = Berths(ledger)

    def report(
        self, told: EngineReport, now: float, *, frozen: bool = False, unheard: Set[str] = frozenset()
    ) -> EngineReply:
        """An engine's word; returns what it may have.

        Args:
            frozen: no memory is to be granted (while it is not known what others hold).
            unheard: engines of which it is not known whether they load: they have not spoken to this actor.

        Raises:
            LeaseConflict, InsufficientMemory: what it says it holds is another's by now.
        """
        owner = told.owner
        if told.gone:
            self.forget(owner, memory_gone=True)
            return EngineReply(why="ended")
        self._ledger.join(owner, OWNER_TTL_S if told.kv_tokens or not told.holds else LOADING_TTL_S, now)
        engine = self._engines.get(owner)
        if engine is None:
            engine = self._engines[owner] = _Engine(told, now, now)
            for demand in demands(told):
                self.policy.seen(demand)  # once for each engine, however often it asks
        engine.told, engine.heard_at = told, now
        engine.loads = engine.loads or (told.loading and not told.kv_tokens)
        if demands(told) and len(told.ranks) == 1:
            self._asked[told.model] = (told.wanted_bytes, told.least_bytes)
        if owner not in self._ledger:
            if told.holds:
                self._ledger.reserve(owner, Kind.ENGINE, owner, told.holds)  # presented, by one we did not know
            elif not frozen:
                self._serve()
        if owner not in self._ledger:
            return EngineReply(why=engine.why or "the ledger is being rebuilt")
        lease = self._ledger.lease(owner)
        if lease.phase is Phase.ENDING:
            if tuple(told.holds) != lease.holds:
                raise LeaseConflict(f"a part of what {owner} held is gone with its node")
            lease = self._ledger.revive(owner)  # taken for gone while it stood still; nobody else has its memory yet
        if told.kv_tokens and lease.phase is Phase.RESERVED:
            lease = self._ledger.commit(owner, told.kv_tokens)
            engine.loads = False
        if lease.phase is Phase.RESERVED:
            self._ledger.join(owner, LOADING_TTL_S, now)  # it may begin with this very answer
        self._measure(engine, lease, now)
        turn, why = self._turn(engine, lease, unheard)
        return EngineReply(lease.holds, may_load=turn, why=why, drain=owner in self._leaving)

    def forget(self, owner: str, *, memory_gone: bool) -> list[Lease]:
        """An engine is gone; with its memory, or that will be seen later. Returns the leases that ended."""
        self.lost(owner)
        if owner not in self._ledger:
            self._ledger.leave(owner)
            return []
        ended = self._ledger.end(owner, memory_gone=memory_gone)
        return ended + self._ledger.leave(owner)

    def lost(self, owner: str) -> None:
        """The ledger has ended an engine's lease, or never gave it one."""
        self._engines.pop(owner, None)
        self._leaving.discard(owner)
        for key in [key for key in self._alarms if key[0] == owner]:
            del self._alarms[key]

    def drain(self, owner: str) -> None:
        """Have an engine finish what it runs and end. Raises LeaseNotFound."""
        if owner not in self._engines:
            raise LeaseNotFound(f"there is no engine {owner!r}")
        self._leaving.add(owner)

    def leaving(self) -> list[str]:
        """Engines that were told to drain and have not ended."""
        return sorted(self._leaving)

    def blocked(self, now: float) -> list[Blocked]:
        """Who waits for memory, the first first."""
        return [
            Blocked(
                owner,
                engine.told.model,
                len(engine.told.ranks),
                engine.told.wanted_bytes,
                engine.told.least_bytes,
                now - engine.since,
                engine.why,
            )
            for owner, engine in self._waiting()
        ]

    def alarms(self) -> list[Alarm]:
        """Who uses more than was granted, by the last measurement."""
        return list(self._alarms.values())

    def told(self, owner: str) -> EngineReport | None:
        """The last word of an engine."""
        engine = self._engines.get(owner)
        return None if engine is None else engine.told

    def silent(self, since: float) -> list[EngineReport]:
        """The last words of the engines that have said nothing since then, of those that wait, too."""
        return [engine.told for engine in self._engines.values() if engine.heard_at <= since]

    def owners(self) -> list[str]:
        """All that have a grant or wait for one."""
        return list(self._engines)

    def of(self, model: str) -> list[str]:
        """The engines of a model that run."""
        return [
            owner
            for owner, engine in self._engines.items()
            if engine.told.model == model and engine.told.kv_tokens and owner in self._ledger
        ]

    def last_ask(self, model: str) -> tuple[int, int] | None:
        """The bytes that the last engine of a model wanted, and at least; None: none that left its device to the ledger
        has spoken."""
        return self._asked.get(model)

    def expected(self) -> dict[str, Demand]:
        """By model, the least that its next engine is likely to need: what its last one here said."""
        found = {model: Demand(1, least) for model, (_, least) in self._asked.items()}
        for engine in self._engines.values():
            nodes = {rank.node for rank in engine.told.ranks}
            found[engine.told.model] = Demand(
                len(engine.told.ranks) // len(nodes), engine.told.least_bytes, groups=len(nodes)
            )
        return found

    def free_for_new(self) -> dict[str, int]:
        """Bytes by device that nobody who waits could use."""
        free = {use.device.key: use.free_bytes for use in self._ledger.devices()}
        for _, engine in self._waiting():
            for key in could_use(engine.told, free):
                free[key] = 0
        return free

    def _take_over(self, told: EngineReport) -> None:
        """Give an engine what was kept for it; what is too small for it ends."""
        berth = self.berths.for_engine(told, self._engines) if self._ledger.knows(told.owner) else None
        if berth is None:
            return
        self.berths.end(berth)
        if berth.hold.amount >= told.least_bytes:
            hold = Hold(berth.hold.on, min(told.wanted_bytes, berth.hold.amount))
            self._ledger.reserve(told.owner, Kind.ENGINE, told.owner, (hold,))
            self._engines[told.owner].why = ""

    def _waiting(self) -> Iterator[tuple[str, _Engine]]:
        return ((owner, engine) for owner, engine in self._engines.items() if owner not in self._ledger)

    def _serve(self) -> None:
        """Grant what was kept for one, and then what can be granted, in the order in which it was asked for."""
        for _, engine in list(self._waiting()):
            self._take_over(engine.told)
        free = {use.device.key: use.free_bytes for use in self._ledger.devices()}
        for owner, engine in list(self._waiting()):
            try:
                holds = choose(engine.told, free, self.policy)
            except InsufficientMemory as error:
                engine.why = error.message
                for key in could_use(engine.told, free):
                    free[key] = 0  # kept for this one: who asked later cannot starve it
                continue
            try:
                self._ledger.reserve(owner, Kind.ENGINE, owner, holds)
            except LeaseNotFound:  # silent for too long; `expire` is about to say so
                continue
            engine.why = ""
            for hold in holds:
                free[hold.on] -= hold.amount

    def _turn(self, engine: _Engine, lease: Lease, unheard: Set[str]) -> tuple[bool, str]:
        """Whether it may load, and what it waits for if not."""
        if lease.phase is not Phase.RESERVED:
            return False, ""
        if engine.loads:
            return True, ""
        why = self._moving_beside(lease, unheard) if engine.told.measures else ""
        engine.loads = not why
        return engine.loads, why

    def _moving_beside(self, lease: Lease, unheard: Set[str]) -> str:
        """What else changes what is free on the devices of an engine; empty: nothing."""
        mine = {hold.on for hold in lease.holds}
        for owner, other in self._engines.items():
            loads = other.loads or (owner in unheard and not other.told.kv_tokens)
            if loads and other.told.measures and mine & self._devices(owner):
                return f"{other.told.model} loads on the same device"
        ending = any(one.phase is Phase.ENDING for device in mine for one in self._ledger.on(device))
        return "an engine that has ended still has memory of the same device" if ending else ""

    def _devices(self, owner: str) -> set[str]:
        return {hold.on for hold in self._ledger.lease(owner).holds} if owner in self._ledger else set()

    def _measure(self, engine: _Engine, lease: Lease, now: float) -> None:
        over = False
        for hold, measured in zip(lease.holds, engine.told.measured_bytes, strict=False):
            key = (lease.lease_id, hold.on)
            if measured is not None and measured > hold.amount:
                self._alarms[key] = Alarm(lease.lease_id, engine.told.model, hold.on, hold.amount, measured)
                over = over or measured > hold.amount * (1 + OVER_SHARE)
            else:
                self._alarms.pop(key, None)
                engine.fitted = engine.fitted or (measured is not None and engine.told.kv_tokens > 0)
        if not (over and engine.fitted):
            engine.over_since = None
            return
        engine.over_since = now if engine.over_since is None else engine.over_since
        model, owner = engine.told.model, lease.lease_id
        due = max(engine.over_since + OVER_S, self._restarted.get(model, -inf) + AGAIN_S)
        if now >= due and owner not in self._leaving:
            self._restarted[model] = now
            self._leaving.add(owner)
