"""Files over HTTP, by the official SDK: their objects, who sees them, pages, downloads."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai.types import FileDeleted, FileObject

from serve_app.core.batches import BatchStatus
from serve_app.http.api import file_routes
from tests.fakes.asgi_client import Reply
from tests.fakes.batches import (
    ADMIN_KEY,
    FILE,
    FORM,
    OTHER_KEY,
    PURPOSE,
    ROWS,
    Lane,
    form,
    jsonl,
    kept,
    part,
    row,
    run,
    upload,
)
from tests.fakes.engines import turns

UNKNOWN = f"file-{'0' * 32}"


def test_a_file_goes_up_and_comes_back_by_the_sdk() -> None:
    async def scenario(lane: Lane) -> None:
        before = int(time.time())
        client = lane.sdk()
        made = await client.files.create(file=("rows.jsonl", ROWS), purpose="batch")
        FileObject.model_validate(made.model_dump(), strict=True)
        assert (made.filename, made.bytes, made.purpose, made.status) == ("rows.jsonl", len(ROWS), "batch", "processed")
        assert made.created_at >= before
        assert made.expires_at == made.created_at + 30 * 86_400
        assert await client.files.retrieve(made.id) == made
        content = await client.files.content(made.id)
        assert content.content == ROWS
        assert content.response.headers["content-length"] == str(len(ROWS))
        assert [one async for one in client.files.list(purpose="batch")] == [made]
        assert [one async for one in client.files.list(purpose="batch_output")] == []
        gone = await client.files.delete(made.id)
        FileDeleted.model_validate(gone.model_dump(), strict=True)
        with pytest.raises(openai.NotFoundError) as missing:
            await client.files.retrieve(made.id)
        assert missing.value.code == "file_not_found"
        assert await kept(lane) == ([], [])

    run(scenario)


def test_a_file_expires_when_the_client_says() -> None:
    async def scenario(lane: Lane) -> None:
        after: Any = {"anchor": "created_at", "seconds": 3600}
        made = await lane.sdk().files.create(file=("rows.jsonl", ROWS), purpose="batch", expires_after=after)
        assert made.expires_at == made.created_at + 3600
        record = await lane.store.batches.file(made.id, "night")
        past = replace(record, file_id=UNKNOWN, expires_at=1.0)
        await lane.store.batches.add_file(past)
        with pytest.raises(openai.NotFoundError):
            await lane.sdk().files.content(UNKNOWN)

    run(scenario)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"anchor": "created_at", "seconds": 3599}, "expires_after[seconds]"),
        ({"anchor": "created_at", "seconds": 30 * 86_400 + 1}, "expires_after[seconds]"),
        ({"anchor": "created_at", "seconds": "soon"}, "expires_after[seconds]"),
        ({"anchor": "created_at"}, "expires_after[seconds]"),
        ({"anchor": "last_used", "seconds": 3600}, "expires_after[anchor]"),
        ({"seconds": 3600}, "expires_after[anchor]"),
        ({"anchor": "created_at", "seconds": 3600, "minutes": 1}, "expires_after[minutes]"),
    ],
)
def test_an_expiry_that_is_none_is_refused_by_name(fields: Any, named: str) -> None:
    async def scenario(lane: Lane) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            await lane.sdk().files.create(file=("rows.jsonl", ROWS), purpose="batch", expires_after=fields)
        assert refused.value.param == named
        assert await kept(lane) == ([], [])

    run(scenario)


def test_pages_of_files_are_those_of_the_tenant_in_either_order() -> None:
    async def scenario(lane: Lane) -> None:
        client = lane.sdk()
        made = [(await client.files.create(file=(f"{n}.jsonl", ROWS), purpose="batch")).id for n in range(5)]
        await lane.sdk(OTHER_KEY).files.create(file=("other.jsonl", ROWS), purpose="batch")
        assert [one.id async for one in client.files.list()] == made[::-1]
        assert [one.id async for one in client.files.list(limit=2, order="asc")] == made
        first = await client.files.list(limit=2, order="asc")
        assert (first.has_more, [one.id for one in first.data]) == (True, made[:2])
        raw = json.loads((await lane.request("GET", "/v1/files", query=f"after={made[3]}&order=asc")).body)
        assert (raw["object"], raw["has_more"], raw["first_id"], raw["last_id"]) == ("list", False, made[4], made[4])
        empty = json.loads((await lane.request("GET", "/v1/files", query=f"after={made[0]}")).body)
        assert (empty["data"], empty["has_more"]) == ([], False)

    run(scenario)


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("limit=0", "limit"),
        ("limit=10001", "limit"),
        ("limit=ten", "limit"),
        ("limit=%D9%A3", "limit"),
        ("order=up", "order"),
        ("after=%00", "after"),
        ("colour=red", "colour"),
    ],
)
def test_a_wrong_parameter_of_the_list_is_named(query: str, named: str) -> None:
    async def scenario(lane: Lane) -> None:
        reply = await lane.request("GET", "/v1/files", query=query)
        assert (reply.status, reply.error["param"]) == (400, named)

    run(scenario)


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize("key", [OTHER_KEY, ADMIN_KEY])
def test_another_tenant_s_file_is_answered_like_an_unknown_one(method: str, key: str) -> None:
    async def scenario(lane: Lane) -> None:
        made = await lane.sdk().files.create(file=("rows.jsonl", ROWS), purpose="batch")
        paths = ["/v1/files/{}"] + (["/v1/files/{}/content"] if method == "GET" else [])
        for path in paths:
            known, unknown = [await lane.request(method, path.format(one), key=key) for one in (made.id, UNKNOWN)]
            assert (known.status, known.error["code"]) == (404, "file_not_found")
            assert known.body.replace(made.id.encode(), b"") == unknown.body.replace(UNKNOWN.encode(), b"")
        assert await kept(lane) == ([made.id], [made.id])

    run(scenario)


@pytest.mark.parametrize("name", ["", "x", "%00", "../../etc/passwd", "file-" + "A" * 32, UNKNOWN + "\n", "é" * 300])
def test_an_id_that_is_none_is_not_found(name: str) -> None:
    async def scenario(lane: Lane) -> None:
        lane.store.away = True  # the store is not asked
        reply = await lane.request("GET", f"/v1/files/{name}/content")
        assert reply.status in (404, 405)
        assert len(reply.body) < 600

    run(scenario)


def test_a_download_waits_for_its_reader_and_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_routes, "PIECE_BYTES", 64)

    async def scenario(lane: Lane) -> None:
        lines = jsonl(*[row(str(n)) for n in range(100)])
        file_id = json.loads((await upload(lane, PURPOSE, part("file", lines, "rows.jsonl"))).body)["id"]
        stopped = asyncio.Event()
        reply = Reply()

        async def reading(got: Reply) -> None:
            if len(got.chunks) == 3:
                stopped.set()
                await asyncio.Event().wait()

        path = f"/v1/files/{file_id}/content"
        taking = asyncio.create_task(lane.request("GET", path, reading=reading, reply=reply))
        await stopped.wait()
        await turns(50)
        assert lane.files.reads == 3, "nothing is read for a client that does not read"
        taking.cancel()
        await asyncio.wait({taking})
        assert taking.cancelled()
        assert lane.files.reads == 3
        assert (await lane.request("GET", path)).body == lines
        head = await lane.request("HEAD", path)
        assert (head.body, head.headers["content-length"]) == (b"", str(len(lines)))

    run(scenario)


def test_content_that_is_lost_in_the_middle_breaks_the_answer_and_before_it_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(file_routes, "PIECE_BYTES", 64)

    async def scenario(lane: Lane) -> None:
        file_id = json.loads((await upload(lane, PURPOSE, FILE)).body)["id"]
        path = f"/v1/files/{file_id}/content"
        whole = lane.files.content[file_id]
        lane.files.content[file_id] = whole[:100]
        reply = Reply()
        with pytest.raises(file_routes.Unavailable, match="ends at byte 100"):
            await lane.request("GET", path, reply=reply)
        assert (reply.status, reply.body, reply.ended) == (200, whole[:100], False)
        lane.files.away = True
        away = await lane.request("GET", path)
        assert (away.status, away.error["code"]) == (503, "no_store")

    run(scenario)


def test_a_file_that_a_batch_reads_is_not_deleted() -> None:
    async def scenario(lane: Lane) -> None:
        client = lane.sdk()
        made = await client.files.create(file=("rows.jsonl", ROWS), purpose="batch")
        batch = await client.batches.create(
            input_file_id=made.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        with pytest.raises(openai.ConflictError, match=batch.id) as refused:
            await client.files.delete(made.id)
        assert refused.value.code == "file_in_use"
        assert await kept(lane) == ([made.id], [made.id])
        await lane.set_batch(batch.id, status=BatchStatus.COMPLETED)
        await client.files.delete(made.id)
        assert await kept(lane) == ([], [])

    run(scenario)


BOUND = 1024
LARGE = jsonl(row("a", user="a" * 600))  # one fits, two do not


def test_an_upload_above_the_tenant_s_bytes_is_refused_until_a_file_is_deleted() -> None:
    async def scenario(lane: Lane) -> None:
        client = lane.sdk()
        made = await client.files.create(file=("1.jsonl", LARGE), purpose="batch")
        assert len(LARGE) < BOUND < 2 * len(LARGE)
        with pytest.raises(openai.APIStatusError, match=r"batch\.max_bytes_per_tenant") as refused:
            await client.files.create(file=("2.jsonl", LARGE), purpose="batch")
        assert (refused.value.status_code, refused.value.code) == (413, "storage_quota_exceeded")
        assert f"{BOUND} bytes" in str(refused.value)
        assert await kept(lane) == ([made.id], [made.id])
        await lane.sdk(OTHER_KEY).files.create(file=("3.jsonl", LARGE), purpose="batch")
        await client.files.delete(made.id)
        await client.files.create(file=("2.jsonl", LARGE), purpose="batch")

    run(scenario, batch={"max_bytes_per_tenant": BOUND})


def test_an_upload_is_refused_as_soon_as_it_is_above_the_bound_and_before_it_where_nothing_is_left() -> None:
    async def scenario(lane: Lane) -> None:
        async def never() -> dict[str, Any]:
            raise AssertionError("read on")

        too_long = part("file", LARGE + LARGE.replace(b"aaa", b"bbb"), "rows.jsonl")
        reply = await lane.request("POST", "/v1/files", [PURPOSE, too_long], FORM, rest=never)
        assert (reply.status, reply.error["code"]) == (413, "storage_quota_exceeded")
        assert await kept(lane) == ([], [])
        made = await lane.sdk().files.create(file=("1.jsonl", LARGE), purpose="batch")
        record = await lane.store.batches.file(made.id, "night")
        results = replace(record, file_id=UNKNOWN, purpose="batch_output", size=BOUND)
        await lane.store.batches.add_file(results)  # a worker's, which nobody refuses
        full = await lane.request("POST", "/v1/files", [], FORM, rest=never)
        assert (full.status, full.error["code"]) == (413, "storage_quota_exceeded")

    run(scenario, batch={"max_bytes_per_tenant": BOUND})


def test_uploads_at_once_are_within_the_bound_together_while_they_arrive() -> None:
    async def scenario(lane: Lane) -> None:
        may_end = asyncio.Event()
        whole = form(PURPOSE, part("file", LARGE, "rows.jsonl"))

        async def rest() -> dict[str, Any]:
            await may_end.wait()
            return {"type": "http.request", "body": whole[-1], "more_body": False}

        async def never() -> dict[str, Any]:
            raise AssertionError("read on")

        slow = asyncio.create_task(lane.request("POST", "/v1/files", whole[:-1], FORM, rest=rest))
        for _ in range(1000):  # bound: a call of the store each
            if await lane.store.batches.stored_bytes("night"):
                break
            await turns()
        second = await lane.request("POST", "/v1/files", [PURPOSE, part("file", LARGE, "2.jsonl")], FORM, rest=never)
        assert (second.status, second.error["code"]) == (413, "storage_quota_exceeded")
        may_end.set()
        first = await slow
        assert first.status == 200
        made = json.loads(first.body)["id"]
        assert await kept(lane) == ([made], [made])
        assert await lane.store.batches.stored_bytes("night") == len(LARGE)

    run(scenario, batch={"max_bytes_per_tenant": BOUND})


def test_an_upload_that_ends_gives_back_what_it_had_reserved() -> None:
    async def scenario(lane: Lane) -> None:
        bad = part("file", LARGE + b"no row", "rows.jsonl")
        reply = await lane.request("POST", "/v1/files", [*form(PURPOSE, bad)], FORM)
        assert reply.status == 400
        assert await lane.store.batches.stored_bytes("night") == 0
        await lane.sdk().files.create(file=("1.jsonl", LARGE), purpose="batch")

    run(scenario, batch={"max_bytes_per_tenant": BOUND})


def test_a_file_whose_content_cannot_be_removed_now_is_deleted_and_left_to_a_worker() -> None:
    async def scenario(lane: Lane) -> None:
        made = await lane.sdk().files.create(file=("rows.jsonl", ROWS), purpose="batch")
        lane.files.away = True
        assert (await lane.sdk().files.delete(made.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await lane.sdk().files.content(made.id)
        assert [one.file_id for one in await lane.store.batches.files_to_remove(1.0, 9)] == [made.id]

    run(scenario)
