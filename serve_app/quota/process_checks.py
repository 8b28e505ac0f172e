"""Looks on their nodes for the processes of engines and routers that are silent or have ended, and tells the core of
those that are gone.

Invariant: one task per party, so a node that does not answer delays the check of no other one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

from serve_app.core.memory import NodeProcesses
from serve_app.core.quota import Quota
from serve_app.core.times import ROUTER_LOOK_S
from serve_app.system import EventKind, event

logger = logging.getLogger("ray.serve")


Gone = Callable[[Iterable[NodeProcesses]], Awaitable[bool]]


class ProcessChecks:
    """The checks that run.

    Args:
        core: of the quota actor.
        gone: whether all of these processes are gone.
        end_orphans: the same of an engine's, of which it ends those that the replica has left behind.
        run_event: runs an event of the core, and stores what it changes.
    """

    def __init__(
        self,
        core: Quota,
        gone: Gone,
        end_orphans: Gone,
        run_event: Callable[[Callable[[float], None]], Awaitable[None]],
    ) -> None:
        self._core = core
        self._gone = gone
        self._end_orphans = end_orphans
        self._run_event = run_event
        self._running: dict[str, asyncio.Task[None]] = {}  # by party
        self._seen_routers: set[str] = set()

    def of_engines(self) -> None:
        """Check the engines that are silent or have ended."""
        silent = {report.owner: report for report in self._core.silent_engines(time.monotonic())}
        for owner, report in (silent | self._core.ending_engines()).items():
            processes = () if report is None else report.processes
            on_gone = partial(self._core.on_processes_gone, owner)
            self._check(f"engine {owner}", self._end_orphans, processes, on_gone)

    async def follow_routers(self) -> None:
        """Check routers that are silent, and new ones once: the first question to a node starts a process there."""
        while True:
            await asyncio.sleep(ROUTER_LOOK_S)
            known = self._core.queue.processes
            new = {name: known[name] for name in known.keys() - self._seen_routers}
            self._seen_routers = set(known)
            for name, processes in (new | self._core.silent_routers(time.monotonic())).items():
                self._check(f"router {name}", self._gone, (processes,), partial(self._core.on_router_gone, name))

    def _check(
        self, party: str, gone: Gone, processes: Iterable[NodeProcesses], on_gone: Callable[[float], Any]
    ) -> None:
        if party not in self._running:
            check = self._check_once(party, gone, processes, on_gone)
            self._running[party] = asyncio.create_task(check, name=f"looking for {party}")

    async def _check_once(
        self, party: str, gone: Gone, processes: Iterable[NodeProcesses], on_gone: Callable[[float], Any]
    ) -> None:
        try:
            if await gone(processes):
                extra = event(EventKind.HEALTH, party, gone=True)
                logger.info("Processes of %s are gone; its memory and its grants are free", party, extra=extra)
                await self._run_event(on_gone)
        except Exception:
            logger.exception("Processes of %s could not be checked and are checked again. Report this traceback", party)
        finally:
            del self._running[party]
