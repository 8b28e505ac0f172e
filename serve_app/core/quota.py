"""The core of the quota actor: ledger, engine grants, queues, sessions, and the checkpoint that survives the actor.

Events in, answers out; the shell (`serve_app.quota`) has the clock, the cluster and the checkpoint's storage.

Rules
- Every message is a heartbeat. An owner without a message for its time to live has left, and its leases end; so has a
  silent router whose process was observed gone. An engine's memory is free once that has been observed. Time in which
  the actor itself stood still does not count.
- The checkpoint outlives the actor: engines with their holds, routers by name, sessions in full. A change is stored
  before the answer that depends on it is sent (`changes`).
- After a crash the actor begins a new epoch from the checkpoint. Messages of an older epoch change nothing; the reply
  has the new epoch, and the sender reports its full state. The checkpoint has all device memory. Of an engine's slots
  and tokens nothing is granted until every router that may hold part of it has reported, or its time is over; until
  then routers use the accounts they have.

Invariant: the sum of what all parties may use, by the last answer each has received, never exceeds what exists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import replace

from serve_app.core.batches import ModelFigures
from serve_app.core.claims import ClaimBook, ClaimReply, ClaimReport, ClaimRequest, ClaimVerdict, Generation
from serve_app.core.limits import ActorLimits
from serve_app.core.memory import (
    Checkpoint,
    CheckpointChanges,
    CheckpointKey,
    Device,
    DrainRequest,
    EngineGrants,
    EngineReply,
    EngineReport,
    EntryKind,
    Lease,
    LeaseKind,
    Ledger,
    NodeProcesses,
    Phase,
    Relocation,
    Reservation,
    Session,
    SessionEntry,
    SessionLeases,
    SessionRequest,
    StartPlanner,
    StartsReply,
    StartsRequest,
)
from serve_app.core.shared_queue import ActorQueue, ActorReply, RouterMessage
from serve_app.core.times import (
    ACTOR_STALL_S,
    ENGINE_SILENT_S,
    LOADING_TTL_S,
    OWNER_TTL_S,
    RECOVERY_S,
    RESERVATION_TTL_S,
    ROUTER_SILENT_S,
)
from serve_app.errors import InsufficientMemory, LeaseConflict, LeaseNotFound, ServeAppError, Unavailable
from serve_app.types import RequestClass

RECOVERING = "quota_recovering"  # error code of requests refused until then


class Quota:
    """See the module.

    Args:
        epoch: higher than that of any earlier quota actor.
        checkpoint: as stored by the earlier actor.
        now: seconds of the host's monotonic clock.
    """

    def __init__(self, epoch: int, checkpoint: dict[CheckpointKey, object], now: float) -> None:
        self.epoch = epoch
        self.ledger = Ledger()
        self.checkpoint = Checkpoint(checkpoint)
        self.grants = EngineGrants(self.ledger, self.checkpoint)
        self.relocation = Relocation(self.ledger, self.grants)
        self.sessions = SessionLeases(self.ledger, self.checkpoint, epoch, now)
        self.claims = ClaimBook(epoch, (name for kind, name in checkpoint if kind is EntryKind.ROUTER), now)
        self._unreported = {name for kind, name in checkpoint if kind in (EntryKind.ENGINE, EntryKind.ROUTER)}
        is_recovering = bool(self._unreported_routers())
        self.queue = ActorQueue(
            epoch,
            self.ledger,
            self.sessions,
            self.grants,
            lambda to, scope: ActorLimits(
                epoch, to.send, lambda: len(to.by_router), now, is_recovering=is_recovering, run=scope.run
            ),
        )
        self.starts = StartPlanner(self.ledger, self.grants)
        self._recovers_until = now + RECOVERY_S
        self._restored = not checkpoint
        self._ticked_at = now

    # Devices

    def on_devices(self, devices: list[Device], now: float) -> None:
        """Set all devices of the cluster. The first call also restores the checkpoint.

        Raises:
            LeaseConflict: a device with leases has changed its size.
        """
        for key in {use.device.key for use in self.ledger.devices()} - {device.key for device in devices}:
            self._on_leases_ended(self.ledger.remove_device(key), now)
        for device in devices:
            self.ledger.add_device(device)
        if not self._restored:
            self._restored = True
            self._restore(now)
        _, by_node = self.relocation.fragmentation()
        fragmentation = tuple((node, round(by_node[node], 2)) for node in sorted(by_node))
        self.queue.router_sessions.set_state(self.queue.router_sessions.state._replace(fragmentation=fragmentation))

    @property
    def fragmentation_by_node(self) -> dict[str, float]:
        """As the routers know it."""
        return dict(self.queue.router_sessions.state.fragmentation)

    @property
    def recovering(self) -> bool:
        """Whether some holdings are not known yet after a restart."""
        return bool(self._unreported) or not self._restored

    # Engines

    def on_engine(self, report: EngineReport, now: float) -> EngineReply:
        """Process an engine's report. Raises as `EngineGrants.report`; the engine must end then."""
        return self.on_engines([report], now)[0]

    def on_engines(self, reports: Sequence[EngineReport], now: float) -> list[EngineReply]:
        """Process reports of several engines in one event of the queues. Raises as `on_engine`; the reports before the
        one that is wrong are processed, and the next tick of the queues follows them."""
        replies = [self._on_report(report, now) for report in reports]
        opened = [report.owner for report in reports if not report.gone and self._open_pool(report)]
        if opened:
            self.queue.sync_engines(opened, now)
        return replies

    def _on_report(self, report: EngineReport, now: float) -> EngineReply:
        owner = report.owner
        if not self._restored:
            return EngineReply(report.holds, why="the ledger is being rebuilt")
        self._unreported.discard(owner)
        if report.gone:
            self._on_leases_ended(self.grants.forget(owner, memory_gone=True), now)
            self.checkpoint.forget((EntryKind.ENGINE, owner))
            self.grants.drains.on_ended(owner, now, report.drain)
            return EngineReply(why="ended")
        try:
            reply = self.grants.report(report, now, frozen=bool(self._unreadable()), unreported=self._unreported)
        except ServeAppError:
            if owner not in self.ledger:
                self.checkpoint.forget((EntryKind.ENGINE, owner))  # an unreadable entry
            raise
        if owner in self.ledger:  # stored without what changes every second
            holds = self.ledger.lease(owner).holds
            lasting = replace(
                report, holds=holds, measured_bytes=(), loading=False, measures=True, failed="", start=None, drain=None
            )
            self.checkpoint.put((EntryKind.ENGINE, owner), lasting)
        return reply

    def _open_pool(self, report: EngineReport) -> bool:
        """Open the pool of an engine, or set its slots; False: it does not run, or has no slots."""
        owner = report.owner
        if not report.slots or owner not in self.ledger or self.ledger.phase(owner) is not Phase.COMMITTED:
            return False
        self.ledger.open_pool(owner, report.slots)
        return True

    def drain(self, request: DrainRequest, now: float) -> None:
        """Drain an engine for an operator. Raises LeaseNotFound."""
        self.grants.drain(request.replica, "serve-app drain", now, request.within_s)
        self.queue.draining_engines = frozenset(self.grants.drains.active())
        self.queue.on_tick(now)

    def on_starts(self, ask: StartsRequest, now: float) -> StartsReply:
        """Plan the starts that the controller requests; see `core.memory.start_reservations`."""
        if not self._restored:
            return StartsReply()
        return self.starts.plan(ask, now, frozen=self.recovering)

    def silent_engines(self, now: float) -> list[EngineReport]:
        """The last reports of engines whose processes must be checked: no report for `ENGINE_SILENT_S`, or none
        since this actor started. Engines with several ranks are left out: their ranks are Ray processes unknown to the
        engine that outlive it by a moment, so only the time to live ends them."""
        entries = (self.checkpoint.get((EntryKind.ENGINE, name)) for name in self._unreported)
        found = {entry.owner: entry for entry in entries if isinstance(entry, EngineReport)}
        found |= {report.owner: report for report in self.grants.silent(now - ENGINE_SILENT_S)}
        return [report for report in found.values() if report.processes and len(report.ranks) == 1]

    def on_processes_gone(self, owner: str, now: float) -> None:
        """An engine's processes were observed gone: if it is silent or has ended, its memory is free."""
        if any(report.owner == owner for report in self.silent_engines(now)):
            self._unreported.discard(owner)
            self.grants.on_crash(owner, now)
            self._on_leases_ended(self.grants.forget(owner, memory_gone=True), now)
        elif owner in self.ledger:
            if self.ledger.phase(owner) is not Phase.ENDING:
                return  # it has reported since
            self.ledger.end(owner)
        self.checkpoint.forget((EntryKind.ENGINE, owner))

    def ending_engines(self) -> dict[str, EngineReport | None]:
        """Ended engines whose memory was not observed free yet, by owner, with the last report if known."""
        found: dict[str, EngineReport | None] = {}
        for lease in self.ledger.leases(LeaseKind.ENGINE, Phase.ENDING):
            entry = self.checkpoint.get((EntryKind.ENGINE, lease.lease_id))
            found[lease.lease_id] = entry if isinstance(entry, EngineReport) else None
        return found

    # Routers

    def on_exchange(self, message: RouterMessage, now: float) -> ActorReply:
        """Process a router's message (`core.shared_queue.actor_queue`)."""
        if not self._restored or self.queue.router_sessions.is_stale(message):
            return self.queue.router_sessions.stale_reply(message)
        self.ledger.join(message.router, OWNER_TTL_S, now)
        if self.checkpoint.get((EntryKind.ROUTER, message.router)) is None:
            self.checkpoint.put((EntryKind.ROUTER, message.router), frozenset())
        self.queue.closed_engines = self._closed_engines(message.router)  # its first event reports its accounts
        try:
            reply = self.queue.on_exchange(message, now)
        except Exception:
            self.queue.closed_engines = self._closed_engines()
            raise
        self._unreported.discard(message.router)
        self._end_recovery_of_limits(now, is_complete=True)
        return reply

    def on_watch(self, message: RouterMessage, now: float, *, timed_out: bool) -> ActorReply | None:
        """Answer a router's watch message; None: nothing new yet. `timed_out`: answer anyway."""
        if not self._restored or self.queue.router_sessions.is_stale(message):
            return self.queue.router_sessions.stale_reply(message)
        if not timed_out:  # else it was counted when it came
            self.ledger.heartbeat(message.router, now)
        return self.queue.router_sessions.on_watch(message, timed_out=timed_out)

    def model_figures(self) -> dict[str, ModelFigures]:
        """The figures of each model's queue. O(engines + requests granted there).

        While requests wait, routers keep no credit, and what their accounts hold is in use. Else what is in use is
        known from the routers' last reports.
        """
        found = {}
        for model, state in self.queue.models.by_name.items():
            is_contended = model in self.queue.router_sessions.state.contended
            slots = busy = 0
            for engine in state.engines:
                pool = self.ledger.pool(engine)
                if pool is None or not state.is_open(engine):
                    continue
                booked = pool.slots - pool.free_slots
                slots += pool.slots
                used = max(state.granted_slots(engine), self.queue.accounts.in_use(engine)[0])
                busy += booked if is_contended else min(booked, used)
            waiting = [one.slots for one in state.admission.queue.class_queues]
            found[model] = ModelFigures(slots, busy, sum(waiting), waiting[RequestClass.LOW])
        return found

    def silent_routers(self, now: float) -> dict[str, NodeProcesses]:
        """Routers without a message for `ROUTER_SILENT_S`, with their processes."""
        since = now - ROUTER_SILENT_S
        knows = self.ledger.knows
        processes = self.queue.processes.items()
        return {name: one for name, one in processes if knows(name) and self.ledger.last_seen(name) <= since}

    def on_router_gone(self, router: str, now: float) -> None:
        """The process of a router was observed gone: if the router is silent, it has left."""
        if router in self.silent_routers(now):
            self._on_leases_ended(self.ledger.leave(router), now)
            self.on_tick(now)

    # Requests with an Idempotency-Key

    def on_claim(self, asked: ClaimRequest, now: float) -> ClaimReply:
        """See `core.claims.book`."""
        if not self._restored:
            return ClaimReply(ClaimVerdict.WAIT)
        return self.claims.on_claim(asked, now, self.ledger.knows)

    def on_claim_report(self, report: ClaimReport, now: float) -> Generation | None:
        """See `core.claims.book`."""
        return self.claims.on_report(report, now, self.ledger.knows) if self._restored else None

    # Sessions

    def on_open_session(self, ask: SessionRequest, now: float) -> Session | None:
        """Open a session; None: it waits. Raises as `SessionAdmission.open_session`, and Unavailable during recovery:
        routers may hold the same tokens."""
        if self.recovering and ask.session_id not in self.sessions.by_session_id:
            left_s = max(0.0, self._recovers_until - now)
            raise Unavailable("the ledger is being rebuilt", code=RECOVERING, retry_after_s=left_s)
        return self.queue.open_session(ask, now)

    # Time

    def on_tick(self, now: float) -> None:
        """Expire owners and leases, end recovery when due, and run the queues."""
        stood_s, self._ticked_at = now - self._ticked_at, now
        if stood_s > ACTOR_STALL_S:  # messages of that time are still unread
            self.ledger.extend(stood_s)
            self.queue.router_sessions.extend()
            self._recovers_until += stood_s
            self.claims.extend(stood_s)
        if self._restored and now >= self._recovers_until:
            for key in self._unreadable():
                self.checkpoint.forget(key)
            is_complete = not self._unreported_routers()
            self._unreported.clear()
            self._end_recovery_of_limits(now, is_complete=is_complete)
        blocked = dict(Counter(one.model for one in self.grants.blocked(now)))
        self.queue.router_sessions.set_state(self.queue.router_sessions.state._replace(blocked=blocked))
        self.grants.reservations.keep_restarts(set(self.grants.owners()), now)
        self.sessions.renew_in_use(now, self._closed_engines(), self.queue.used_sessions)
        self._on_leases_ended(self.ledger.expire(now), now)
        for owner in self.grants.owners():
            if not self.ledger.knows(owner):
                self.grants.lease_lost(owner)
                if owner not in self.ledger:
                    self.checkpoint.forget((EntryKind.ENGINE, owner))
        routers = [name for (kind, name), _ in self.checkpoint if kind is EntryKind.ROUTER]
        gone = [name for name in routers if name not in self._unreported and not self.ledger.knows(name)]
        if gone:
            self.queue.remove_routers(gone, now)
        for name in gone:
            self.checkpoint.forget((EntryKind.ROUTER, name))
            self.claims.on_router_gone(name, now)
        self.claims.on_tick(now)
        if not self._restored:
            return
        self.queue.closed_engines = self._closed_engines()
        if not self.recovering:
            self.relocation.step(now)
        self.grants.drains.keep(set(self.grants.owners()), now)
        self.queue.draining_engines = frozenset(self.grants.drains.active())
        self.queue.sync_engines(self.grants.owners(), now)
        self.queue.on_tick(now)

    def _unreported_routers(self) -> list[str]:
        return [name for name in self._unreported if (EntryKind.ROUTER, name) in self.checkpoint]

    def _end_recovery_of_limits(self, now: float, *, is_complete: bool) -> None:
        """Routers are charged again once all that may hold credit have reported; engines hold none."""
        if self.queue.limits.is_recovering and not self._unreported_routers():
            self.queue.limits.on_recovered(now, is_complete=is_complete)

    # Checkpoint

    def unstored(self, name: str = "", kinds: Container[EntryKind] = tuple(EntryKind)) -> bool:
        """See `Checkpoint.unstored`."""
        self._collect_accounts()
        return self.checkpoint.unstored(name, kinds)

    def changes(self) -> CheckpointChanges:
        """See `Checkpoint.changes`."""
        self._collect_accounts()
        return self.checkpoint.changes()

    def _collect_accounts(self) -> None:
        """Add accounts opened since the last call, those of sessions included, to the checkpoint."""
        for router, pool in self.queue.accounts.take_opened():
            engine = self.sessions.by_lease[pool].engine if pool in self.sessions.by_lease else pool
            known = self.checkpoint.get((EntryKind.ROUTER, router))
            if isinstance(known, frozenset) and engine not in known:
                existing = frozenset(name for name in (*known, engine) if name in self.ledger)
                self.checkpoint.put((EntryKind.ROUTER, router), existing)

    def _restore(self, now: float) -> None:
        """Restore the checkpoint; entries that do not fit are gone with their nodes, or taken by an engine."""
        self._recovers_until = now + RECOVERY_S  # no message could be processed before
        order = list(EntryKind)
        for (kind, name), value in sorted(self.checkpoint, key=lambda entry: order.index(entry[0][0])):
            try:
                match value:
                    case EngineReport():
                        self.grants.report(value, now, unreported=self._unreported)
                        self.ledger.join(name, LOADING_TTL_S, now)
                        if self._open_pool(value):
                            self.queue.sync_engines([name], now)
                    case Reservation():
                        self.grants.reservations.restore(value, now, RECOVERY_S + RESERVATION_TTL_S)
                    case SessionEntry():
                        self.sessions.restore(value, now)
                    case _ if kind is EntryKind.ROUTER:
                        self.ledger.join(name, RECOVERY_S, now)
            except (LeaseNotFound, LeaseConflict, InsufficientMemory):
                self.checkpoint.forget((kind, name))
                self._unreported.discard(name)  # recovery does not wait for it
        self.queue.closed_engines = self._closed_engines()  # before any event: closed sessions may be in use there

    def _unreadable(self) -> list[CheckpointKey]:
        """The checkpoint keys of engines without a report whose entries could not be read."""
        keys = [(EntryKind.ENGINE, name) for name in self._unreported]
        return [key for key in keys if key in self.checkpoint and self.checkpoint.get(key) is None]

    def _closed_engines(self, speaker: str = "") -> frozenset[str]:
        """Engines that a router other than `speaker` may hold part of, without a report since the actor's start."""
        found: set[str] = set()
        for name in self._unreported - {speaker}:
            if (EntryKind.ROUTER, name) in self.checkpoint:
                entry = self.checkpoint.get((EntryKind.ROUTER, name))
                found.update(entry if isinstance(entry, frozenset) else self.grants.owners())
        return frozenset(found)

    def _on_leases_ended(self, ended: list[Lease], now: float) -> None:
        """Leases have expired or ended with a device: update queues, grants, reservations and checkpoint."""
        for lease in reversed(ended):  # an engine before the leases on it
            if lease.kind is LeaseKind.ENGINE:
                self.queue.drop_engine(lease.lease_id, now)
                self.grants.on_crash(lease.lease_id, now)
                self.grants.lease_lost(lease.lease_id)
                if lease.lease_id not in self.ledger:  # gone with its node
                    self.checkpoint.forget((EntryKind.ENGINE, lease.lease_id))
            elif lease.kind is LeaseKind.RESERVATION:
                self.grants.reservations.end(lease.lease_id)
            elif lease.kind is LeaseKind.SESSION:
                self.queue.session_ended(lease.lease_id, now)
