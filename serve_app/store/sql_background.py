"""Responses that are made in the background, over SQLAlchemy: each method is one transaction, durable when it returns.

Invariant: a job is leased to one worker at a time, and is gone once its response has ended; its events are only added
to, so every reader sees one stream. The bytes of a response are those of its record, its job and its events. Whatever
is called again with the same arguments changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Subquery, and_, case, func, or_, select, update

from serve_app.core.responses import (
    CANCELLED,
    FAILED,
    MISSED_DEADLINE,
    BackgroundJob,
    EventPage,
    EventPiece,
    StoredResponse,
    as_json,
    ended,
    response_event,
)
from serve_app.errors import BodyTooLarge
from serve_app.store.database import Database
from serve_app.store.octets import octets
from serve_app.store.sql_responses import ITEMS, R, SqlResponses, response_in
from serve_app.store.tables import RESPONSE_EVENTS, RESPONSE_ITEMS, RESPONSES

EVENTS = RESPONSE_EVENTS.c
LATE_AT_ONCE = 100  # jobs that fail at their deadline in one claim
FREE = 0.0  # `leased_until` of a job that nobody has
OVER: dict[str, Any] = {"job": None, "worker": None, "claim": None, "leased_until": None}
RUNS = R.job.is_not(None)  # or waits for its run


class SqlBackground:
    """Threads may share it. Every method raises StoreAway if the database cannot be used; the next call tries again."""

    def __init__(self, database: Database, responses: SqlResponses) -> None:
        self._database = database
        self._responses = responses

    def create(
        self,
        record: StoredResponse,
        job: BackgroundJob,
        beginning: EventPiece,
        max_tenant_bytes: int,
        fingerprint: bytes | None = None,
    ) -> StoredResponse:
        """Add a response that waits for its run, and its first events. Returns the one that is there under this id.

        Args:
            fingerprint: of what is asked for, if the id stands for an Idempotency-Key.

        Raises:
            BodyTooLarge: the tenant's bytes have no room for it; nothing is changed. ValueError: the one of this id was
            asked for with another fingerprint.
        """
        text = as_json({"request": dict(job.request), "session_id": job.session_id})
        columns = {
            "job": text,
            "size": record.size + len(text.encode()) + len(beginning.body.encode()),
            "key_id": job.key_id,
            "attempts": 0,
            "leased_until": FREE,
            "deadline_at": job.deadline_at,
            "request_fingerprint": fingerprint,
        }
        with self._database.writing() as connection:
            self._responses.add_in(connection, record, max_tenant_bytes, columns)
            same = R.response_id == record.response_id, R.tenant == record.tenant
            found = response_in(connection, *same)
            if found is None:  # it was itself what had to go
                raise BodyTooLarge(
                    f"a tenant's stored responses have {max_tenant_bytes} bytes at most",
                    param="store",
                    code="storage_quota_exceeded",
                )
            if connection.execute(select(R.request_fingerprint).where(*same)).scalar() != fingerprint:
                raise ValueError("the key was used for another response")
            self._add_events(connection, record.response_id, beginning)
            return found

    def claim(self, worker: str, limit: int, lease_s: float, claim: str) -> list[BackgroundJob]:
        """Lease jobs that nobody has to a worker: of the tenant with the fewest running ones first, of a tenant the
        oldest first. One that is cancelled ends instead, and all fail that nobody has at their deadline. `claim`: its
        name; the same one again gets the same jobs."""
        now = self._database.now()
        free = and_(RUNS, R.leased_until <= now, R.expires_at > now)
        same = and_(RUNS, R.worker == worker, R.claim == claim)
        late = and_(
            RUNS, R.deadline_at <= now, R.worker.is_(None), R.claim.is_(None)
        )  # what a router took may have begun
        columns = R.response_id, R.tenant, R.key_id, R.job, R.attempts, R.deadline_at
        with self._database.reading() as connection:  # most times there is none: nothing is written then
            any_of = or_(free, same, late) if limit else late
            if connection.execute(select(R.response_id).where(any_of).limit(1)).first() is None:
                return []
        turns = _turns_of_tenants(now)
        waiting = (
            select(*columns, R.cancel_at)
            .join(turns, turns.c.response_id == R.response_id)
            .where(free)
            .order_by(turns.c.place, R.created_at, R.response_id)
            .limit(limit)
            .with_for_update(of=RESPONSES, skip_locked=True)
        )
        with self._database.writing() as connection:
            missed = select(R.response_id, R.cancel_at).where(late).order_by(R.response_id).limit(LATE_AT_ONCE)
            for late_row in connection.execute(missed.with_for_update(skip_locked=True)).all():
                self._end_late(connection, late_row)
            rows = list[Any](connection.execute(select(*columns).where(same).order_by(R.created_at, R.response_id)))
            if not rows:
                for row in connection.execute(waiting).all():
                    if row.cancel_at is None:
                        rows.append(row)
                    else:
                        self._end_in(connection, row.response_id, CANCELLED, None)
                taken = {"worker": worker, "claim": claim, "leased_until": now + lease_s}
                ids = [row.response_id for row in rows]
                connection.execute(update(RESPONSES).where(R.response_id.in_(ids)).values(taken))
            return [
                BackgroundJob(
                    row.response_id,
                    row.tenant,
                    row.key_id,
                    attempts=row.attempts,
                    deadline_at=row.deadline_at,
                    **json.loads(row.job),
                )
                for row in rows
            ]

    def renew(self, worker: str, response_ids: Sequence[str], lease_s: float) -> None:
        """Lease these jobs for as long again, from now."""
        with self._database.writing() as connection:
            chosen = R.response_id.in_(response_ids), R.worker == worker, RUNS
            connection.execute(update(RESPONSES).where(*chosen).values(leased_until=self._database.now() + lease_s))

    def release(
        self, worker: str, response_id: str, *, count_attempt: bool, pause_s: float = 0.0, has_begun: bool = True
    ) -> None:
        """Give a job back that has not ended and that this worker has; nobody has it for `pause_s` then.

        Args:
            count_attempt: its run failed.
            has_begun: it may run at a router, which judges its deadline from now on.
        """
        free: dict[str, Any] = {"worker": None, "leased_until": self._database.now() + pause_s}
        if not has_begun:
            free["claim"] = None
        if count_attempt:
            free["attempts"] = R.attempts + 1
        with self._database.writing() as connection:
            chosen = R.response_id == response_id, R.worker == worker, RUNS
            connection.execute(update(RESPONSES).where(*chosen).values(free))

    def begin(self, response_id: str) -> int | None:
        """The number of the next event of a run; None: it has ended, is gone, or is cancelled and ends now."""
        with self._database.reading() as connection:
            asked = select(RUNS.label("runs"), R.cancel_at).where(R.response_id == response_id)
            row = connection.execute(asked).one_or_none()
            if row is None or not row.runs:
                return None
            if row.cancel_at is None:
                return _next_number(connection, response_id)
        self._end_now(response_id, CANCELLED, None)
        return None

    def write(self, response_id: str, piece: EventPiece | None, response: str | None) -> bool:
        """Add events, and the response without output as it is now. Returns whether its run is to end: it is cancelled,
        has ended or is gone."""
        with self._database.writing() as connection:
            row = connection.execute(
                select(R.cancel_at, RUNS.label("runs")).where(R.response_id == response_id).with_for_update()
            ).one_or_none()
            if row is None or not row.runs:
                return True
            more = self._add_events(connection, response_id, piece)
            text = None if row.cancel_at is not None else response
            if piece is not None or text is not None:
                values = _values(text, more) | ({} if piece is None else {"deadline_at": None})  # it starts in time
                connection.execute(update(RESPONSES).where(R.response_id == response_id).values(values))
            return row.cancel_at is not None

    def end(self, record: StoredResponse, piece: EventPiece | None, max_tenant_bytes: int) -> None:
        """The response has ended. `record`: with the items of its output alone; `piece`: its last events."""
        name = record.response_id
        with self._database.writing() as connection:
            chosen = R.response_id == name
            if not connection.execute(select(RUNS).where(chosen).with_for_update()).scalar():
                return
            more = self._add_events(connection, name, piece)
            count = connection.execute(select(func.count()).where(ITEMS.response_id == name)).scalar_one()
            outputs = [
                {
                    "response_id": name,
                    "number": count + number,
                    "tenant": record.tenant,
                    "item_id": item.item_id,
                    "is_output": True,
                    "body": item.text,
                }
                for number, item in enumerate(record.items)
            ]
            if outputs:
                connection.execute(self._database.insert(RESPONSE_ITEMS), outputs)
            more += sum(len(item.text.encode()) for item in record.items)
            connection.execute(update(RESPONSES).where(chosen).values(_values(record.text, more, is_over=True)))
            self._responses.make_room(connection, record.tenant, max_tenant_bytes)

    def fail(self, response_id: str, error: dict[str, Any]) -> None:
        """The response has failed, and ends with this error."""
        self._end_now(response_id, FAILED, error)

    def end_cancelled(self, response_id: str) -> None:
        """The response was cancelled before anything of it was made."""
        self._end_now(response_id, CANCELLED, None)

    def cancel(self, response_id: str, tenant: str) -> None:
        """Cancel a response that has not ended. Its run, if there is one, ends when it sees that, and adds what it has
        made."""
        with self._database.writing() as connection:
            chosen = R.response_id == response_id, R.tenant == tenant, RUNS
            body = connection.execute(select(R.body).where(*chosen).with_for_update()).scalar()
            if body is None:
                return
            cancelled = {"cancel_at": self._database.now(), **_values(as_json(ended(json.loads(body), CANCELLED)))}
            connection.execute(update(RESPONSES).where(*chosen).values(cancelled))
        idle = or_(R.worker.is_(None), R.leased_until <= self._database.now())
        with self._database.reading() as connection:
            is_idle = connection.execute(select(R.response_id).where(*chosen, idle)).scalar() is not None
        if is_idle:
            self._end_now(response_id, CANCELLED, None)

    def events(self, response_id: str, tenant: str, after: int, limit: int) -> EventPage:
        """Events behind the number `after`; a piece may have some before. Raises KeyError: no such response of the
        tenant, or it was not made in the background."""
        with self._database.reading() as connection:
            alive = R.response_id == response_id, R.tenant == tenant, R.expires_at > self._database.now()
            asked = select(RUNS.label("runs")).where(*alive, R.key_id.is_not(None))
            row = connection.execute(asked).one_or_none()
            if row is None:
                raise KeyError(response_id)
            chosen = (
                select(EVENTS.first, EVENTS.last, EVENTS.body)
                .where(EVENTS.response_id == response_id, EVENTS.last > after)
                .order_by(EVENTS.first)
                .limit(limit)
            )
            pieces = [EventPiece(*one) for one in connection.execute(chosen)]
            return EventPage(pieces, is_over=not row.runs and len(pieces) < limit)

    def _end_late(self, connection: Connection, row: Any) -> None:
        """End a job that nobody has at its deadline."""
        is_cancelled = row.cancel_at is not None
        status, error = (CANCELLED, None) if is_cancelled else (FAILED, MISSED_DEADLINE)
        self._end_in(connection, row.response_id, status, error)

    def _end_now(self, response_id: str, status: str, error: dict[str, Any] | None) -> None:
        with self._database.writing() as connection:
            self._end_in(connection, response_id, status, error)

    def _end_in(self, connection: Connection, response_id: str, status: str, error: dict[str, Any] | None) -> None:
        chosen = R.response_id == response_id, RUNS
        body = connection.execute(select(R.body).where(*chosen).with_for_update()).scalar()
        if body is None:
            return
        response = ended(json.loads(body), status, error)
        more = 0
        if status == FAILED:
            number = _next_number(connection, response_id)
            text = response_event("failed", number, {**response, "output": []})
            more = self._add_events(connection, response_id, EventPiece(number, number, text))
        connection.execute(update(RESPONSES).where(*chosen).values(_values(as_json(response), more, is_over=True)))

    def _add_events(self, connection: Connection, response_id: str, piece: EventPiece | None) -> int:
        """Add a piece; returns by how many bytes the events are more. One that is there from the same event on was
        written before its answer was lost: a longer one takes its place."""
        if piece is None:
            return 0
        same = EVENTS.response_id == response_id, EVENTS.first == piece.first
        before = connection.execute(select(EVENTS.last, octets(EVENTS.body).label("size")).where(*same)).one_or_none()
        if before is not None and before.last >= piece.last:
            return 0
        adding = self._database.insert(RESPONSE_EVENTS).values({"response_id": response_id, **piece._asdict()})
        sent = adding.excluded
        longer = {"last": sent.last, "body": sent.body}
        connection.execute(adding.on_conflict_do_update(index_elements=[EVENTS.response_id, EVENTS.first], set_=longer))
        return len(piece.body.encode()) - (0 if before is None else int(before.size))


def _values(text: str | None, more: int = 0, *, is_over: bool = False) -> dict[str, Any]:
    """The columns of a response with this text (None: with its own), whose events and items have so many bytes more.
    `is_over`: it has ended, and needs the copy of its request no more."""
    size = R.size + more
    values = dict[str, Any](OVER) if is_over else {}
    if text is not None:
        values["body"] = text
        size += len(text.encode()) - octets(R.body)
    if is_over:
        size -= octets(R.job)
    return values | {"size": size}


def _turns_of_tenants(now: float) -> Subquery:
    """The place of each job among its tenant's: those that run first, then those that wait, the oldest first. Jobs of a
    pause have none."""
    is_waiting = case((R.leased_until > now, 0), else_=1)
    place = func.row_number().over(partition_by=R.tenant, order_by=(is_waiting, R.created_at, R.response_id))
    chosen = RUNS, R.expires_at > now, or_(R.worker.is_not(None), R.leased_until <= now)
    return select(R.response_id, place.label("place")).where(*chosen).subquery()


def _next_number(connection: Connection, response_id: str) -> int:
    last = select(func.max(EVENTS.last)).where(EVENTS.response_id == response_id)
    found = connection.execute(last).scalar()
    return 0 if found is None else int(found) + 1
