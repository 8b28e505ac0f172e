"""What a router asks of its cluster for operators: the quota actor, Serve's controller, Ray. What blocks runs in a
thread."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorDiedError, RayTaskError

from autoscaling.operations import DrainTarget, RecordAnswers, application, draining, node_logs, ray_drains, scraped
from autoscaling.rollout import Deployer, DeployOrder, begin_exclusively, plan_remote
from serve_app.http.shared_answer import SharedAnswer
from serve_app.names import DEPLOYMENT_ACTOR
from serve_app.ray_adapter import existing
from serve_app.system import LogFilter, LogPart

STATE_FRESH_S = 1.0  # a terminal that watches looks every two seconds
ADDRESSES_FRESH_S = 10.0  # a node that has just joined is shown by its id for so long

SCRAPED_FRESH_S = 1.0  # two scrapers at the same time ask once
SCRAPED_S = 1.5  # a scrape waits two seconds for a part of its answer

LOGS_S = 15.0  # for the nodes' readers, whose processes start within seconds
READERS_KEPT_S = 300.0  # without a question, after which the readers end; a console asks each minute

CallQuota = Callable[..., Awaitable[Any]]
T = TypeVar("T")


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
        decisions = functools.partial(asyncio.to_thread, scraped.scaling_decisions, SCRAPED_S)
        self.decisions = SharedAnswer(decisions, SCRAPED_FRESH_S).get
        proxies = functools.partial(asyncio.to_thread, scraped.haproxy_expositions, SCRAPED_S)
        self.proxies = SharedAnswer(proxies, SCRAPED_FRESH_S).get
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

    async def plan_deploy(self, given: Mapping[str, Any], tenant: str) -> dict[str, Any]:
        return await asyncio.to_thread(plan_remote, given, tenant)

    async def begin_deploy(self, order: DeployOrder) -> dict[str, Any]:
        by = f"key {order.key_id}"
        begin = functools.partial(begin_exclusively, Deployer, order.deployment_id, by, outlives=True)
        deployer: Any = await asyncio.to_thread(begin)
        try:
            found: dict[str, Any] = await deployer.begin.remote(order)
            return found
        except RayTaskError as error:  # it was refused: the actor ends, and the next deployment may begin
            ray.kill(deployer)
            raise error.cause from None

    async def look_at_deploy(self) -> dict[str, Any] | None:
        try:
            deployer: Any = await asyncio.to_thread(existing, DEPLOYMENT_ACTOR)
            found: dict[str, Any] = await deployer.look.remote()
            return found
        except (ValueError, ActorDiedError):
            return None

    async def find_logs(self, wanted: LogFilter, last: int) -> list[LogPart]:
        return await self._read(functools.partial(self._log_readers.find, wanted, last, LOGS_S))

    async def find_records(self, method: str, question: Any) -> RecordAnswers:
        return await self._read(functools.partial(self._log_readers.records, method, question, LOGS_S))

    async def _read(self, read: Callable[[], T]) -> T:
        """What the readers of all nodes answer; they end some time after the last question."""
        if self._idle is not None:
            self._idle.cancel()
        try:
            return await asyncio.to_thread(read)
        finally:
            self._idle = asyncio.get_running_loop().call_later(READERS_KEPT_S, self._log_readers.close)
