"""Responses made in the background, in the store: jobs, leases, events and ends, the same on every database."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import select

from serve_app.core.responses import BackgroundJob, EventPiece, StoredItem, as_json
from serve_app.errors import BodyTooLarge
from serve_app.store.database import Database
from serve_app.store.sql import SqlStore
from serve_app.store.tables import RESPONSES
from tests.store.test_responses import KEEP_S, NOW, ROOM, Clock, turn

LEASE_S = 25.0
CLAIMS = itertools.count()
BEGINNING = EventPiece(0, 1, "event: a\n\nevent: b\n\n")
REQUEST = {"model": "m", "input": "é"}
JOB = as_json({"request": REQUEST, "session_id": "session"})


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sql(url: str, clock: Clock) -> SqlStore:
    return SqlStore(url, clock)


def create(
    sql: SqlStore,
    number: int = 1,
    *,
    tenant: str = "acme",
    at: float = NOW,
    text: str = "",
    room: int = ROOM,
    deadline_at: float | None = None,
) -> str:
    record = turn(number, tenant=tenant, at=at, text=text)
    queued = replace(record, items=record.items[:1], text=json.dumps({"id": record.response_id, "status": "queued"}))
    job = BackgroundJob(record.response_id, tenant, "key", REQUEST, "session", 0, deadline_at)
    made = sql.background.create(queued, job, BEGINNING, room)
    assert made == sql.background.create(queued, job, BEGINNING, room) == queued  # a repeat changes nothing
    return made.response_id


def claim(sql: SqlStore, worker: str, limit: int, name: str = "") -> list[BackgroundJob]:
    return sql.background.claim(worker, limit, LEASE_S, name or f"claim {next(CLAIMS)}")


def names_of(jobs: list[BackgroundJob]) -> list[str]:
    return [job.response_id for job in jobs]


def status(sql: SqlStore, name: str) -> str:
    return str(sql.responses.response(name, "acme").shown()["status"])


def done(name: str, **fields: Any) -> Any:
    record = turn(int(name.removeprefix("resp_")))
    text = json.dumps({"id": name, "status": "completed"})
    return replace(record, items=(StoredItem("msg_out", True, json.dumps({"id": "msg_out"})),), text=text)


def test_a_job_is_claimed_by_one_worker_until_its_lease_ends(sql: SqlStore, clock: Clock) -> None:
    names = [create(sql, number) for number in (1, 2, 3)]
    (first,) = claim(sql, "a", 1)
    assert (first.response_id, first.key_id, first.session_id, first.request) == (
        names[0],
        "key",
        "session",
        {"model": "m", "input": "é"},
    )
    assert [job.response_id for job in claim(sql, "b", 9)] == names[1:]
    clock.now += LEASE_S - 1
    sql.background.renew("a", names, LEASE_S)
    clock.now += 1
    assert [job.response_id for job in claim(sql, "c", 9)] == names[1:]
    sql.background.release("a", names[0], count_attempt=True)
    sql.background.release("a", names[1], count_attempt=True)  # c has it
    (again,) = claim(sql, "d", 9)
    assert (again.response_id, again.attempts) == (names[0], 1)


def test_a_claim_whose_answer_was_lost_is_repeated(sql: SqlStore) -> None:
    names = [create(sql, number) for number in (1, 2, 3)]
    held = claim(sql, "a", 2, "first")
    assert names_of(held) == names[:2]
    assert claim(sql, "a", 2, "first") == held
    assert names_of(claim(sql, "b", 2, "first")) == names[2:]  # names are a worker's own
    sql.background.release("a", names[0], count_attempt=False)
    assert names_of(claim(sql, "a", 2, "first")) == names[1:2]


def test_tenants_take_turns(sql: SqlStore) -> None:
    many = [create(sql, number) for number in range(5)]
    few = [create(sql, number, tenant="other") for number in (5, 6, 7)]
    assert names_of(claim(sql, "a", 3)) == [many[0], few[0], many[1]]
    assert names_of(claim(sql, "b", 1)) == [few[1]]
    sql.background.release("b", few[1], count_attempt=False, pause_s=5.0)  # keeps no place, and stops no other
    assert names_of(claim(sql, "b", 9)) == [few[2], *many[2:]]


def test_a_job_of_a_pause_is_nobody_s_until_its_end(sql: SqlStore, clock: Clock) -> None:
    name = create(sql)
    claim(sql, "a", 1)
    sql.background.release("a", name, count_attempt=False, pause_s=5.0)
    sql.background.renew("a", [name], LEASE_S)
    clock.now += 4
    assert claim(sql, "b", 9) == []
    clock.now += 1
    assert names_of(claim(sql, "b", 9)) == [name]
    sql.background.release("b", name, count_attempt=False, pause_s=5.0)
    sql.background.cancel(name, "acme")
    assert (status(sql, name), sql.background.events(name, "acme", 1, 9)) == ("cancelled", ([], True))


@pytest.mark.parametrize("by_claim", [False, True])
def test_a_cancelled_job_whose_run_was_left_ends_instead_of_its_next_run(
    sql: SqlStore, clock: Clock, by_claim: bool
) -> None:
    name = create(sql)
    claim(sql, "a", 1)
    sql.background.cancel(name, "acme")
    assert not sql.background.events(name, "acme", 1, 9).is_over  # its run would end it
    if by_claim:
        clock.now += LEASE_S
        assert claim(sql, "b", 9) == []
    else:
        assert sql.background.begin(name) is None
    assert (status(sql, name), sql.background.events(name, "acme", 1, 9)) == ("cancelled", ([], True))
    sql.background.end(done(name), EventPiece(2, 2, "late"), ROOM)
    assert status(sql, name) == "cancelled"


def test_a_longer_piece_takes_the_place_of_the_one_whose_answer_was_lost(sql: SqlStore) -> None:
    name = create(sql)
    sql.background.write(name, EventPiece(2, 3, "cd"), None)
    sql.background.end(done(name), EventPiece(2, 5, "cdef"), ROOM)
    assert sql.background.events(name, "acme", 3, 9) == ([EventPiece(2, 5, "cdef")], True)
    other = create(sql, 2)
    sql.background.write(other, EventPiece(2, 4, "cde"), None)
    sql.background.write(other, EventPiece(2, 3, "cd"), None)
    assert sql.background.events(other, "acme", 1, 9).pieces == [EventPiece(2, 4, "cde")]


def test_a_response_above_the_tenant_s_bytes_is_refused_and_leaves_nothing(sql: SqlStore) -> None:
    sql.responses.add(turn(2), ROOM)
    with pytest.raises(BodyTooLarge) as caught:
        create(sql, 1, text="x" * 5000, room=4000)
    assert (caught.value.param, caught.value.code) == ("store", "storage_quota_exceeded")
    assert sql.responses.response("resp_2", "acme")
    with pytest.raises(KeyError):
        sql.background.events("resp_1", "acme", -1, 9)
    sql.background.end(done("resp_1"), None, ROOM)
    create(sql, 1)
    assert sql.background.events("resp_1", "acme", -1, 9).pieces == [BEGINNING]


def test_what_nobody_has_at_its_deadline_fails_and_what_runs_goes_on(sql: SqlStore, clock: Clock) -> None:
    runs, begun, waits, paused, cancelled, later = [
        create(sql, number, deadline_at=NOW + at) for number, at in enumerate((5, 5, 5, 5, 5, 60))
    ]
    assert names_of(claim(sql, "a", 2)) == [runs, begun]
    assert not sql.background.write(begun, EventPiece(2, 2, "c"), None)
    held = claim(sql, "b", 3)
    assert [job.deadline_at for job in held] == [NOW + 5] * 3
    sql.background.release("b", waits, count_attempt=False, has_begun=False)
    sql.background.release("b", paused, count_attempt=False, pause_s=30.0, has_begun=False)
    sql.background.cancel(cancelled, "acme")
    clock.now += 5
    sql.background.release("b", cancelled, count_attempt=False)
    assert claim(sql, "c", 0) == []  # a worker without room ends them, too
    assert [status(sql, name) for name in (waits, paused, cancelled)] == ["failed", "failed", "cancelled"]
    assert sql.responses.response(waits, "acme").shown()["error"]["code"] == "deadline"
    assert sql.background.events(waits, "acme", 1, 9).is_over
    assert names_of(claim(sql, "c", 9)) == [later]
    assert sql.background.begin(runs) == 2
    clock.now += LEASE_S
    sql.background.renew("c", [later], LEASE_S)
    again = claim(sql, "d", 9)  # the worker of both was lost: its router knows whether they have begun
    assert [(one.response_id, one.deadline_at) for one in again] == [(runs, NOW + 5), (begun, None)]


def test_one_id_is_of_one_request(sql: SqlStore) -> None:
    record = replace(turn(1), items=turn(1).items[:1])
    job = BackgroundJob(record.response_id, "acme", "key", {"model": "m"})
    asked = record, job, BEGINNING, ROOM
    assert sql.background.create(*asked, b"one") == sql.background.create(*asked, b"one") == record
    for other in (b"two", None):
        with pytest.raises(ValueError, match="another response"):
            sql.background.create(*asked, other)
    assert names_of(claim(sql, "a", 9)) == [record.response_id]


def test_a_response_whose_time_is_over_is_made_anew_under_its_id(sql: SqlStore, clock: Clock) -> None:
    name = create(sql)
    sql.background.end(done(name), EventPiece(2, 2, "c"), ROOM)
    clock.now += 2 * KEEP_S
    assert create(sql, at=clock.now) == name
    assert (status(sql, name), sql.background.events(name, "acme", -1, 9)) == ("queued", ([BEGINNING], False))
    assert names_of(claim(sql, "a", 9)) == [name]


def test_events_are_only_added_to_and_end_with_the_response(sql: SqlStore) -> None:
    name = create(sql)
    assert sql.background.begin(name) == 2
    assert not sql.background.write(name, EventPiece(2, 3, "cd"), json.dumps({"id": name, "status": "in_progress"}))
    assert not sql.background.write(name, EventPiece(2, 3, "cd"), None)
    assert (sql.background.begin(name), status(sql, name)) == (4, "in_progress")
    assert sql.background.events(name, "acme", 1, 9) == ([EventPiece(2, 3, "cd")], False)
    sql.background.end(done(name), EventPiece(4, 4, "e"), ROOM)
    sql.background.end(done(name), EventPiece(4, 4, "e"), ROOM)
    assert sql.background.events(name, "acme", -1, 2) == ([BEGINNING, EventPiece(2, 3, "cd")], False)
    assert sql.background.events(name, "acme", 3, 2) == ([EventPiece(4, 4, "e")], True)
    found = sql.responses.response(name, "acme")
    assert [(item.item_id, item.is_output) for item in found.items] == [("msg_1_in", False), ("msg_out", True)]
    assert status(sql, name) == "completed"
    assert (sql.background.begin(name), claim(sql, "a", 9)) == (None, [])
    assert sql.background.write(name, EventPiece(9, 9, "late"), None)
    assert sql.background.events(name, "acme", 4, 9) == ([], True)


def size_of(url: str, name: str) -> int:
    """The bytes that count for the tenant."""
    with Database(url, lambda: NOW).reading() as connection:
        return int(connection.execute(select(RESPONSES.c.size).where(RESPONSES.c.response_id == name)).scalar_one())


def bytes_kept(sql: SqlStore, name: str, job: bool) -> int:
    """The same, counted anew from what the store has."""
    events = sum(len(piece.body.encode()) for piece in sql.background.events(name, "acme", -1, 99).pieces)
    return sql.responses.response(name, "acme").size + events + (len(JOB.encode()) if job else 0)


def test_bytes_are_those_of_record_job_and_events_whatever_happens(url: str, sql: SqlStore) -> None:
    name = create(sql, text="é" * 100)
    assert size_of(url, name) == bytes_kept(sql, name, job=True)
    sql.background.write(name, EventPiece(2, 3, "é" * 50), json.dumps({"id": name, "status": "in_progress"}))
    sql.background.write(name, EventPiece(2, 3, "é" * 50), None)
    assert size_of(url, name) == bytes_kept(sql, name, job=True)
    sql.background.write(name, EventPiece(2, 5, "é" * 90), None)  # in place of the shorter one
    assert size_of(url, name) == bytes_kept(sql, name, job=True)
    sql.background.end(done(name), EventPiece(6, 6, "ü"), ROOM)
    assert size_of(url, name) == bytes_kept(sql, name, job=False)
    for number in (2, 3):
        create(sql, number)
    sql.background.fail("resp_2", {"code": "server_error", "message": "ö"})
    sql.background.cancel("resp_3", "acme")
    assert [size_of(url, one) for one in ("resp_2", "resp_3")] == [
        bytes_kept(sql, one, job=False) for one in ("resp_2", "resp_3")
    ]


def test_the_copy_of_a_request_that_waits_counts_for_the_tenant(url: str, sql: SqlStore) -> None:
    size = size_of(url, create(sql))
    assert size > len(JOB) + len(BEGINNING.body)
    assert sql.responses.delete("resp_1", "acme")
    with pytest.raises(BodyTooLarge):
        create(sql, room=size - 1)
    create(sql, room=size)


def test_another_tenant_has_no_events(sql: SqlStore) -> None:
    name = create(sql)
    sql.responses.add(turn(5), ROOM)
    for wrong, tenant in ((name, "other"), ("resp_5", "acme"), ("resp_9", "acme")):
        with pytest.raises(KeyError):
            sql.background.events(wrong, tenant, -1, 9)
    sql.background.cancel(name, "other")
    assert status(sql, name) == "queued"


def test_a_response_that_waits_is_cancelled_at_once_and_one_that_runs_when_its_run_sees_it(sql: SqlStore) -> None:
    waiting = create(sql, 1)
    sql.background.cancel(waiting, "acme")
    assert (status(sql, waiting), sql.background.events(waiting, "acme", 1, 9)) == ("cancelled", ([], True))
    runs = create(sql, 2)
    claim(sql, "a", 9)
    assert not sql.background.write(runs, None, None)
    sql.background.cancel(runs, "acme")
    assert sql.background.write(runs, EventPiece(2, 2, "c"), json.dumps({"status": "in_progress"}))
    assert (status(sql, runs), sql.background.events(runs, "acme", 1, 9).is_over) == ("cancelled", False)
    sql.background.end_cancelled(runs)
    assert (status(sql, runs), sql.background.events(runs, "acme", 1, 9).is_over) == ("cancelled", True)


def test_a_response_that_failed_ends_with_an_event_that_says_so(sql: SqlStore) -> None:
    name = create(sql)
    error = {"code": "server_error", "message": "lost"}
    sql.background.fail(name, error)
    sql.background.fail(name, {"code": "server_error", "message": "again"})
    (piece,), is_over = sql.background.events(name, "acme", 1, 9)
    event = json.loads(piece.body.partition("data: ")[2])
    assert (piece.first, is_over, event["type"], event["sequence_number"]) == (2, True, "response.failed", 2)
    assert event["response"]["error"] == sql.responses.response(name, "acme").shown()["error"] == error


def test_what_runs_cannot_be_continued_and_what_is_deleted_leaves_nothing(sql: SqlStore) -> None:
    name = create(sql)
    assert sql.responses.chain("acme", name, [], ROOM).is_running
    assert sql.responses.delete(name, "acme")
    assert (sql.background.begin(name), sql.background.write(name, None, None)) == (None, True)
    sql.background.end(done(name), EventPiece(2, 2, "c"), ROOM)
    with pytest.raises(KeyError):
        sql.background.events(name, "acme", -1, 9)
    assert claim(sql, "a", 9) == []
    assert create(sql) == name
    assert sql.background.events(name, "acme", -1, 9) == ([BEGINNING], False)


def test_a_job_ends_with_the_time_of_its_response(sql: SqlStore, clock: Clock) -> None:
    create(sql)
    clock.now = NOW + 2 * 86_400
    assert claim(sql, "a", 9) == []
    assert sql.responses.forget(9, KEEP_S) == 1
