"""The cluster of a router, as far as operators ask it: gone, or a script."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoscaling.operations import DrainTarget, RecordAnswers
from autoscaling.operations.draining import DrainLook
from autoscaling.operations.node_records import NodeRecords
from autoscaling.rollout import DeployOrder
from serve_app.errors import LeaseNotFound, NotFound
from serve_app.system import LogFilter, LogPart


def _open() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


class NoCluster:
    """Nothing answers."""

    async def state(self) -> dict[str, Any]:
        raise TimeoutError

    async def addresses(self) -> dict[str, str]:
        raise TimeoutError

    async def call_quota(self, method: str, *arguments: Any) -> Any:
        raise TimeoutError

    async def find_target(self, name: str) -> DrainTarget:
        raise TimeoutError

    async def drain_replica(self, replica: str, within_s: float | None) -> None:
        raise TimeoutError

    async def drain_node(self, node_id: str, within_s: float | None) -> float:
        raise TimeoutError

    async def look_at_drain(self, target: DrainTarget) -> DrainLook:
        raise TimeoutError

    async def find_logs(self, wanted: LogFilter, last: int) -> list[LogPart]:
        raise TimeoutError

    async def find_records(self, method: str, question: Any) -> RecordAnswers:
        raise TimeoutError

    async def plan_deploy(self, given: Mapping[str, Any], tenant: str) -> dict[str, Any]:
        raise TimeoutError

    async def begin_deploy(self, order: DeployOrder) -> dict[str, Any]:
        raise TimeoutError

    async def look_at_deploy(self) -> dict[str, Any] | None:
        raise TimeoutError


@dataclass
class RecordedCluster(NoCluster):
    """A node whose records are in a folder.

    Args:
        missing: nodes that do not answer.
        waits: what requests wait for, as the quota actor knows it; None: it does not answer.
    """

    folder: Path
    missing: list[str] = field(default_factory=list)
    waits: dict[str, str] | None = None

    async def find_records(self, method: str, question: Any) -> RecordAnswers:
        return RecordAnswers([getattr(NodeRecords(self.folder), method)(question)], list(self.missing))

    async def call_quota(self, method: str, *arguments: Any) -> Any:
        if method != "waits" or self.waits is None:
            raise TimeoutError
        return self.waits


class SilentCluster(NoCluster):
    """Takes every call and answers none."""

    async def state(self) -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async def call_quota(self, method: str, *arguments: Any) -> Any:
        await asyncio.Event().wait()


@dataclass
class ScriptedCluster:
    """Answers, and keeps what it was asked.

    Args:
        node: its id; `replica`: of an engine there.
        answers: of the quota actor, by method.
        known: whether the quota actor knows the replica.
        looks: at drains, one after the other; the last one for ever.
    """

    node: str = "n1"
    replica: str = "x7k2"
    answers: dict[str, Any] = field(default_factory=dict)
    known: bool = True
    looks: list[DrainLook] = field(default_factory=lambda: [DrainLook([])])
    logs: list[LogPart] = field(default_factory=list)
    asked: list[tuple[Any, ...]] = field(default_factory=list)
    deployment: dict[str, Any] | None = None
    may_begin: asyncio.Event = field(default_factory=_open)
    began: asyncio.Event = field(default_factory=asyncio.Event)

    async def state(self) -> dict[str, Any]:
        return {"state": "running", "message": "", "models": [], "routers": [], "unready": {}}

    async def addresses(self) -> dict[str, str]:
        return {self.node: "10.0.0.1"}

    async def call_quota(self, method: str, *arguments: Any) -> Any:
        self.asked.append((method, *arguments))
        return self.answers.get(method)

    async def find_target(self, name: str) -> DrainTarget:
        for target_id, is_node in ((self.replica, False), (self.node, True)):
            if target_id.startswith(name):
                return DrainTarget(target_id, is_node)
        raise NotFound(f"{name}: no replica or node is called so; there are {self.replica}", param="name")

    async def drain_replica(self, replica: str, within_s: float | None) -> None:
        self.asked.append(("drain_replica", replica, within_s))
        if not self.known:
            raise LeaseNotFound(f"there is no engine {replica}")

    async def drain_node(self, node_id: str, within_s: float | None) -> float:
        self.asked.append(("drain_node", node_id, within_s))
        return 120.0 if within_s is None else within_s + 5.0

    async def look_at_drain(self, target: DrainTarget) -> DrainLook:
        self.asked.append(("look", target))
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    async def find_records(self, method: str, question: Any) -> RecordAnswers:
        raise AssertionError("no question of records")

    async def plan_deploy(self, given: Mapping[str, Any], tenant: str) -> dict[str, Any]:
        self.asked.append(("plan", given, tenant))
        return {"changes": [], "digest_before": "a", "digest_after": "b", "nodes": [], "replicas": {}}

    async def begin_deploy(self, order: DeployOrder) -> dict[str, Any]:
        await self.may_begin.wait()
        self.asked.append(("deploy", order))
        self.deployment = {"object": "deployment", "id": order.deployment_id, "state": "declaring"}
        self.began.set()
        return self.deployment

    async def look_at_deploy(self) -> dict[str, Any] | None:
        return self.deployment

    async def find_logs(self, wanted: LogFilter, last: int) -> list[LogPart]:
        self.asked.append(("logs", wanted, last))
        return self.logs
