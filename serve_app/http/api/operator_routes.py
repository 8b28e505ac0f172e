"""What operators ask of a running application and change in it, for keys with `admin`.

    GET  /admin/status          models, replicas and routers, their states and reasons
    GET  /admin/quota           the ledger of GPU memory
    GET  /admin/defrag          the plan that frees memory for the first waiting engine
    POST /admin/defrag          carries it out
    POST /admin/drains          {"name", "within_s"}: drains a replica or a node
    GET  /admin/drains/{id}     how far that is
    GET  /admin/logs            the last log lines of all nodes, by their time

Invariant: every answer is bounded in time, and nothing of a drain is kept here: any router answers the next question.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Protocol

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from autoscaling.operations import DrainTarget, LogLevel, draining, in_order, wanted_lines
from serve_app.errors import BadRequest, LeaseNotFound, NotFound, Unavailable
from serve_app.http.api.local_routes import not_an_operator
from serve_app.http.api.routes import HttpRoute, OperatorCall
from serve_app.http.error_responses import JSON, Answer
from serve_app.http.fields import parse_fields, query_number, query_words
from serve_app.ray_adapter import NO_ANSWER
from serve_app.system import LogFilter, LogPart
from serve_app.types import Identity

ANSWER_TIMEOUT_S = 2.0  # the quota actor answers in milliseconds, and within seconds after its own death
STATE_TIMEOUT_S = 8.0  # Serve's controller answers in milliseconds, on a loaded head in seconds
MAX_DRAIN_S = 86_400.0  # of `within_s`
MAX_NAME_CHARS = 256
LOGS_TIMEOUT_S = 20.0  # the first question starts a process on each node
LOG_PARAMETERS = ("source", "replica", "request", "level", "since", "lines")
DEFAULT_LINES = 100
MAX_LINES = 10_000  # some 2 MB

ReadBody = Callable[[], Awaitable[tuple[Mapping[str, Any], bytes]]]  # decoded, and as it was sent


class ClusterCalls(Protocol):
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


class _DrainFields(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    within_s: float | None = Field(None, ge=0, le=MAX_DRAIN_S)


@dataclass(frozen=True, slots=True)
class OperatorRoutes:
    """Answers the routes."""

    cluster: ClusterCalls

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
            case OperatorCall.DEFRAG_PLAN | OperatorCall.DEFRAG:
                begin = route.target is OperatorCall.DEFRAG
                plan = await self._quota("defrag", begin)
                found = {"plan": plan, "begun": begin and plan is not None, "addresses": await self._addresses()}
            case OperatorCall.DRAIN:
                found = await self._drain(parse_fields(_DrainFields, (await read())[0]))
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
            return await _answered(self.cluster.addresses(), "Ray", "no_controller", ANSWER_TIMEOUT_S)
        return {}

    async def _drain(self, asked: _DrainFields) -> dict[str, Any]:
        cluster = self.cluster
        target = await _from_controller(cluster.find_target(asked.name))
        limit_s = None
        if target.is_node:
            limit_s = await _from_controller(cluster.drain_node(target.target_id, asked.within_s))
        else:
            try:
                drained = cluster.drain_replica(target.target_id, asked.within_s)
                await _answered(drained, "the quota actor", "no_quota", STATE_TIMEOUT_S)
            except LeaseNotFound as error:
                raise NotFound(error.message, code="replica_not_found") from None
        return {"object": "drain", "id": target.target_id, "is_node": target.is_node, "limit_s": limit_s}

    async def _logs(self, query: bytes) -> dict[str, Any]:
        words = query_words(query, LOG_PARAMETERS)
        lines = query_number(words, "lines", DEFAULT_LINES, MAX_LINES)
        level = words.get("level")
        if level is not None and level not in set(LogLevel):
            raise BadRequest(f"`level` must be one of {', '.join(LogLevel)}", param="level")
        chosen = {name: words[name] for name in ("source", "replica", "request") if name in words}
        since = _since(words["since"]) if "since" in words else 0.0
        wanted = wanted_lines(**chosen, level=None if level is None else LogLevel(level), since=since)
        parts = await _answered(self.cluster.find_logs(wanted, lines), "Ray", "no_controller", LOGS_TIMEOUT_S)
        data = [asdict(line) | {"time": _utc(line.time)} for line in in_order(parts, lines)]
        return {"object": "list", "data": data}

    async def _look(self, target_id: str) -> dict[str, Any]:
        """A node is known by its id; anything else is a replica, which may have left."""
        is_node = target_id in await self._addresses()
        look = await _from_controller(self.cluster.look_at_drain(DrainTarget(target_id, is_node)))
        return {"object": "drain", "id": target_id, "is_node": is_node, **asdict(look)}


def _since(text: str) -> float:
    """Seconds since 1970. Raises BadRequest."""
    try:
        time = datetime.fromisoformat(text)
        if time.tzinfo is None:
            raise ValueError
        return time.timestamp()
    except (ValueError, OverflowError):
        example = "2027-01-31T00:00:00Z"
        raise BadRequest(f"`since` must be a time with its offset from UTC, such as {example}", param="since") from None


def _utc(time: float | None) -> str | None:
    return None if time is None else datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds")


async def _from_controller(asked: Awaitable[Any]) -> Any:
    return await _answered(asked, "Serve's controller", "no_controller", STATE_TIMEOUT_S)


async def _answered(asked: Awaitable[Any], subject: str, code: str, within_s: float) -> Any:
    """The answer. Raises Unavailable: there is none in this time."""
    try:
        async with asyncio.timeout(within_s):
            return await asked
    except NO_ANSWER as error:
        raise Unavailable(f"{subject} does not answer at the moment", code=code) from error
