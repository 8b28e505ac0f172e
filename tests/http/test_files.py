"""Files over HTTP: by the official SDK, and by callers who send what it never would."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai.types import FileDeleted, FileObject

from serve_app.http import body, file_routes, multipart
from tests.fakes.asgi_client import Reply
from tests.fakes.batches import ADMIN_KEY, OTHER_KEY, Lane, MemoryBatches, jsonl, row
from tests.fakes.engines import turns

ROWS = jsonl(row("a"), row("b"))
BOUNDARY = "x-boundary"
FORM = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
UNKNOWN = f"file-{'0' * 32}"


def run(scenario: Callable[[Lane], Awaitable[None]], **settings: Any) -> None:
    async def everything() -> None:
        await scenario(Lane(MemoryBatches(), **settings))

    asyncio.run(everything())


def part(name: str, content: bytes, filename: str | None = None, more: str = "") -> bytes:
    """A part of a form."""
    named = "" if filename is None else f'; filename="{filename}"'
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{named}\r\n{more}\r\n'
    return head.encode() + content + b"\r\n"


def form(*parts: bytes) -> list[bytes]:
    return [*parts, f"--{BOUNDARY}--\r\n".encode()]


PURPOSE, FILE = part("purpose", b"batch"), part("file", ROWS, "rows.jsonl")


async def upload(lane: Lane, *parts: bytes, **more: Any) -> Reply:
    return await lane.request("POST", "/v1/files", form(*parts), FORM, **more)


def kept(lane: Lane) -> tuple[list[str], list[str]]:
    """Ids of the files that are there: by their records, by their content."""
    records = lane.store.kept_files.values()
    return [one.file_id for one in records if one.deleted_at is None], list(lane.files.content)


def test_a_file_goes_up_and_comes_back_by_the_sdk() -> None:
    async def scenario(lane: Lane) -> None:
        before, client = int(time.time()), lane.sdk()
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
        assert kept(lane) == ([], [])

    run(scenario)


def test_a_file_expires_when_the_client_says() -> None:
    async def scenario(lane: Lane) -> None:
        after: Any = {"anchor": "created_at", "seconds": 3600}
        made = await lane.sdk().files.create(file=("rows.jsonl", ROWS), purpose="batch", expires_after=after)
        assert made.expires_at == made.created_at + 3600
        lane.store.kept_files[made.id] = replace(lane.store.kept_files[made.id], expires_at=1.0)
        with pytest.raises(openai.NotFoundError):
            await lane.sdk().files.content(made.id)

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
        assert kept(lane) == ([], [])

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
        assert kept(lane) == ([made.id], [made.id])

    run(scenario)


@pytest.mark.parametrize("name", ["", "x", "%00", "../../etc/passwd", "file-" + "A" * 32, UNKNOWN + "\n", "é" * 300])
def test_an_id_that_is_none_is_not_found(name: str) -> None:
    async def scenario(lane: Lane) -> None:
        lane.store.away = True  # the store is not asked
        reply = await lane.request("GET", f"/v1/files/{name}/content")
        assert reply.status in (404, 405)
        assert len(reply.body) < 600

    run(scenario)


@pytest.mark.parametrize(
    ("lines", "number"),
    [
        (ROWS + b"{oops\n", 3),
        (b"{oops\n" + ROWS, 1),
        (jsonl(row("a"), row("b"), row("a")), 3),
        (ROWS + b'{"custom_id": "c"', 3),
        (ROWS + b"\xff\xfe\n", 3),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_the_first_bad_line_refuses_the_upload_with_its_number(lines: bytes, number: int, size: int) -> None:
    async def scenario(lane: Lane) -> None:
        whole = b"".join(form(PURPOSE, part("file", lines, "rows.jsonl")))
        chunks = [whole[start : start + size] for start in range(0, len(whole), size)]
        reply = await lane.request("POST", "/v1/files", chunks, FORM)
        assert (reply.status, reply.error["param"]) == (400, "file")
        assert f"line {number}:" in reply.error["message"]
        assert kept(lane) == ([], [])

    run(scenario)


def test_a_file_in_any_pieces_is_the_same_file() -> None:
    """Also lines with what looks like the beginning of a boundary, and no newline behind the last one."""

    async def scenario(lane: Lane) -> None:
        lines = jsonl(row("a", text=f"\r\n--{BOUNDARY}"), row("--x-b")) + json.dumps(row("c")).encode()
        lines = lines.replace(b"\n", b"\r\n")
        whole = b"".join(form(PURPOSE, part("file", lines, "rows.jsonl")))
        for size in (1, 2, 3, 5, 64, len(whole)):
            chunks = [whole[start : start + size] for start in range(0, len(whole), size)]
            reply = await lane.request("POST", "/v1/files", chunks, FORM)
            assert reply.status == 200, reply.body
            assert lane.files.content[json.loads(reply.body)["id"]] == lines

    run(scenario)


def test_the_purpose_may_come_behind_the_file() -> None:
    async def scenario(lane: Lane) -> None:
        assert (await upload(lane, FILE, PURPOSE)).status == 200
        refused = await upload(lane, FILE, PURPOSE, part("expires_after[seconds]", b"3600"))
        assert (refused.status, refused.error["param"]) == (400, "expires_after[seconds]")
        assert len(lane.files.content) == 1

    run(scenario)


@pytest.mark.parametrize(
    ("parts", "status", "named"),
    [
        ((FILE,), 400, "purpose"),
        ((PURPOSE,), 400, "file"),
        ((), 400, "file"),
        ((part("purpose", b"fine-tune"), FILE), 400, "purpose"),
        ((FILE, part("purpose", b"batch_output")), 400, "purpose"),
        ((part("purpose", b"\xff"), FILE), 400, "purpose"),
        ((part("purpose", b"b" * 1025), FILE), 400, "purpose"),
        ((PURPOSE, PURPOSE, FILE), 400, "purpose"),
        ((PURPOSE, FILE, FILE), 400, "file"),
        ((PURPOSE, part("file", b"", "rows.jsonl")), 400, "file"),
        ((PURPOSE, part("file", b"\n\n", "rows.jsonl")), 400, "file"),
        ((PURPOSE, part("file", ROWS)), 400, "file"),
        ((PURPOSE, part("file", ROWS, "n" * 256)), 400, "file"),
        ((PURPOSE, part("file", ROWS, "a\tb")), 400, "file"),
        ((PURPOSE, part("file", ROWS, "a", "Content-Transfer-Encoding: base64\r\n")), 400, "file"),
        ((PURPOSE, part("colour", b"red"), FILE), 400, "colour"),
        ((PURPOSE, FILE, part("colour", b"red")), 400, "colour"),
        ((PURPOSE, part("", b"x"), FILE), 400, "body"),
        ((PURPOSE, part("file", ROWS, "a", "X: " + "y" * 5000 + "\r\n")), 400, "body"),
        ((PURPOSE, part("file", ROWS, "a", "X: y\r\n" * 9)), 400, "body"),
        ((PURPOSE, part("file", ROWS, "a", "no colon\r\n")), 400, "body"),
        ((PURPOSE, FILE, *[part(f"expires_after[{n}]", b"") for n in range(20)]), 400, "expires_after[0]"),
    ],
)
def test_a_form_that_is_wrong_is_refused_by_the_name_of_the_field(
    parts: tuple[bytes, ...], status: int, named: str
) -> None:
    async def scenario(lane: Lane) -> None:
        reply = await upload(lane, *parts)
        assert (reply.status, reply.error["param"]) == (status, named), reply.body
        assert len(reply.body) < 600
        assert kept(lane) == ([], [])

    run(scenario)


@pytest.mark.parametrize(
    ("headers", "chunks", "status", "named"),
    [
        ({"Content-Type": "application/json"}, [b"{}"], 415, "Content-Type"),
        ({}, form(PURPOSE, FILE), 415, "Content-Type"),
        ({"Content-Type": "multipart/form-data"}, form(PURPOSE, FILE), 400, "Content-Type"),
        ({"Content-Type": "multipart/form-data; boundary="}, form(PURPOSE, FILE), 400, "Content-Type"),
        ({"Content-Type": f"multipart/form-data; boundary={'b' * 300}"}, [], 400, "Content-Type"),
        ({"Content-Type": "multipart/form-data; boundary=other"}, form(PURPOSE, FILE), 400, "body"),
        (FORM | {"Content-Encoding": "gzip"}, form(PURPOSE, FILE), 415, "Content-Encoding"),
        (FORM | {"Content-Length": "many"}, form(PURPOSE, FILE), 400, "Content-Length"),
        (FORM | {"Content-Length": str(10**12)}, [], 413, "file"),
        (FORM, [], 400, "body"),
        (FORM, [b"\r\n" * 1000], 400, "body"),
        (FORM, [PURPOSE, FILE], 400, "body"),
        (FORM, [PURPOSE, FILE[:-20]], 400, "body"),
        (FORM, [b"--x-boundary--\r\n"], 400, "file"),
    ],
)
def test_what_is_no_form_is_refused(headers: dict[str, str], chunks: list[bytes], status: int, named: str) -> None:
    async def scenario(lane: Lane) -> None:
        reply = await lane.request("POST", "/v1/files", chunks, headers)
        assert (reply.status, reply.error["param"]) == (status, named), reply.body
        assert kept(lane) == ([], [])

    run(scenario)


def endless(piece: bytes, sent: list[int]) -> Callable[[], Awaitable[dict[str, Any]]]:
    """A body that never ends."""

    async def rest() -> dict[str, Any]:
        sent.append(len(piece))
        assert sum(sent) < 10**7, "nobody has stopped reading"
        return {"type": "http.request", "body": piece, "more_body": True}

    return rest


@pytest.mark.parametrize(
    ("beginning", "piece", "status", "named"),
    [
        ([PURPOSE, FILE[:-2]], ROWS.replace(b'"a"', b'"c"'), 400, "file"),
        ([PURPOSE, FILE[:100]], b"x" * 1000, 413, "file"),
        ([part("purpose", b"")[:-2]], b"x" * 1000, 400, "purpose"),
        ([PURPOSE, FILE], b"--x-boundary\r\nX: ", 400, "body"),
        ([PURPOSE, FILE, b"--x-boundary\r\n"], b"x" * 1000, 400, "body"),
        ([], b"\r\n" * 500, 413, "file"),
        (form(PURPOSE, FILE), b"epilogue" * 100, 413, "file"),
    ],
)
def test_a_form_that_never_ends_is_ended(beginning: list[bytes], piece: bytes, status: int, named: str) -> None:
    async def scenario(lane: Lane) -> None:
        sent: list[int] = []
        reply = await lane.request("POST", "/v1/files", beginning, FORM, rest=endless(piece, sent))
        assert (reply.status, reply.error["param"]) == (status, named), reply.body
        assert sum(sent) < 200_000
        assert kept(lane) == ([], [])

    run(scenario, batch={"max_file_bytes": 20_000})


def test_a_file_above_the_bound_is_a_413_and_one_of_the_bound_is_not() -> None:
    async def scenario(lane: Lane) -> None:
        lines = jsonl(row("a", text="x" * 2000))
        full = lines[:-1] + b" " * (4096 - len(lines)) + b"\n"
        assert (await upload(lane, PURPOSE, part("file", full, "rows.jsonl"))).status == 200
        reply = await upload(lane, PURPOSE, part("file", full + b"\n", "rows.jsonl"))
        assert (reply.status, reply.error["code"], reply.error["param"]) == (413, "body_too_large", "file")
        assert "batch.max_file_bytes" in reply.error["message"]
        assert len(lane.files.content) == 1

    run(scenario, batch={"max_file_bytes": 4096})


def test_rows_beyond_the_bound_and_a_line_beyond_a_body_are_refused() -> None:
    async def scenario(lane: Lane) -> None:
        reply = await upload(lane, PURPOSE, part("file", jsonl(row("a"), row("b"), row("c")), "rows.jsonl"))
        assert reply.error["code"] == "too_many_rows"
        assert "line 3:" in reply.error["message"]
        reply = await upload(lane, PURPOSE, part("file", jsonl(row("a", text="x" * 3000)), "rows.jsonl"))
        assert (reply.error["code"], reply.error["param"]) == ("too_long", "file")
        assert kept(lane) == ([], [])

    run(scenario, batch={"max_rows": 2}, http={"max_body_bytes": 2048})


def test_a_client_that_leaves_in_the_middle_leaves_nothing() -> None:
    async def scenario(lane: Lane) -> None:
        async def gone() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        with pytest.raises(asyncio.CancelledError):
            await lane.request("POST", "/v1/files", [PURPOSE, FILE[:-10]], FORM, rest=gone)
        assert kept(lane) == ([], [])

        async def silent() -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

        uploading = asyncio.create_task(lane.request("POST", "/v1/files", [PURPOSE, FILE[:-10]], FORM, rest=silent))
        await turns(20)
        assert len(lane.store.kept_files) == 2, "it is in the middle"
        uploading.cancel()  # as Serve does when the client has gone
        await asyncio.wait({uploading})
        assert kept(lane) == ([], [])

    run(scenario)


def test_a_silent_client_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multipart, "ARRIVAL_S", 0.05)

    async def scenario(lane: Lane) -> None:
        async def silent() -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

        reply = await lane.request("POST", "/v1/files", [PURPOSE, FILE[:-10]], FORM, rest=silent)
        assert (reply.status, reply.error["code"]) == (408, "request_timeout")
        assert kept(lane) == ([], [])

    run(scenario)


@pytest.mark.parametrize("lost", ["files", "store"])
def test_a_file_that_cannot_be_kept_is_refused_as_a_whole(lost: str) -> None:
    async def scenario(lane: Lane) -> None:
        getattr(lane, lost).away = True
        reply = await upload(lane, PURPOSE, FILE)
        assert (reply.status, reply.error["code"]) == (503, "no_store")
        getattr(lane, lost).away = False
        assert lane.files.content == {}
        found = json.loads((await lane.request("GET", "/v1/files")).body)
        assert found["data"] == []

    run(scenario)


def test_an_upload_is_never_in_memory_as_a_whole() -> None:
    async def scenario(lane: Lane) -> None:
        lines = jsonl(*[row(str(n), text="x" * 1000) for n in range(2000)])
        reply = await upload(lane, PURPOSE, part("file", lines, "rows.jsonl"))  # one message of megabytes
        assert reply.status == 200
        assert lane.files.most_held <= multipart.SLICE_BYTES < body.LARGE_BYTES * 2
        assert lane.files.content[json.loads(reply.body)["id"]] == lines

    run(scenario)


def test_a_download_waits_for_its_reader_and_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_routes, "PIECE_BYTES", 64)

    async def scenario(lane: Lane) -> None:
        lines = jsonl(*[row(str(n)) for n in range(100)])
        file_id = json.loads((await upload(lane, PURPOSE, part("file", lines, "rows.jsonl"))).body)["id"]
        stopped, reply = asyncio.Event(), Reply()

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
        path, whole = f"/v1/files/{file_id}/content", lane.files.content[file_id]
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
        assert kept(lane) == ([made.id], [made.id])

    run(scenario)
