"""Forms with a file: the file that arrives in any pieces, and callers who send what no SDK would."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from serve_app.http import body, multipart
from tests.fakes.batches import (
    BOUNDARY,
    FILE,
    FORM,
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
        assert await kept(lane) == ([], [])

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
        assert await kept(lane) == ([], [])

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
        assert await kept(lane) == ([], [])

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
        assert await kept(lane) == ([], [])

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


def test_rows_beyond_the_bound_are_refused() -> None:
    async def scenario(lane: Lane) -> None:
        reply = await upload(lane, PURPOSE, part("file", jsonl(row("a"), row("b"), row("c")), "rows.jsonl"))
        assert reply.error["code"] == "too_many_rows"
        assert "line 3:" in reply.error["message"]
        assert await kept(lane) == ([], [])

    run(scenario, batch={"max_rows": 2})


def test_a_client_that_leaves_in_the_middle_leaves_nothing() -> None:
    async def scenario(lane: Lane) -> None:
        async def gone() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        with pytest.raises(asyncio.CancelledError):
            await lane.request("POST", "/v1/files", [PURPOSE, FILE[:-10]], FORM, rest=gone)
        assert await kept(lane) == ([], [])

        async def silent() -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

        uploading = asyncio.create_task(lane.request("POST", "/v1/files", [PURPOSE, FILE[:-10]], FORM, rest=silent))
        await turns(20)
        assert len((await kept(lane))[0]) == 1, "it is in the middle"
        uploading.cancel()  # as Serve does when the client has gone
        await asyncio.wait({uploading})
        assert await kept(lane) == ([], [])

    run(scenario)


def test_a_silent_client_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multipart, "ARRIVAL_S", 0.05)

    async def scenario(lane: Lane) -> None:
        async def silent() -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

        reply = await lane.request("POST", "/v1/files", [PURPOSE, FILE[:-10]], FORM, rest=silent)
        assert (reply.status, reply.error["code"]) == (408, "request_timeout")
        assert await kept(lane) == ([], [])

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
