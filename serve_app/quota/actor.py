"""The quota actor: one named, detached actor that grants the cluster's GPU memory (`core.quota` decides).

It runs on the head node, requests no CPU, and Ray restarts it whenever it dies. Its state is stored in the GCS before
an answer that depends on it is sent, so a received answer is never lost. Other answers do not wait for storage.

Invariant: every public method answers from the core alone; no call waits for slow work such as queries of other nodes.
Invariant: while the GCS is away, a call whose answer needs it fails within `GCS_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from serve_app.core.batches import ModelFigures
from serve_app.core.claims import ClaimReply, ClaimReport, ClaimRequest, Generation
from serve_app.core.live import QuotaPart
from serve_app.core.memory import (
    CheckpointChanges,
    Device,
    DrainRequest,
    EngineReply,
    EngineReport,
    EntryKind,
    Session,
    SessionRequest,
    StartsReply,
    StartsRequest,
)
from serve_app.core.quota import Quota
from serve_app.core.shared_queue import ActorReply, RouterMessage
from serve_app.core.times import (
    ACTOR_TICK_S,
    FIRST_LOOK_S,
    GCS_S,
    NODE_LOOK_S,
    ROUTER_HEARTBEAT_S,
    UNRESPONSIVE_S,
    WATCH_S,
)
from serve_app.errors import ServeAppError, Unavailable
from serve_app.quota.gcs_wait import bounded_wait
from serve_app.quota.inventory import Inventory
from serve_app.quota.kv_store import EPOCH, INVENTORY, NODE, GcsStore, Unreadable, checkpoint_entries
from serve_app.quota.limit_use import LimitUse
from serve_app.quota.live import LiveRequest, live_part
from serve_app.quota.process_checks import ProcessChecks
from serve_app.quota.report import ModelFiguresRequest, figures, fragmentation_bound
from serve_app.ray_adapter import end_on_sigterm, freeze_heap, restart_as, session_folder
from serve_app.settings import QuotaSettings
from serve_app.system import EventKind, event, keep_events, set_up_log

logger = logging.getLogger("ray.serve")


T = TypeVar("T")


class GpuMemoryQuota:
    """Actor class; see the module.

    Args:
        settings: what counts as a device, and when defragmentation starts automatically.
    """

    async def __init__(self, settings: QuotaSettings) -> None:  # type: ignore[misc]  # Ray awaits it
        end_on_sigterm()
        set_up_log("quota")
        keep_events(session_folder(), f"quota-{os.getpid()}")
        self._kv_store = GcsStore()
        stored = await _retry_until_done(self._kv_store.load_all)
        # an actor that fails on an entry would fail on every restart
        unreadable = [name for name, value in stored.items() if isinstance(value, Unreadable)]
        for name in unreadable:
            logger.warning(
                "Quota actor cannot read the stored entry %r and puts it aside; grants wait for its holder: %r",
                name,
                stored[name],
            )
            await _retry_until_done(partial(self._kv_store.quarantine, name))
        # an unreadable epoch was below the seconds since 1970
        epoch = 1 + (int(time.time()) if isinstance(stored.get(EPOCH), Unreadable) else stored.get(EPOCH, 0))
        await _retry_until_done(lambda: self._kv_store.put(EPOCH, epoch))
        entries = dict(checkpoint_entries(stored))
        self.core = Quota(epoch, entries, time.monotonic())
        self._set_clock()
        self.limit_use = LimitUse(self.core.queue.limits, self._after_queue_event)
        self._nodes = {name: stored[name] for name in stored if name.startswith(NODE) and name not in unreadable}
        before = {name.removeprefix(NODE): devices for name, devices in self._nodes.items()}
        self._inventory = Inventory(settings, before)
        self._process_checks = ProcessChecks(
            self.core, self._inventory.gone, self._inventory.end_orphans, self._run_event
        )
        self._defrag_above = settings.defrag_above
        self._news: dict[str, asyncio.Event] = {}  # by watching router
        self._calls: Counter[str] = Counter()  # of routers, since the actor began
        self.queue_timer: asyncio.TimerHandle | None = None  # the next tick of the queues
        self.session_waiters: dict[str, asyncio.Future[Session]] = {}  # pending openings, by session
        self._acknowledgement = asyncio.Event()  # set after every event
        self._alarmed: set[tuple[str, str]] = set()  # by engine and device
        self._fragmented: set[str] = set()  # nodes
        self._writing: asyncio.Task[None] | None = None
        self.devices_known = asyncio.Event()  # set once the core has the devices
        if self._nodes and stored.get(INVENTORY) == settings:  # first callers need not wait for the nodes
            self.core.on_devices([device for devices in before.values() for device in devices], time.monotonic())
            self.devices_known.set()
        await _retry_until_done(lambda: self._kv_store.put(INVENTORY, settings))
        freeze_heap()
        self.tasks = [
            asyncio.create_task(self._follow_time()),
            asyncio.create_task(self._follow_devices()),
            asyncio.create_task(self._process_checks.follow_routers()),
        ]
        logger.info("Quota actor started with epoch %d and %d checkpoint entries", epoch, len(entries))
        extra = event(EventKind.HEALTH, "quota_actor", epoch=epoch)
        if epoch > 1:
            logger.warning("Quota actor was lost and is back with epoch %d", epoch, extra=extra)

    async def upgrade(self, release: str) -> None:
        """See `HeadActor`."""
        restart_as(release)

    async def engine(self, report: EngineReport) -> EngineReply:
        """Process an engine's report; see `core.memory.engine_grants`. Raises LeaseConflict: the engine must end."""
        await self._know_devices()
        return await self._run_event(lambda now: self.core.on_engine(report, now), report.owner)

    async def starts(self, asks: tuple[StartsRequest, ...]) -> tuple[StartsReply, ...]:
        """Place the replicas that Serve starts; see `core.memory.start_reservations`. One reply per request."""
        await self._know_devices()
        return await self._run_event(
            lambda now: tuple(self.core.on_starts(ask, now) for ask in asks), "", EntryKind.RESERVATION
        )

    async def devices(self) -> dict[str, tuple[int, int]]:
        """Total bytes and bytes available to leases, by device key."""
        await self._know_devices()
        found = (use.device for use in self.core.ledger.devices())
        return {device.key: (device.total_bytes, device.capacity_bytes) for device in found}

    async def exchange(
        self, message: RouterMessage | ClaimRequest | ClaimReport | ModelFiguresRequest | LiveRequest | DrainRequest
    ) -> ActorReply | ClaimReply | Generation | dict[str, ModelFigures] | QuotaPart | None:
        """Process a router's message; see `core.shared_queue.delivery`, and `core.claims` for requests with a key. Or
        answer a batch worker or a router with consoles, or drain an engine (raises LeaseNotFound: it is not known). One
        method for all: after an upgrade, handles still have the methods of the release that made the actor.
        """
        if isinstance(message, ClaimRequest):
            return self.core.on_claim(message, time.monotonic())
        if isinstance(message, ClaimReport):
            return self.core.on_claim_report(message, time.monotonic())
        if isinstance(message, ModelFiguresRequest):
            return self.core.model_figures()
        if isinstance(message, LiveRequest):
            return live_part(self.core, time.monotonic(), message.tenants, self._defrag_above)
        if isinstance(message, DrainRequest):
            return await self._run_event(partial(self.core.drain, message))
        self._calls["exchange"] += 1
        await self._know_devices()
        return await self._run_event(lambda now: self.core.on_exchange(message, now), message.router, EntryKind.SESSION)

    async def waits(self) -> dict[str, str]:
        """What each request waits for that waits in a queue here, by its ticket."""
        return self.core.queue.models.waits()

    async def watch(self, message: RouterMessage) -> ActorReply:
        """Long poll of a router for later actions: returns once there are any, or when the router would else be silent
        for longer than `WATCH_S`."""
        self._calls["watch"] += 1
        await self._know_devices()
        news = self._news.setdefault(message.router, asyncio.Event())
        news.clear()
        reply = await self._run_event(
            lambda now: self.core.on_watch(message, now, timed_out=False), message.router, EntryKind.SESSION
        )
        if reply is not None:
            return reply
        began = time.monotonic()
        while not news.is_set() and (left_s := self._watch_until(message.router, began) - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await news.wait()
        message = message._replace(resend=False)  # done by the first call
        reply = await self._run_event(
            lambda now: self.core.on_watch(message, now, timed_out=True), message.router, EntryKind.SESSION
        )
        return reply or self.core.queue.router_sessions.stale_reply(message)

    def _watch_until(self, router: str, began: float) -> float:
        """When a router's watch call that began then is answered without news: its next watch call is its next message.
        Other messages put that off, for `ROUTER_HEARTBEAT_S` at most."""
        ledger = self.core.ledger
        last_seen = ledger.last_seen(router) if ledger.knows(router) else began
        return min(max(last_seen, began), began + ROUTER_HEARTBEAT_S) + WATCH_S

    def _after_queue_event(self) -> None:
        """After an event: deliver session outcomes, wake routers with new actions and set the queue timer."""
        self._acknowledgement.set()
        for name, outcome in self.core.queue.session_admission.take_outcomes().items():
            self._resolve_session(name, outcome)
        self._ask_store()
        for note in self.core.queue.take_notes():
            logger.error(
                "Quota actor found an error in its queue and ended what it concerned. Report this message: %s", note
            )
        for router in self.core.queue.router_sessions.take_woken():
            news = self._news.get(router)
            if news is not None:
                news.set()
        if self.queue_timer is not None:
            self.queue_timer.cancel()
            self.queue_timer = None
        due = self.core.queue.next_due()
        if due is not None:
            delay_s = max(0.0, due - time.monotonic())
            self.queue_timer = asyncio.get_running_loop().call_later(delay_s, self._on_queue_timer)

    def _ask_store(self) -> None:
        """Ask the store for what was used of quotas that have come up."""
        queue = self.core.queue
        if queue.store is not None:
            self.limit_use.ask(queue.store)

    def _on_queue_timer(self) -> None:
        self.queue_timer = None
        try:
            self.core.queue.on_tick(time.monotonic())
        finally:
            self._after_queue_event()

    async def open_session(self, ask: SessionRequest) -> Session:
        """Reserve KV tokens; waits until `ask.wait_until`. That and `expires_at` of returned sessions are seconds from
        now, because clocks of two machines differ. When this returns, every responsive router knows the session.

        Raises:
            BadRequest, InsufficientMemory, LeaseConflict, Overloaded, Unavailable: see
            `core.shared_queue.session_admission`.
        """
        await self._know_devices()
        wait_s = ask.wait_until
        name = ask.session_id
        ask = dataclasses.replace(ask, wait_until=None if wait_s is None else time.monotonic() + wait_s)
        # also set while this call waits for storage
        future = self.session_waiters.setdefault(name, asyncio.get_running_loop().create_future())
        try:
            session = await self._run_event(lambda now: self.core.on_open_session(ask, now), "", EntryKind.SESSION)
        except ServeAppError as error:
            self._resolve_session(name, error)  # ends the wait of other callers of the same session
            raise
        if session is None:
            session = await asyncio.shield(future)
            await self._run_event(lambda now: None, "", EntryKind.SESSION)
        else:
            self._resolve_session(name, session)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UNRESPONSIVE_S):
                is_acknowledged = self.core.queue.router_sessions.acknowledgement_check()
                while not is_acknowledged():
                    self._acknowledgement.clear()
                    await self._acknowledgement.wait()
        return session.relative_to(time.monotonic())

    def _resolve_session(self, name: str, outcome: Session | ServeAppError) -> None:
        """Deliver the outcome of an opening to its waiting callers."""
        waiter = self.session_waiters.pop(name, None)
        if waiter is None or waiter.done():
            return
        if isinstance(outcome, Session):
            waiter.set_result(outcome)
        else:
            waiter.set_exception(outcome)
            waiter.exception()  # mark as retrieved: its caller may be gone

    async def renew_session(self, session_id: str) -> Session:
        """Raises LeaseNotFound."""
        await self._know_devices()
        session = await self._run_event(lambda now: self.core.sessions.renew(session_id, now))
        return session.relative_to(time.monotonic())

    async def look_session(self, session_id: str) -> Session:
        """Raises LeaseNotFound."""
        await self._know_devices()
        session = await self._run_event(lambda now: self.core.sessions.view(session_id))
        return session.relative_to(time.monotonic())

    async def close_session(self, session_id: str) -> None:
        """Raises LeaseNotFound."""
        await self._know_devices()
        await self._run_event(lambda now: self.core.queue.close_session(session_id, now), "", EntryKind.SESSION)
        self._resolve_session(session_id, Unavailable("the session was closed while it waited", code="session_closed"))

    async def defrag(self, begin: bool) -> dict[str, Any] | None:
        """The plan to fit the first waiting engine; None: no plan helps. `begin`: carry it out."""
        await self._know_devices()
        plan = self.core.relocation.plan(time.monotonic())
        if begin and plan is not None:
            self.core.relocation.begin()
        return None if plan is None else dataclasses.asdict(plan)

    async def figures(self) -> dict[str, Any]:
        """The report for `serve-app quota` and GET /admin/quota."""
        return figures(self.core, time.monotonic(), self._defrag_above) | {"router_calls": dict(self._calls)}

    async def _know_devices(self) -> None:
        """Return once the devices are known. Raises Unavailable."""
        if not self.devices_known.is_set():
            async with bounded_wait("the devices of the nodes", FIRST_LOOK_S):
                await self.devices_known.wait()

    async def _run_event(self, act: Callable[[float], T], name: str = "", *kinds: EntryKind) -> T:
        """Run one event of the core. Returns after the checkpoint entries that the answer depends on are stored: those
        of this name (the sender's), and all of these kinds. Raises Unavailable: the GCS has not stored them in time;
        the event has happened, and they are stored later."""
        try:
            return act(time.monotonic())
        finally:
            self._after_queue_event()
            if self.core.unstored(name, kinds):
                async with bounded_wait("its state to be stored", GCS_S):
                    while (writing := self._store()) is not None and self.core.unstored(name, kinds):
                        await asyncio.shield(writing)  # writes go on, in their order
            self._store()

    def _store(self) -> asyncio.Task[None] | None:
        """Store changes, one batch at a time; returns the task that does it, None: there are no changes."""
        if not self.core.unstored():
            return None
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write(), name="storing")
            self._writing.add_done_callback(_log_failed_write)
        return self._writing

    async def _write(self) -> None:
        changes = self.core.changes()
        await asyncio.to_thread(self._put, changes)
        self.core.checkpoint.stored(changes)

    def _put(self, changes: CheckpointChanges) -> None:
        for (kind, name), (keep, value) in changes.items():
            if keep:
                self._kv_store.put(f"{kind}:{name}", value)
            else:
                self._kv_store.delete(f"{kind}:{name}")

    async def _follow_time(self) -> None:
        """Run what is due, twice a second."""
        while True:
            await asyncio.sleep(ACTOR_TICK_S)
            try:
                relocation = self.core.relocation
                above = self._defrag_above
                if above is not None and not relocation.active and relocation.fragmentation()[0] > above:
                    relocation.begin()
                self._set_clock()
                self.core.on_tick(time.monotonic())
                for router in [name for name in self._news if not self.core.ledger.knows(name)]:
                    del self._news[router]
                self._after_queue_event()
                self._warn()
                self._store()
            except Exception:
                logger.exception(
                    "Quota actor failed in a tick and runs the next one in %.1f s. Report this traceback", ACTOR_TICK_S
                )

    def _set_clock(self) -> None:
        """Limits a day and a month go by the clock on the wall."""
        self.core.queue.limits.set_clock(time.time(), time.monotonic())

    def _warn(self) -> None:
        """Log each alarm once, when it is raised."""
        alarms = {(one.replica, one.device): one for one in self.core.grants.alarms()}
        for key in alarms.keys() - self._alarmed:
            alarm = alarms[key]
            logger.error(
                "Engine %s of model %s uses %d bytes of device %s, but %d were granted. Raise memory_gb of the model",
                *(alarm.replica, alarm.model, alarm.measured_bytes, alarm.device, alarm.granted_bytes),
                extra=event(EventKind.HEALTH, alarm.model, replica=alarm.replica, device=alarm.device),
            )
        self._alarmed = set(alarms)

    def _report_fragmentation(self) -> None:
        """Log each node once when its fragmentation has risen above the bound."""
        above = fragmentation_bound(self._defrag_above)
        shares = self.core.fragmentation_by_node
        fragmented = {node for node, share in shares.items() if share > above}
        for node in sorted(fragmented - self._fragmented):
            logger.info(
                "Node %s has fragmented GPU memory: no engine of a model here fits into %.0f%% of what is free",
                *(node, 100 * shares[node]),
                extra=event(EventKind.HEALTH, node, fragmentation=round(shares[node], 4)),
            )
        self._fragmented = fragmented

    async def _follow_devices(self) -> None:
        """Update the devices, and check the processes of ended and silent engines."""
        while True:
            try:
                devices = await self._inventory.devices()
                await self._store_devices(devices)
                await self._run_event(partial(self.core.on_devices, devices))
                self.devices_known.set()
                self._report_fragmentation()
                self._process_checks.of_engines()
                self.core.grants.drains.on_leaving_nodes(await self._inventory.leaving())
            except ServeAppError as error:
                logger.warning(
                    "Quota actor cannot list the nodes, and new devices wait %.0f s for the next try: %s",
                    NODE_LOOK_S,
                    error.message,
                )
            except Exception:
                logger.exception(
                    "Quota actor failed to check devices and retries in %.0f s. Report this traceback", NODE_LOOK_S
                )
            await asyncio.sleep(NODE_LOOK_S)

    async def _store_devices(self, devices: list[Device]) -> None:
        """Store the devices for a later actor, before anything is granted on them."""
        of_nodes: dict[str, list[Device]] = {}
        for device in devices:
            of_nodes.setdefault(NODE + device.node, []).append(device)
        for name in [name for name in {**self._nodes, **of_nodes} if self._nodes.get(name) != of_nodes.get(name)]:
            if name in of_nodes:
                await asyncio.to_thread(self._kv_store.put, name, of_nodes[name])
                self._nodes[name] = of_nodes[name]
            else:
                await asyncio.to_thread(self._kv_store.delete, name)
                del self._nodes[name]


def _log_failed_write(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("Quota actor could not store its checkpoint and retries; a restart loses changes: %r", error)


async def _retry_until_done(act: Callable[[], T]) -> T:
    """Retry what the constructor needs: Ray never restarts an actor whose constructor has failed."""
    while True:
        try:
            return await asyncio.to_thread(act)
        except Exception:
            logger.exception(
                "Quota actor cannot start without its stored state and retries in %.0f s. Check the GCS", NODE_LOOK_S
            )
            await asyncio.sleep(NODE_LOOK_S)
