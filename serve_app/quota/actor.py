"""The quota actor: one named, detached actor that hands out the cluster's GPU memory (`core.quota` decides).

It lives on the head, asks for no CPU, and Ray starts it again whenever it dies. What has to outlive it is in the GCS
before the answer that depends on it is sent; so an answer that was seen is never forgotten. An answer that depends on
nothing new waits for nobody's storing.

Invariant: every public method answers from the core alone; nothing that takes long (looking at other machines) is
waited for in a call.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from serve_app.core.memory import (
    Changes,
    Device,
    EngineReply,
    EngineReport,
    Entry,
    Session,
    SessionAsk,
    StartsAsk,
    StartsReply,
)
from serve_app.core.quota import Quota
from serve_app.core.shared_queue import DEAF_S, Exchange, Reply
from serve_app.errors import ServeAppError, Unavailable
from serve_app.quota.inventory import Inventory, InventorySettings
from serve_app.quota.report import figures
from serve_app.quota.stored_state import EPOCH, INVENTORY, NODE, known, readable, strange
from serve_app.ray_adapter import Shelf, Unreadable

logger = logging.getLogger("serve_app.quota")

TICK_S = 0.5  # a dead owner's leases are back within 5 s: four of silence, and this
LOOK_S = 1.0  # between looks at the nodes; a look is one call per node that has a device
WATCH_S = 0.5  # how long a router that watches is kept waiting for news

T = TypeVar("T")


class GpuMemoryQuota:
    """Actor class; see the module.

    Args:
        inventory: what counts as a device, and how much of it.
        defrag_above: fragmentation above which room is made for who waits, without being told; None: never.
    """

    async def __init__(self, inventory: InventorySettings, defrag_above: float | None = None) -> None:  # type: ignore[misc]  # Ray awaits it
        self._shelf = Shelf("quota")
        stored = await _at_last(self._shelf.all)
        for name in strange(stored):
            logger.error("what was stored as %r is put aside, since it cannot be read: %r", name, stored[name])
            await _at_last(partial(self._shelf.put_aside, name))
        # an epoch that cannot be read was less than the seconds since 1970
        epoch = 1 + (int(time.time()) if isinstance(stored.get(EPOCH), Unreadable) else stored.get(EPOCH, 0))
        await _at_last(lambda: self._shelf.put(EPOCH, epoch))
        roster = dict(known(stored))
        self._core = Quota(epoch, roster, time.monotonic())
        # devices, as stored
        self._nodes = {name: value for name, value in stored.items() if name.startswith(NODE) and readable(name, value)}
        before = {name.removeprefix(NODE): devices for name, devices in self._nodes.items()}
        self._inventory = Inventory(inventory, before)
        self._defrag_above = defrag_above
        self._news: dict[str, asyncio.Event] = {}  # of routers that watch
        self._due: asyncio.TimerHandle | None = None  # the next look at the lines
        self._asking: dict[str, asyncio.Future[Session]] = {}  # who waits for a session
        self._acknowledged = asyncio.Event()  # set whenever a router has spoken
        self._alarmed: set[tuple[str, str]] = set()  # by engine and device
        self._checked: dict[str, asyncio.Task[None]] = {}  # engines whose processes are being looked for
        self._writing: asyncio.Task[None] | None = None
        self._known = asyncio.Event()  # set once the devices are
        if self._nodes and stored.get(INVENTORY) == inventory:  # who speaks first need not wait for the nodes
            self._core.on_devices([device for devices in before.values() for device in devices], time.monotonic())
            self._known.set()
        await _at_last(lambda: self._shelf.put(INVENTORY, inventory))
        self._tasks = [asyncio.create_task(self._every(TICK_S, self._tick)), asyncio.create_task(self._look())]
        logger.info("the quota actor is up: epoch %d, %d on the roster", epoch, len(roster))

    async def engine(self, told: EngineReport) -> EngineReply:
        """What an engine replica may have; see `core.memory.engine_grants`. Raises LeaseConflict: it has to end."""
        await self._known.wait()
        return await self._do(lambda now: self._core.on_engine(told, now), told.owner)

    async def starts(self, asks: tuple[StartsAsk, ...]) -> tuple[StartsReply, ...]:
        """Where replicas that Serve is about to start belong; see `core.memory.start_reservations`. An answer for each
        ask."""
        await self._known.wait()
        return await self._do(lambda now: tuple(self._core.on_starts(ask, now) for ask in asks), "", Entry.BERTH)

    async def devices(self) -> dict[str, tuple[int, int]]:
        """Of each device by its key, all its bytes and those that leases can have."""
        await self._known.wait()
        found = (use.device for use in self._core.ledger.devices())
        return {device.key: (device.total_bytes, device.capacity_bytes) for device in found}

    async def exchange(self, told: Exchange) -> Reply:
        """A router's word on requests, and what is decided at once; see `core.shared_queue.delivery`."""
        await self._known.wait()
        return await self._do(lambda now: self._core.on_exchange(told, now), told.router, Entry.SESSION)

    async def watch(self, told: Exchange) -> Reply:
        """What is decided later: held back until there is something, or for `WATCH_S`."""
        await self._known.wait()
        news = self._news.setdefault(told.router, asyncio.Event())
        news.clear()
        reply = await self._do(lambda now: self._core.on_watch(told, now, at_last=False), told.router, Entry.SESSION)
        if reply is not None:
            return reply
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WATCH_S):
                await news.wait()
        told = told._replace(again=False)  # once is enough
        reply = await self._do(lambda now: self._core.on_watch(told, now, at_last=True), told.router, Entry.SESSION)
        return reply or self._core.lines.peers.stale_reply(told)

    def _lines_moved(self) -> None:
        """Wake whom the lines have something to say to, and look at them again when something comes due there."""
        self._acknowledged.set()
        for name, outcome in self._core.lines.openings.take_outcomes().items():
            self._opened(name, outcome)
        for note in self._core.lines.take_notes():
            logger.error("%s", note)
        for router in self._core.lines.peers.take_woken():
            news = self._news.get(router)
            if news is not None:
                news.set()
        if self._due is not None:
            self._due.cancel()
            self._due = None
        due = self._core.lines.next_due()
        if due is not None:
            delay_s = max(0.0, due - time.monotonic())
            self._due = asyncio.get_running_loop().call_later(delay_s, self._lines_due)

    def _lines_due(self) -> None:
        self._due = None
        try:
            self._core.lines.on_tick(time.monotonic())
        finally:
            self._lines_moved()

    async def open_session(self, ask: SessionAsk) -> Session:
        """Reserve KV tokens; waits until `ask.wait_until`, which is seconds from now here, as is `expires_at` in every
        session that is told: clocks of two machines have nothing to do with each other. Every router that is not deaf
        knows of the session when this returns.

        Raises:
            BadRequest, InsufficientMemory, LeaseConflict, Overloaded, Unavailable: see
            `core.shared_queue.session_admission`.
        """
        await self._known.wait()
        wait_s, name = ask.wait_until, ask.session_id
        ask = dataclasses.replace(ask, wait_until=None if wait_s is None else time.monotonic() + wait_s)
        future = self._asking.setdefault(
            name, asyncio.get_running_loop().create_future()
        )  # set while this one is stored, too
        try:
            session = await self._do(lambda now: self._core.on_session(ask, now), "", Entry.SESSION)
        except ServeAppError as error:
            self._opened(name, error)  # whoever has asked for the same one waits no more
            raise
        if session is None:
            session = await asyncio.shield(future)
            await self._do(lambda now: None, "", Entry.SESSION)
        else:
            self._opened(name, session)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEAF_S):
                heard = self._core.lines.peers.heard()
                while not heard():
                    self._acknowledged.clear()
                    await self._acknowledged.wait()
        return _from_now(session)

    def _opened(self, name: str, outcome: Session | ServeAppError) -> None:
        """Tell who waits for a session what has become of that."""
        waiter = self._asking.pop(name, None)
        if waiter is None or waiter.done():
            return
        if isinstance(outcome, Session):
            waiter.set_result(outcome)
        else:
            waiter.set_exception(outcome)
            waiter.exception()  # its caller may have gone

    async def renew_session(self, session_id: str) -> Session:
        """Raises LeaseNotFound."""
        await self._known.wait()
        return _from_now(await self._do(lambda now: self._core.on_renew(session_id, now)))

    async def look_session(self, session_id: str) -> Session:
        """Raises LeaseNotFound."""
        await self._known.wait()
        return _from_now(await self._do(lambda now: self._core.on_look(session_id, now)))

    async def close_session(self, session_id: str) -> None:
        """Raises LeaseNotFound."""
        await self._known.wait()
        await self._do(lambda now: self._core.on_close(session_id, now), "", Entry.SESSION)
        self._opened(session_id, Unavailable("the session was closed while it waited", code="session_closed"))

    async def defrag(self, begin: bool) -> dict[str, Any] | None:
        """The plan that makes room for the first engine that waits, None where nothing helps; `begin`: do it."""
        await self._known.wait()
        plan = self._core.relocation.plan(time.monotonic())
        if begin and plan is not None:
            self._core.relocation.begin()
        return None if plan is None else dataclasses.asdict(plan)

    async def figures(self) -> dict[str, Any]:
        """All of it in plain figures, for `serve-app quota` and GET /admin/quota."""
        return figures(self._core, time.monotonic(), self._defrag_above)

    async def _do(self, act: Callable[[float], T], name: str = "", *kinds: Entry) -> T:
        """One event of the core. Before anybody hears the answer, what it depends on is stored: what is on the roster
        under this name, which is the speaker's, and all of these kinds."""
        try:
            return act(time.monotonic())
        finally:
            self._lines_moved()
            while self._store() and self._core.unstored(name, kinds):
                assert self._writing is not None
                await asyncio.shield(self._writing)

    def _store(self) -> bool:
        """See that what has changed is stored, one batch after the other; whether there is any."""
        if not self._core.unstored():
            return False
        if self._writing is None or self._writing.done():  # done, and its callback has yet to run
            self._writing = asyncio.create_task(self._write(), name="storing")
            self._writing.add_done_callback(self._written)
        return True

    async def _write(self) -> None:
        changes = self._core.take_changes()
        try:
            await asyncio.to_thread(self._put, changes)
        except BaseException:
            self._core.not_stored(changes)
            raise
        self._core.stored()

    def _written(self, task: asyncio.Task[None]) -> None:
        if self._writing is task:
            self._writing = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("what has to outlive the quota actor is stored again: %r", error)

    def _put(self, changes: Changes) -> None:
        for (kind, name), (keep, value) in changes.items():
            if keep:
                self._shelf.put(f"{kind}:{name}", value)
            else:
                self._shelf.forget(f"{kind}:{name}")

    def _tick(self) -> None:
        relocation = self._core.relocation
        above = self._defrag_above
        if above is not None and not relocation.active and relocation.fragmentation()[0] > above:
            relocation.begin()
        self._core.on_tick(time.monotonic())
        for router in [name for name in self._news if not self._core.ledger.knows(name)]:
            del self._news[router]
        self._lines_moved()
        self._warn()

    def _warn(self) -> None:
        """Log each alarm once, when it is raised."""
        alarms = {(one.owner, one.device): one for one in self._core.grants.alarms()}
        for key in alarms.keys() - self._alarmed:
            one = alarms[key]
            logger.error(
                "engine %s of %s uses %d bytes of device %s, and %d were granted",
                *(one.owner, one.model, one.measured_bytes, one.device, one.granted_bytes),
            )
        self._alarmed = set(alarms)

    async def _every(self, period_s: float, act: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(period_s)
            try:
                act()
                self._store()
            except Exception:
                logger.exception("the quota actor goes on after an error")

    async def _look(self) -> None:
        """Follow the devices, and see whose memory is gone."""
        while True:
            try:
                devices = await self._inventory.devices()
                await self._store_devices(devices)
                await self._do(partial(self._core.on_devices, devices))
                self._known.set()
                self._look_for_processes()
            except ServeAppError as error:
                logger.error("the quota actor: %s", error.message)
            except Exception:
                logger.exception("the quota actor looks again after an error")
            await asyncio.sleep(LOOK_S)

    async def _store_devices(self, devices: list[Device]) -> None:
        """Have a later actor know them, before anything is granted on them."""
        told: dict[str, list[Device]] = {}
        for device in devices:
            told.setdefault(NODE + device.node, []).append(device)
        for name in [name for name in {**self._nodes, **told} if self._nodes.get(name) != told.get(name)]:
            if name in told:
                await asyncio.to_thread(self._shelf.put, name, told[name])
                self._nodes[name] = told[name]
            else:
                await asyncio.to_thread(self._shelf.forget, name)
                del self._nodes[name]

    def _look_for_processes(self) -> None:
        """Each engine by itself: a machine that does not answer keeps nobody else's memory."""
        looked_for = {owner: self._see_memory_gone(owner, told) for owner, told in self._core.ending().items()}
        silent = {told.owner: self._see_dead(told) for told in self._core.silent(time.monotonic())}
        for owner, look in [*looked_for.items(), *silent.items()]:
            if owner in self._checked:
                look.close()
                continue
            task = self._checked[owner] = asyncio.create_task(look, name=f"looking-for-{owner}")
            task.add_done_callback(partial(self._looked, owner))

    def _looked(self, owner: str, task: asyncio.Task[None]) -> None:
        del self._checked[owner]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the processes of engine %s are looked for again: %r", owner, error)

    async def _see_memory_gone(self, owner: str, told: EngineReport | None) -> None:
        if await self._inventory.gone(told):
            logger.info("the memory of engine %s is free again", owner)
            await self._do(lambda now: self._core.on_memory_gone(owner))

    async def _see_dead(self, told: EngineReport) -> None:
        if await self._inventory.gone(told):
            logger.info("engine %s has died, and its memory is free", told.owner)
            await self._do(lambda now: self._core.on_dead(told.owner, now))


def _from_now(session: Session) -> Session:
    return dataclasses.replace(session, expires_at=session.expires_at - time.monotonic())


async def _at_last(act: Callable[[], T]) -> T:
    """What must succeed before there is an actor at all: Ray never starts one again whose constructor has failed."""
    while True:
        try:
            return await asyncio.to_thread(act)
        except Exception:
            logger.exception("the quota actor cannot read or write what has to outlive it, and tries again")
            await asyncio.sleep(LOOK_S)
