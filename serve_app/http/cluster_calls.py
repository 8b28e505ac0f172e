"""What a router asks of its cluster for operators: the quota actor, Serve's controller, Ray. What blocks runs in a
thread."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from autoscaling.operations import DrainTarget, application, draining, node_logs, ray_drains
from serve_app.http.shared_answer import SharedAnswer
from serve_app.system import LogFilter, LogPart

STATE_FRESH_S = 1.0  # a terminal that watches looks every two seconds
ADDRESSES_FRESH_S = 10.0  # a node that has just joined is shown by its id for so long

LOGS_S = 15.0  # for the nodes' readers, whose processes start within seconds
READERS_KEPT_S = 60.0  # without a question, after which the readers end

CallQuota = Callable[..., Awaitable[Any]]


class RayCalls:
    """The calls, see `serve_app.http.api.operator_routes.ClusterCalls`.

    Args:
        call_quota: calls a method of the quota actor.
    """

    def __init__(self, call_quota: CallQuota) -> None:
        state = functools.partial(application.application_status, (), application.ANSWER_S)
        self.call_quota = call_quota
        self.state = SharedAnswer(functools.partial(asyncio.to_thread, state), STATE_FRESH_S).get
        addresses = functools.partial(asyncio.to_thread, application.addresses)
        self.addresses = SharedAnswer(addresses, ADDRESSES_FRESH_S).get
        self._drains = ray_drains.RayDrains()
        self._log_readers = node_logs.NodeReaders()
        self._idle: asyncio.TimerHandle | None = None

    async def find_target(self, name: str) -> DrainTarget:
        return await asyncio.to_thread(application.drain_target, name)

    async def drain_replica(self, replica: str, within_s: float | None) -> None:
        await asyncio.to_thread(self._drains.drain_replica, replica, within_s)

    async def drain_node(self, node_id: str, within_s: float | None) -> float:
        return await asyncio.to_thread(self._drains.drain_node, node_id, within_s)

    async def look_at_drain(self, target: DrainTarget) -> draining.DrainLook:
        return await asyncio.to_thread(self._drains.look, target)

    async def find_logs(self, wanted: LogFilter, last: int) -> list[LogPart]:
        if self._idle is not None:
            self._idle.cancel()
        found = await asyncio.to_thread(self._log_readers.find, wanted, last, LOGS_S)
        self._idle = asyncio.get_running_loop().call_later(READERS_KEPT_S, self._log_readers.close)
        return found
