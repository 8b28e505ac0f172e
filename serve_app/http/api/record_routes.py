"""The request log, the history and the events of all nodes.

    GET /admin/requests     records of ended requests, the newest first; ?waiting=1: of those that wait now
    GET /admin/history      counts and durations of each minute, of `step_s`, or of the whole time
    GET /admin/events       what has happened to the system: scaling and health; for keys with `admin`

A key without `admin` sees the requests and the history of its own tenant. What routers have not written yet they write
when they are asked, so an answer has all that has ended before.

Invariant: every answer is bounded in time and in size, and names the nodes and routers that it lacks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol

import msgspec

from autoscaling.operations import EventFilter, RecordAnswers
from serve_app.core.receipts import Receipt, explain
from serve_app.core.records import (
    FAILED,
    MINUTE_S,
    Grouping,
    HistoryQuestion,
    HistorySum,
    RecordFilter,
    first_records,
    full_record,
    head_of,
)
from serve_app.errors import BadRequest, Forbidden, Unavailable
from serve_app.http.api.local_routes import not_an_operator
from serve_app.http.api.routes import HttpRoute, RecordCall
from serve_app.http.error_responses import JSON, Answer
from serve_app.http.fields import query_number, query_words, time_of
from serve_app.ray_adapter import NO_ANSWER
from serve_app.router import RouterAnswers
from serve_app.system import DurationSketch, EventKind
from serve_app.types import Identity, Outcome, RequestClass

NODES_TIMEOUT_S = 20.0  # the first question starts a process on each node
WAITS_TIMEOUT_S = 2.0  # the quota actor answers in milliseconds
DEFAULT_RECORDS = 100
MAX_RECORDS = 1000  # of a page: a megabyte
MAX_STEP_S = 86_400
MAX_ROWS = 20_000  # of a history: 8 MB
DEFAULT_HISTORY_S = 3600.0
WHOLE_TIME = "all"  # in place of a step
COMMON_PARAMETERS = ("tenant", "name", "model", "class", "since", "until")
REQUEST_PARAMETERS = (*COMMON_PARAMETERS, "outcome", "failed", "slow", "waiting", "limit", "cursor")
HISTORY_PARAMETERS = (*COMMON_PARAMETERS, "step_s", "by")
EVENT_PARAMETERS = ("since", "limit", "kind")

AskRouters = Callable[..., Awaitable[RouterAnswers]]  # a method of every router, with its arguments


class FindsRecords(Protocol):
    """What is asked of the cluster. Each raises `NO_ANSWER` while that does not answer."""

    def find_records(self, method: str, question: Any) -> Awaitable[RecordAnswers]:
        """What `NodeRecords` of every node answers that does in time."""

    def call_quota(self, method: str, *arguments: Any) -> Awaitable[Any]:
        """One call of the quota actor."""


@dataclass(frozen=True, slots=True)
class RecordRoutes:
    """Answers the routes.

    Args:
        now: seconds since 1970 UTC.
    """

    cluster: FindsRecords
    ask_routers: AskRouters
    now: Callable[[], float] = time.time

    async def answer(self, route: HttpRoute, identity: Identity, query: bytes) -> Answer:
        """The complete answer.

        Raises:
            Forbidden: another tenant's, or the events, with a key that is not an operator's. BadRequest: a wrong
            parameter, see `param`. Unavailable: no node answers.
        """
        match route.target:
            case RecordCall.REQUESTS:
                found = await self._requests(identity, query)
            case RecordCall.HISTORY:
                found = await self._history(identity, query)
            case _:
                if not identity.admin:
                    raise not_an_operator()
                found = await self._events(query)
        return 200, JSON, msgspec.json.encode(found)

    async def _requests(self, identity: Identity, query: bytes) -> dict[str, Any]:
        words = query_words(query, REQUEST_PARAMETERS)
        wanted = _record_filter(words, identity)
        if _flag(words, "waiting"):
            records, missing = await self._waiting(wanted)
        else:
            missing = await self._flushed(wanted.since)
            answers = await self._of_nodes("requests", wanted)
            records = map(full_record, first_records(wanted, (one for found in answers.found for one in found)))
            missing += _nodes(answers)
        data = [_shown(record) for record in records]
        more = len(data) == wanted.limit and not _flag(words, "waiting")
        cursor = _cursor_of(wanted, data[-1]) if more else None
        return _answer_of("list", data, missing) | {"next_cursor": cursor}

    async def _waiting(self, wanted: RecordFilter) -> tuple[Iterable[Mapping[str, Any]], list[str]]:
        """The requests that wait now and what each waits for."""
        answers = await self.ask_routers("waiting_requests", wanted.tenant)
        waiting = [record for _, found in answers.found for record in found if wanted.has(head_of(record))]
        missing = _routers(answers)
        reasons: Mapping[str, str] = {}
        if any(record["queued_as"] for record in waiting):
            try:
                async with asyncio.timeout(WAITS_TIMEOUT_S):
                    reasons = await self.cluster.call_quota("waits")
            except NO_ANSWER:
                missing.append("quota_actor")
        for record in waiting:
            tickets = record.pop("queued_as")
            in_queue = next((reasons[ticket] for ticket in tickets if ticket in reasons), None)
            record["waits_for"] = record["waits_for"] or in_queue
        return first_records(wanted, waiting), missing

    async def _history(self, identity: Identity, query: bytes) -> dict[str, Any]:
        words = query_words(query, HISTORY_PARAMETERS)
        question = _history_question(words, identity, self.now())
        missing = await self._flushed(question.since)
        answers = await self._of_nodes("history", question)
        missing += _nodes(answers)
        rows, has_others = await asyncio.to_thread(_rows, question, answers.found)
        if len(rows) > MAX_ROWS:
            raise BadRequest(f"{len(rows)} rows are too many; ask for a larger `step_s`", param="step_s")
        if question.tenant is not None and has_others:
            missing.append("requests of tenants that were counted as `other` (metrics.named_tenants)")
        found = _answer_of("history", rows, missing)
        return found | {"step_s": question.step_s or None, "by": question.by.value}

    async def _events(self, query: bytes) -> dict[str, Any]:
        words = query_words(query, EVENT_PARAMETERS)
        limit = query_number(words, "limit", DEFAULT_RECORDS, MAX_RECORDS)
        kind = _one_of(words, "kind", [one.value for one in EventKind])
        since = time_of(words["since"], "since") if "since" in words else 0.0
        answers = await self._of_nodes("events", EventFilter((kind,) if kind else (), since, limit))
        found = sorted((event for events in answers.found for event in events), key=lambda event: -event["at"])[:limit]
        return _answer_of("list", [_shown(event) for event in found], _nodes(answers))

    async def _flushed(self, since: float) -> list[str]:
        """What is missing in the logs, once the routers have written what has ended. `since`: seconds since 1970; what
        was lost before is not asked for."""
        # without an argument where there need be none: a router of the release before takes none
        answers = await self.ask_routers("flush_records", *([since] if since else []))
        late = [f"router {name}: its disk does not answer" for name, lost in answers.found if lost is None]
        lossy = [f"router {name}: {lost} records that its disk did not take" for name, lost in answers.found if lost]
        return late + lossy + _routers(answers)

    async def _of_nodes(self, method: str, question: Any) -> RecordAnswers:
        try:
            async with asyncio.timeout(NODES_TIMEOUT_S):
                return await self.cluster.find_records(method, question)
        except NO_ANSWER as error:
            raise Unavailable("Ray does not answer at the moment", code="no_controller") from error


class RecordedReceipt(NamedTuple):
    """A receipt from the request log; None: it is in no log that answers in time. `missing`: the others."""

    receipt: dict[str, Any] | None
    missing: list[str]


async def recorded_receipt(cluster: FindsRecords, request: str, tenant: str | None) -> RecordedReceipt:
    """The receipt of a request whose router has forgotten it or is gone."""
    try:
        async with asyncio.timeout(NODES_TIMEOUT_S):
            answers = await cluster.find_records("requests", RecordFilter(tenant=tenant, request=request, limit=1))
    except NO_ANSWER:
        return RecordedReceipt(None, ["the request log"])
    for found in answers.found:
        for record in found:
            receipt = Receipt.from_json_fields(full_record(record) | {"waited_for": record.get("waited_for")})
            return RecordedReceipt(receipt.to_json_fields() | {"story": explain(receipt)}, [])
    return RecordedReceipt(None, _nodes(answers))


def _record_filter(words: Mapping[str, str], identity: Identity) -> RecordFilter:
    outcome = _one_of(words, "outcome", [one.value for one in Outcome])
    is_failed = _flag(words, "failed")
    if is_failed and outcome and outcome not in FAILED:
        raise BadRequest(f"`failed` with the outcome {outcome} is none: give one of them", param="outcome")
    return RecordFilter(
        tenant=_tenant(words, identity),
        model=words.get("model", ""),
        request_class=_class(words),
        outcome=outcome,
        is_failed=is_failed,
        is_slow=_flag(words, "slow"),
        since=_time(words, "since") or 0.0,
        until=_time(words, "until"),
        after=_cursor(words),
        limit=query_number(words, "limit", DEFAULT_RECORDS, MAX_RECORDS),
        asked_model=words.get("name", ""),
    )


def _history_question(words: Mapping[str, str], identity: Identity, now: float) -> HistoryQuestion:
    is_whole = words.get("step_s") == WHOLE_TIME
    step_s = 0 if is_whole else query_number(words, "step_s", MINUTE_S, MAX_STEP_S)
    if step_s % MINUTE_S:
        raise BadRequest(f"`step_s` must be a multiple of {MINUTE_S}", param="step_s")
    since = _time(words, "since")
    return HistoryQuestion(
        since=now - DEFAULT_HISTORY_S if since is None else since,
        until=_time(words, "until"),
        step_s=step_s,
        by=Grouping(_one_of(words, "by", [one.value for one in Grouping]) or Grouping.TOTAL),
        tenant=_tenant(words, identity),
        model=words.get("model", ""),
        request_class=_class(words),
        asked_model=words.get("name", ""),
    )


def _rows(question: HistoryQuestion, found: Iterable[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
    """The rows of all nodes, and whether tenants without a name were counted."""
    total = HistorySum(question, DurationSketch)
    for plain in found:
        total.add_rows(plain)
    return [{**row, "time": _utc(row["time"])} for row in total.rows()], total.has_others


def _tenant(words: Mapping[str, str], identity: Identity) -> str | None:
    """The tenant whose requests are shown; None: all."""
    tenant = words.get("tenant")
    if identity.admin:
        return tenant or None
    if tenant not in (None, identity.tenant):
        raise Forbidden("this key sees the requests of its own tenant alone", param="tenant", code="not_admin")
    return identity.tenant


def _class(words: Mapping[str, str]) -> str:
    return _one_of(words, "class", [one.label for one in RequestClass])


def _one_of(words: Mapping[str, str], name: str, known: Iterable[str]) -> str:
    """A parameter that is one of some words; empty: it is not given. Raises BadRequest."""
    word = words.get(name, "")
    if word and word not in known:
        raise BadRequest(f"`{name}` must be one of {', '.join(known)}", param=name)
    return word


def _flag(words: Mapping[str, str], name: str) -> bool:
    word = words.get(name, "0")
    if word not in ("0", "1"):
        raise BadRequest(f"`{name}` must be 1 or 0", param=name)
    return word == "1"


def _time(words: Mapping[str, str], name: str) -> float | None:
    return time_of(words[name], name) if name in words else None


def _cursor(words: Mapping[str, str]) -> tuple[float, str] | None:
    if "cursor" not in words:
        return None
    order, _, request = words["cursor"].partition("-")
    try:
        return float(order), request
    except ValueError:
        raise BadRequest("`cursor` must be a `next_cursor` of this route", param="cursor") from None


def _cursor_of(wanted: RecordFilter, record: Mapping[str, Any]) -> str:
    order, request = wanted.order(head_of(record))
    return f"{order!r}-{request}"


def _shown(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record or event with the time in ISO 8601 besides seconds."""
    return {"time": _utc(record["at"])} | dict(record)


def _answer_of(kind: str, data: list[Any], missing: list[str]) -> dict[str, Any]:
    return {"object": kind, "data": data, "complete": not missing, "missing": missing}


def _nodes(answers: RecordAnswers) -> list[str]:
    return [f"node {name}" for name in answers.missing]


def _routers(answers: RouterAnswers) -> list[str]:
    return [f"router {name}" for name in answers.missing]


def _utc(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
