"""What operators ask of a running application and change in it, for keys with `admin`.

    GET  /admin/status          models, replicas and routers, their states and reasons
    GET  /admin/quota           the ledger of GPU memory
    GET  /admin/defrag          the plan that frees memory for the first waiting engine
    POST /admin/defrag          carries it out
    POST /admin/drains          {"name", "within_s"}: drains a replica or a node
    GET  /admin/drains/{id}     how far that is
    GET  /admin/logs            the last log lines of all nodes, by their time

What was changed is in the audit record, with the key that asked. A client that follows a drain asks for it again; only
what changes a drain is recorded.

Invariant: every answer is bounded in time, and nothing of a drain is kept here: any router answers the next question. A
change that has begun is recorded, also if its client leaves; while the store is away, the answer says what is missing
in the record (`unrecorded`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Protocol

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from autoscaling.operations import DrainTarget, LogLevel, RecordAnswers, draining, in_order, wanted_lines
from serve_app.errors import BadRequest, LeaseNotFound, NotFound, StoreAway, Unavailable
from serve_app.http.api.audit_routes import author_of
from serve_app.http.api.deploy_routes import DeployCalls
from serve_app.http.api.local_routes import not_an_operator
from serve_app.http.api.routes import HttpRoute, OperatorCall
from serve_app.http.error_responses import JSON, Answer
from serve_app.http.fields import parse_fields, query_number, query_words, time_of
from serve_app.ray_adapter import NO_ANSWER, in_fresh_context
from serve_app.store import AuditAction, AuditEntry, Store, unrecorded
from serve_app.system import LogFilter, LogPart
from serve_app.types import Identity

logger = logging.getLogger("ray.serve")

ANSWER_TIMEOUT_S = 2.0  # the quota actor answers in milliseconds, and within seconds after its own death
STATE_TIMEOUT_S = 8.0  # Serve's controller answers in milliseconds, on a loaded head in seconds
RECORD_TIMEOUT_S = 2.0  # the store answers in milliseconds; a drain must not wait for one that is away
EARLIER_S = 5.0  # a deadline that is so much earlier changes a drain; less is the time of the questions in between
MAX_DRAIN_S = 86_400.0  # of `within_s`
MAX_NAME_CHARS = 256
LOGS_TIMEOUT_S = 20.0  # the first question starts a process on each node
LOG_PARAMETERS = ("source", "replica", "request", "level", "since", "lines")
DEFAULT_LINES = 100
MAX_LINES = 10_000  # some 2 MB

ReadBody = Callable[[], Awaitable[tuple[Mapping[str, Any], bytes]]]  # decoded, and as it was sent
Record = Callable[[], Awaitable[str]]  # adds an entry to the audit record; see `OperatorRoutes._record`


class ClusterCalls(DeployCalls, Protocol):
    """What is asked of the cluster. Each raises `NO_ANSWER` or Unavailable while that does not answer."""

    def state(self) -> Awaitable[dict[str, Any]]:
        """As of `autoscaling.operations.application.application_status`."""

    def addresses(self) -> Awaitable[dict[str, str]]:
        """Of the nodes, by id."""

    def call_quota(self, method: str, *arguments: Any) -> Awaitable[Any]:
        """One call of the quota actor."""

    def find_target(self, name: str) -> Awaitable[DrainTarget]:
        """What a name stands for. Raises NotFound, BadRequest."""

    def drain_replica(self, replica: str, within_s: float | None) -> Awaitable[None]:
        """Raises LeaseNotFound."""

    def drain_node(self, node_id: str, within_s: float | None) -> Awaitable[float]:
        """The seconds until the node's end."""

    def look_at_drain(self, target: DrainTarget) -> Awaitable[draining.DrainLook]:
        """How far it is."""

    def find_logs(self, wanted: LogFilter, last: int) -> Awaitable[list[LogPart]]:
        """The `last` lines of each log file, of the nodes that answer in time."""

    def find_records(self, method: str, question: Any) -> Awaitable[RecordAnswers]:
        """What `NodeRecords` of every node answers that does in time."""


class _DrainFields(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    within_s: float | None = Field(None, ge=0, le=MAX_DRAIN_S)


@dataclass(frozen=True, slots=True)
class OperatorRoutes:
    """Answers the routes.

    Args:
        store: the one that holds now.
        now: seconds since 1970 UTC.
    """

    cluster: ClusterCalls
    store: Callable[[], Store]
    now: Callable[[], float] = time.time

    async def answer(self, route: HttpRoute, identity: Identity, query: bytes, read: ReadBody) -> Answer:
        """The complete answer.

        Args:
            query: of the URL.
            read: the body, for a call that has one.

        Raises:
            Forbidden: not an operator's key. BadRequest: a wrong field, or a name that fits several. NotFound: nothing
            is called so. Unavailable: the quota actor or Serve's controller does not answer.
        """
        if not identity.admin:
            raise not_an_operator()
        match route.target:
            case OperatorCall.STATUS:
                found = await _answered(self.cluster.state(), "Serve's controller", "no_controller", STATE_TIMEOUT_S)
            case OperatorCall.QUOTA:
                found = await self._quota("figures") | {"addresses": await self._addresses()}
            case OperatorCall.DEFRAG_PLAN:
                plan = await self._quota("defrag", False)
                found = {"plan": plan, "begun": False, "addresses": await self._addresses()}
            case OperatorCall.DEFRAG:
                found = await _to_its_end(self._defrag(identity), "defrag")
            case OperatorCall.DRAIN:
                fields = parse_fields(_DrainFields, (await read())[0])
                found = await _to_its_end(self._drain(fields, identity), "drain")
            case OperatorCall.LOGS:
                found = await self._logs(query)
            case _:
                found = await self._look(route.argument)
        return 200, JSON, msgspec.json.encode(found)

    async def _quota(self, method: str, *arguments: Any) -> Any:
        asked = self.cluster.call_quota(method, *arguments)
        return await _answered(asked, "the quota actor", "no_quota", ANSWER_TIMEOUT_S)

    async def _addresses(self) -> dict[str, str]:
        """None, where Ray does not answer in time: the figures name nodes by their ids."""
        with contextlib.suppress(Unavailable):
            found: dict[str, str] = await _answered(self.cluster.addresses(), "Ray", "no_controller", ANSWER_TIMEOUT_S)
            return found
        return {}

    async def _defrag(self, identity: Identity) -> dict[str, Any]:
        plan = await self._quota("defrag", True)
        missing = ""
        if plan is not None:
            restarts = [step["owner"] for step in plan["steps"]]
            missing = await self._record(AuditAction.DEFRAG, plan["waits"]["owner"], identity, restarts=restarts)
        addresses = await self._addresses()
        return {"plan": plan, "begun": plan is not None, "addresses": addresses, "unrecorded": missing}

    async def _drain(self, asked: _DrainFields, identity: Identity) -> dict[str, Any]:
        target = await _from_controller(self.cluster.find_target(asked.name))
        details = {"is_node": target.is_node, "within_s": asked.within_s}
        record = functools.partial(self._record, AuditAction.DRAIN, target.target_id, identity, **details)
        limit_s = None
        if target.is_node:
            limit_s = await _from_controller(self.cluster.drain_node(target.target_id, asked.within_s))
            missing = await record()
        else:
            missing = await self._drain_replica(target, asked.within_s, record)
        found = {"object": "drain", "id": target.target_id, "is_node": target.is_node, "limit_s": limit_s}
        return found | {"unrecorded": missing}

    async def _drain_replica(self, target: DrainTarget, within_s: float | None, record: Record) -> str:
        """Drain it; recorded is what begins a drain, or makes its deadline earlier. Returns as `_record`."""
        before = await _from_controller(self.cluster.look_at_drain(target))
        if before.rows is None:
            raise Unavailable("the quota actor does not answer at the moment", code="no_quota")
        try:
            drained = self.cluster.drain_replica(target.target_id, within_s)
            await _answered(drained, "the quota actor", "no_quota", STATE_TIMEOUT_S)
        except LeaseNotFound as error:
            raise NotFound(error.message, code="replica_not_found") from None
        except Unavailable:  # the actor may have taken it all the same
            await record()
            raise
        return await record() if await self._has_changed(target, within_s, before) else ""

    async def _has_changed(self, target: DrainTarget, within_s: float | None, before: draining.DrainLook) -> bool:
        """Whether a drain, asked for with `within_s`, has changed what there was before. Of a replica that Serve stops
        already, a drain without a deadline of its own only makes the progress known."""
        if within_s is None and (before.engines or {}).get(target.target_id) == "STOPPING":
            return False
        left_s = _left_s(before.rows or [], target)
        if left_s == math.inf:
            return True
        try:
            figures = await self._quota("figures")
        except Unavailable:  # then it is not known
            return True
        return _left_s(figures["drains"], target) < left_s - EARLIER_S

    async def _record(self, action: AuditAction, target: str, identity: Identity, **details: Any) -> str:
        """Add what was done to the audit record. Returns why the record lacks it; empty: it does not."""
        entry = AuditEntry(action, target, author_of(identity), self.now(), details=details)
        try:
            async with asyncio.timeout(RECORD_TIMEOUT_S):
                await self.store().add_audit(entry)
        except (StoreAway, TimeoutError) as error:
            return unrecorded(entry, error, logger)
        return ""

    async def _logs(self, query: bytes) -> dict[str, Any]:
        words = query_words(query, LOG_PARAMETERS)
        lines = query_number(words, "lines", DEFAULT_LINES, MAX_LINES)
        level = words.get("level")
        if level is not None and level not in set(LogLevel):
            raise BadRequest(f"`level` must be one of {', '.join(LogLevel)}", param="level")
        chosen = {name: words[name] for name in ("source", "replica", "request") if name in words}
        since = time_of(words["since"], "since") if "since" in words else 0.0
        wanted = wanted_lines(**chosen, level=None if level is None else LogLevel(level), since=since)
        parts = await _answered(self.cluster.find_logs(wanted, lines), "Ray", "no_controller", LOGS_TIMEOUT_S)
        data = [asdict(line) | {"time": _utc(line.time)} for line in in_order(parts, lines)]
        return {"object": "list", "data": data}

    async def _look(self, target_id: str) -> dict[str, Any]:
        """A node is known by its id; anything else is a replica, which may have left."""
        is_node = target_id in await self._addresses()
        look = await _from_controller(self.cluster.look_at_drain(DrainTarget(target_id, is_node)))
        return {"object": "drain", "id": target_id, "is_node": is_node, **asdict(look)}


def _left_s(rows: list[dict[str, Any]], target: DrainTarget) -> float:
    """The seconds that a replica has left to drain; infinite: it does not drain."""
    drains = (row for row in rows if row["replica"] == target.target_id and not row["ended"])
    return min((row["left_s"] for row in drains), default=math.inf)


def _utc(at: float | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


async def _to_its_end(change: Coroutine[Any, Any, dict[str, Any]], name: str) -> dict[str, Any]:
    """The answer of a change, which goes on to its end if the client leaves."""
    return await asyncio.shield(in_fresh_context(change, name))


async def _from_controller(asked: Awaitable[Any]) -> Any:
    return await _answered(asked, "Serve's controller", "no_controller", STATE_TIMEOUT_S)


async def _answered(asked: Awaitable[Any], subject: str, code: str, within_s: float) -> Any:
    """The answer. Raises Unavailable: there is none in this time."""
    try:
        async with asyncio.timeout(within_s):
            return await asked
    except NO_ANSWER as error:
        raise Unavailable(f"{subject} does not answer at the moment", code=code) from error
