"""The quota actor's brain: one ledger, those who hold and those who wait, and what survives the actor's own death.

Events in, answers out; the shell (`serve_app.quota`) has the clock, the cluster and the roster's storage.

Rules
- Whoever speaks to it is alive; whoever is silent for its time to live has left, and what it held is free, an engine's
  memory once that has been seen free. Time in which the actor itself stood still is nobody's silence.
- The roster outlives the actor: engines with what they hold, routers by name, sessions whole. A change of it is to be
  stored before the answer that depends on it is sent (`take_changes`).
- After its own death it begins a new epoch from the roster. Words under an older epoch change nothing; they are told
  the new one, and the speaker says again what it has. Of device memory the roster knows all; of an engine's slots and
  tokens nothing new is granted until every router that may hold some there has spoken, or its time is over. Until then
  routers go by the accounts they have, which is what the ledger holds for them.

Invariant: what the parties may use together, by the last answer each has seen, never exceeds what there is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container

from serve_app.core.memory import (
    BERTH_TTL_S,
    LOADING_TTL_S,
    OWNER_TTL_S,
    Berth,
    Changes,
    Device,
    EngineEntry,
    EngineReply,
    EngineReport,
    Entry,
    Grants,
    Key,
    Kind,
    Lease,
    Ledger,
    Phase,
    Relocation,
    Reserved,
    Roster,
    RouterEntry,
    Session,
    SessionAsk,
    Sessions,
    Starts,
    StartsAsk,
    StartsReply,
    Value,
)
from serve_app.core.shared_queue import Exchange, Lines, Reply
from serve_app.errors import InsufficientMemory, LeaseConflict, LeaseNotFound, Unavailable

RECOVERING = "quota_recovering"  # the code of what has to wait until then
RECOVERY_S = LOADING_TTL_S  # whoever has said nothing by then is not there any more
SILENT_S = 2.0  # two beats: an engine that says nothing for so long is looked for on its machine
STALL_S = 1.5  # three of the shell's ticks: who has not looked for so long cannot say who was silent


class Quota:
    """See the module.

    Args:
        epoch: higher than that of any quota actor before it.
        roster: what the one before has stored.
        now: seconds of the host's monotonic clock.
    """

    def __init__(self, epoch: int, roster: dict[Key, Value], now: float) -> None:
        self.epoch = epoch
        self.ledger = Ledger()
        self.grants = Grants(self.ledger)
        self.relocation = Relocation(self.ledger, self.grants)
        self.sessions = Sessions(self.ledger, epoch, now)
        self.lines = Lines(epoch, self.ledger, self.sessions, self.grants.of)
        self.starts = Starts(self.ledger, self.grants)
        self._roster = Roster(roster)
        self._missing = {name for kind, name in roster if kind in (Entry.ENGINE, Entry.ROUTER)}
        self._recovers_until = now + RECOVERY_S
        self._restored = not roster
        self._ticked_at = now

    # What there is

    def on_devices(self, devices: list[Device], now: float) -> None:
        """All devices of the cluster, as they are now. The first word of it also puts back what the roster knows.

        Raises:
            LeaseConflict: a device has changed its size under what it holds.
        """
        there = {device.key for device in devices}
        known = {use.device.key: use.device for use in self.ledger.devices()}
        for key in known.keys() - there:
            self._ended(self.ledger.remove_device(key), now)
        for device in devices:
            if known.get(device.key, device) == device:
                self.ledger.add_device(device)
            elif not self.ledger.on(device.key):
                self.ledger.remove_device(device.key)
                self.ledger.add_device(device)
            else:
                raise LeaseConflict(f"device {device.key} has other bytes than before, and is in use")
        if not self._restored:
            self._restored = True
            self._restore(now)

    @property
    def recovering(self) -> bool:
        """Whether it is not yet known what everybody holds."""
        return bool(self._missing) or not self._restored

    # Engines

    def on_engine(self, told: EngineReport, now: float) -> EngineReply:
        """An engine's word. Raises as `Grants.report`; the engine then has to end."""
        if not self._restored:
            return EngineReply(told.holds, why="the ledger is being rebuilt")
        self._heard(told.owner)
        if told.gone:
            ended = self.grants.forget(told.owner, memory_gone=True)
            self._ended(ended, now)
            self._roster.forget((Entry.ENGINE, told.owner))
            return EngineReply(why="ended")
        if told.failed:
            self.starts.failed(told.model, told.failed, now)
        unknown = any(map(self._unreadable, self._missing))
        reply = self.grants.report(told, now, frozen=unknown, unheard=self._missing)
        self._remember_engine(told.owner)
        self._open_slots(told, now)
        return reply

    def _open_slots(self, told: EngineReport, now: float) -> None:
        if told.slots and told.owner in self.ledger and self.ledger.lease(told.owner).phase is Phase.COMMITTED:
            self.ledger.open_slots(told.owner, told.slots)
            self.lines.sync([told.owner], now)

    def on_starts(self, ask: StartsAsk, now: float) -> StartsReply:
        """The controller is about to start engines, or would like to; see `core.memory.start_reservations`."""
        if not self._restored:
            return StartsReply()
        return self.starts.ask(ask, now, frozen=self.recovering)

    def on_memory_gone(self, owner: str) -> None:
        """The memory of an engine that has left was seen free."""
        if owner in self.ledger and self.ledger.lease(owner).phase is Phase.ENDING:
            self.ledger.memory_gone(owner)
        self._roster.forget((Entry.ENGINE, owner))

    def silent(self, now: float) -> list[EngineReport]:
        """The last words of engines that are to be looked for on their machines: they have not been heard of for a
        while, or not since this actor came up. Ranks on several GPUs are processes of Ray, which their engine does not
        know and which outlive it by a moment: those engines are given their whole time."""
        found = self.grants.silent(now - SILENT_S)
        missing = [self._roster.get((Entry.ENGINE, name)) for name in self._missing]
        known = {told.owner for told in found}
        found += [one.told for one in missing if isinstance(one, EngineEntry) and one.told.owner not in known]
        return [told for told in found if told.processes and len(told.ranks) == 1]

    def on_dead(self, owner: str, now: float) -> None:
        """An engine's processes were seen gone, and it has said nothing since."""
        if any(told.owner == owner for told in self.silent(now)):
            self._heard(owner)
            self._ended(self.grants.forget(owner, memory_gone=True), now)
            self._roster.forget((Entry.ENGINE, owner))

    def ending(self) -> dict[str, EngineReport | None]:
        """Engines that have left, whose memory has not been seen free, by owner; their last word where it is known."""
        found: dict[str, EngineReport | None] = {}
        for lease in self.ledger.leases(Kind.ENGINE):
            if lease.phase is Phase.ENDING:
                entry = self._roster.get((Entry.ENGINE, lease.lease_id))
                found[lease.lease_id] = entry.told if isinstance(entry, EngineEntry) else None
        return found

    # Routers

    def on_exchange(self, told: Exchange, now: float) -> Reply:
        """A router's message (`core.shared_queue.actor_queue`)."""
        if not self._restored or self.lines.peers.stale(told):
            return self.lines.peers.stale_reply(told)
        self.ledger.join(told.router, OWNER_TTL_S, now)
        if not isinstance(self._roster.get((Entry.ROUTER, told.router)), RouterEntry):
            self._roster.put((Entry.ROUTER, told.router), RouterEntry())
        self.lines.close(self._closed(told.router))  # its first event says what it has
        try:
            reply = self.lines.on_exchange(told, now)
        except Exception:
            self.lines.close(self._closed())
            raise
        self._heard(told.router)
        return reply

    def on_watch(self, told: Exchange, now: float, *, at_last: bool) -> Reply | None:
        """A router waits for news; None: there is none yet. `at_last`: it waits no longer."""
        if not self._restored or self.lines.peers.stale(told):
            return self.lines.peers.stale_reply(told)
        self.ledger.beat(told.router, now)
        return self.lines.on_watch(told, now, at_last=at_last)

    # Sessions

    def on_session(self, ask: SessionAsk, now: float) -> Session | None:
        """Somebody asks for a session; None: it waits. Raises as `Openings.ask`, and Unavailable while it is not known
        what the routers hold: that may be the very tokens."""
        if self.recovering and self.sessions.get(ask.session_id) is None:
            left_s = max(0.0, self._recovers_until - now)
            raise Unavailable("the ledger is being rebuilt", code=RECOVERING, retry_after_s=left_s)
        return self.lines.open_session(ask, now)

    def on_renew(self, session_id: str, now: float) -> Session:
        """Raises LeaseNotFound."""
        return self.sessions.renew(session_id, now)

    def on_close(self, session_id: str, now: float) -> None:
        """Raises LeaseNotFound."""
        self.lines.close_session(session_id, now)

    def on_look(self, session_id: str, now: float) -> Session:
        """A session as it is, without renewing it. Raises LeaseNotFound."""
        return self.sessions.look(session_id, now)

    # Time

    def on_tick(self, now: float) -> None:
        """Time has passed."""
        stood_s, self._ticked_at = now - self._ticked_at, now
        if stood_s > STALL_S:  # what was said meanwhile has yet to be read
            self.ledger.excuse(stood_s)
            self.lines.peers.excuse()
            self._recovers_until += stood_s
        if self._restored and now >= self._recovers_until:
            for name in self._missing:
                if self._unreadable(name):
                    self._roster.forget((Entry.ENGINE, name))
            self._missing.clear()
        waiting = Counter(one.model for one in self.grants.blocked(now))
        self.lines.peers.blocked(tuple(sorted(waiting.items())))
        self.grants.berths.keep_restarts(set(self.grants.owners()), now)
        self.sessions.keep(now, self._closed())
        self._ended(self.ledger.expire(now), now)
        for owner in self.grants.owners():
            if not self.ledger.knows(owner):
                self.grants.lost(owner)
                if owner not in self.ledger:
                    self._roster.forget((Entry.ENGINE, owner))
        routers = [name for (kind, name), _ in self._roster if kind is Entry.ROUTER]
        gone = [name for name in routers if name not in self._missing and not self.ledger.knows(name)]
        if gone:
            self.lines.leave(gone, now)
        for name in gone:
            self._roster.forget((Entry.ROUTER, name))
        if not self._restored:
            return
        self.lines.close(self._closed())
        if not self.recovering:
            self.relocation.step(now)
        self.lines.sync(self.grants.owners(), now)
        self.lines.on_tick(now)

    # The roster

    def unstored(self, name: str = "", kinds: Container[Entry] = tuple(Entry)) -> bool:
        """See `Roster.unstored`."""
        self._collect()
        return self._roster.unstored(name, kinds)

    def take_changes(self) -> Changes:
        """See `Roster.take_changes`."""
        self._collect()
        return self._roster.take_changes()

    def stored(self) -> None:
        """See `Roster.stored`."""
        self._roster.stored()

    def _collect(self) -> None:
        """Put on the roster what has changed elsewhere."""
        for name, berth in self.grants.berths.take_changes().items():
            if berth is None:
                self._roster.forget((Entry.BERTH, name))
            else:
                self._roster.put((Entry.BERTH, name), berth)
        for name, session in self.sessions.take_changes().items():
            if session is None:
                self._roster.forget((Entry.SESSION, name))
            else:
                self._roster.put((Entry.SESSION, name), session)
        for router, engine in self.lines.take_opened():
            known = self._roster.get((Entry.ROUTER, router))
            if isinstance(known, RouterEntry) and engine not in known.engines:
                there = frozenset(name for name in (*known.engines, engine) if name in self.ledger)
                self._roster.put((Entry.ROUTER, router), RouterEntry(there))

    def not_stored(self, changes: Changes) -> None:
        """See `Roster.not_stored`."""
        self._roster.not_stored(changes)

    def _remember_engine(self, owner: str) -> None:
        """What would have to be known of it after a crash; not what changes every second."""
        told = self.grants.told(owner)
        if told is None or owner not in self.ledger:
            return
        holds = self.ledger.lease(owner).holds
        entry = EngineReport(
            owner,
            told.model,
            told.ranks,
            told.wanted_bytes,
            told.least_bytes,
            holds,
            told.kv_tokens,
            told.kv_bytes,
            (),
            told.processes,
            slots=told.slots,
        )
        self._roster.put((Entry.ENGINE, owner), EngineEntry(entry))

    def _restore(self, now: float) -> None:
        """Put back what the roster knows; what does not fit any more is gone with its node."""
        self._recovers_until = now + RECOVERY_S  # until now nobody could be heard
        for (kind, name), value in self._roster:
            if kind is Entry.ENGINE and isinstance(value, EngineEntry):
                try:
                    self.grants.report(value.told, now, unheard=self._missing)
                    self.ledger.join(name, LOADING_TTL_S, now)
                    self._open_slots(value.told, now)
                except (LeaseNotFound, LeaseConflict, InsufficientMemory):
                    self._roster.forget((kind, name))
                    self._heard(name)  # it is gone with its device, and not waited for
            elif kind is Entry.ROUTER:
                self.ledger.join(name, RECOVERY_S, now)
        for (kind, name), value in self._roster:
            if kind is Entry.BERTH and isinstance(value, Berth):
                try:
                    self.grants.berths.restore(value, now, RECOVERY_S + BERTH_TTL_S)
                except (LeaseNotFound, LeaseConflict, InsufficientMemory):
                    self._roster.forget((kind, name))  # gone with its device, or an engine has it by now
        for (kind, name), value in self._roster:
            if kind is Entry.SESSION and isinstance(value, Reserved):
                try:
                    self.sessions.restore(value, now)
                except (LeaseNotFound, LeaseConflict, InsufficientMemory):
                    self._roster.forget((kind, name))

    def _heard(self, name: str) -> None:
        self._missing.discard(name)

    def _unreadable(self, name: str) -> bool:
        """Whether this is an engine of which it is not known what it holds."""
        return (Entry.ENGINE, name) in self._roster and self._roster.get((Entry.ENGINE, name)) is None

    def _closed(self, heard: str = "") -> frozenset[str]:
        """Engines where a router other than this one may hold something, and has not spoken since the actor came up."""
        found: set[str] = set()
        for name in self._missing - {heard}:
            if (Entry.ROUTER, name) in self._roster:
                entry = self._roster.get((Entry.ROUTER, name))
                found.update(entry.engines if isinstance(entry, RouterEntry) else self.grants.owners())
        return frozenset(found)

    def _ended(self, ended: list[Lease], now: float) -> None:
        """Leases have ended by themselves; whoever kept count of them is told."""
        for lease in reversed(ended):  # an engine before what lay on it
            if lease.kind is Kind.ENGINE:
                self.lines.drop_engine(lease.lease_id, now)
                self.grants.lost(lease.lease_id)
                if lease.lease_id not in self.ledger:  # gone with its node
                    self._roster.forget((Entry.ENGINE, lease.lease_id))
            elif lease.kind is Kind.BERTH:
                self.grants.berths.forget(lease.lease_id)
            elif lease.kind is Kind.SESSION:
                self.lines.session_ended(lease.lease_id, lease.holds[0].on, now)
