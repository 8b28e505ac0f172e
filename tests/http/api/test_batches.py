"""Batches over HTTP by the official SDK: their objects, who sees them, and what is refused."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai.types import Batch

from serve_app.core.batches import BatchStatus, RowError
from tests.fakes.batches import ADMIN_KEY, KEY, OTHER_KEY, ROWS, Lane, run

CHAT = "/v1/chat/completions"
UNKNOWN_FILE = f"file-{'0' * 32}"
UNKNOWN_BATCH = f"batch_{'0' * 32}"
NO_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


async def uploaded(lane: Lane, key: str = KEY) -> str:
    """The id of a file of two rows."""
    return (await lane.sdk(key).files.create(file=("rows.jsonl", ROWS), purpose="batch")).id


async def create(lane: Lane, key: str = KEY, **fields: Any) -> Batch:
    asked: Any = {"endpoint": CHAT, "completion_window": "24h"} | fields
    if "input_file_id" not in asked:
        asked["input_file_id"] = await uploaded(lane, key)
    return await lane.sdk(key).batches.create(**asked)


async def posted(lane: Lane, fields: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    return await lane.request("POST", "/v1/batches", [json.dumps(fields).encode()], headers)


def checked(batch: Batch) -> Batch:
    """A batch whose fields have OpenAI's types to the letter, and no other fields."""
    Batch.model_validate(batch.model_dump(), strict=True)
    assert batch.model_extra == {}
    return batch


def test_a_batch_is_openai_s_object_from_its_creation_on() -> None:
    async def scenario(lane: Lane) -> None:
        before = int(time.time())
        file_id = await uploaded(lane)
        made = checked(await create(lane, input_file_id=file_id, metadata={"night": "shift"}))
        assert (made.object, made.status, made.endpoint, made.input_file_id) == ("batch", "validating", CHAT, file_id)
        assert made.created_at >= before
        assert made.expires_at == made.created_at + 24 * 3600
        assert (made.completion_window, made.metadata, made.errors) == ("24h", {"night": "shift"}, None)
        assert [getattr(made, f"{name}_at") for name in NO_TIMES] == [None] * len(NO_TIMES)
        assert made.request_counts is not None
        assert made.request_counts.model_dump() == {"total": 0, "completed": 0, "failed": 0}
        assert await lane.sdk().batches.retrieve(made.id) == made
        stored = await lane.store.batches.batch(made.id, None)
        assert (stored.tenant, stored.key_id) == ("night", "night")

    run(scenario)


def test_a_batch_that_is_done_shows_all_of_it() -> None:
    async def scenario(lane: Lane) -> None:
        made = await create(lane)
        times = {f"{name}_at": 1.9 + place for place, name in enumerate(NO_TIMES)}
        errors = (RowError("invalid_json", "not JSON", 7, "body"), RowError("no_rows", "none"))
        files = {"output_file_id": "file-1", "error_file_id": "file-2"}
        done = {"status": BatchStatus.COMPLETED, "total": 9, "completed": 7, "failed": 2, "errors": errors}
        await lane.set_batch(made.id, **times, **files, **done)
        shown = checked(await lane.sdk().batches.retrieve(made.id))
        assert [getattr(shown, f"{name}_at") for name in NO_TIMES] == [1, 2, 3, 4, 5, 6, 7]
        assert (shown.status, shown.output_file_id, shown.error_file_id) == ("completed", "file-1", "file-2")
        assert shown.errors is not None
        assert shown.errors.data is not None
        assert [(one.code, one.line, one.param) for one in shown.errors.data] == [
            ("invalid_json", 7, "body"),
            ("no_rows", None, None),
        ]
        assert shown.request_counts is not None
        assert shown.request_counts.model_dump() == {"total": 9, "completed": 7, "failed": 2}
        assert shown.metadata is None

    run(scenario)


@pytest.mark.parametrize("status", list(BatchStatus))
def test_every_status_is_one_of_openai_s(status: BatchStatus) -> None:
    async def scenario(lane: Lane) -> None:
        made = await create(lane)
        await lane.set_batch(made.id, status=status)
        assert checked(await lane.sdk().batches.retrieve(made.id)).status == status.value

    run(scenario)


@pytest.mark.parametrize(("window", "hours"), [("1h", 1), ("24h", 24), ("168h", 168)])
def test_a_completion_window_is_whole_hours_up_to_a_week(window: str, hours: int) -> None:
    async def scenario(lane: Lane) -> None:
        made = await create(lane, completion_window=window)
        assert made.expires_at == made.created_at + hours * 3600

    run(scenario)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": "169h"}, "completion_window"),
        ({"completion_window": "1.5h"}, "completion_window"),
        ({"completion_window": "24h\n"}, "completion_window"),
        ({"completion_window": "٢h"}, "completion_window"),
        ({"completion_window": 24}, "completion_window"),
        ({"endpoint": "/v1/score"}, "endpoint"),
        ({"endpoint": "/v1/chat/completions/"}, "endpoint"),
        ({"endpoint": ["/v1/chat/completions"]}, "endpoint"),
        ({"input_file_id": None}, "input_file_id"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"metadata": {str(n): "v" for n in range(17)}}, "metadata"),
        ({"metadata": ["k"]}, "metadata"),
        ({"priority": "high"}, "priority"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "output_expires_after"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], named: str) -> None:
    async def scenario(lane: Lane) -> None:
        given = {"input_file_id": await uploaded(lane), "endpoint": CHAT, "completion_window": "24h"}
        reply = await posted(lane, given | fields)
        assert (reply.status, reply.error["param"]) == (400, named), reply.body
        assert await lane.store.batches.batches(None, after=None, limit=9) == []

    run(scenario)


def test_a_field_that_is_null_asks_for_nothing() -> None:
    async def scenario(lane: Lane) -> None:
        given = {"input_file_id": await uploaded(lane), "endpoint": CHAT, "completion_window": "24h"}
        reply = await posted(lane, given | {"output_expires_after": None, "metadata": None})
        assert (reply.status, json.loads(reply.body)["metadata"]) == (200, None), reply.body

    run(scenario)


def test_a_key_of_metadata_that_is_too_long_is_refused() -> None:
    async def scenario(lane: Lane) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            await create(lane, metadata={"k" * 65: "v"})
        assert str(refused.value.param).startswith("metadata.")
        assert len(str(refused.value)) < 1000
        full = {f"{n:064}": "v" * 512 for n in range(16)}
        assert (await create(lane, metadata=full)).metadata == full

    run(scenario)


@pytest.mark.parametrize("missing", ["input_file_id", "endpoint", "completion_window"])
def test_a_missing_field_is_named(missing: str) -> None:
    async def scenario(lane: Lane) -> None:
        given = {"input_file_id": await uploaded(lane), "endpoint": CHAT, "completion_window": "24h"}
        reply = await posted(lane, {name: value for name, value in given.items() if name != missing})
        assert (reply.status, reply.error["param"]) == (400, missing)

    run(scenario)


def test_the_input_must_be_a_file_of_the_tenant_for_batches() -> None:
    async def scenario(lane: Lane) -> None:
        theirs = await uploaded(lane, OTHER_KEY)
        ours = await uploaded(lane)
        gone = await uploaded(lane)
        await lane.sdk().files.delete(gone)
        for file_id in (theirs, UNKNOWN_FILE, "../x", gone):
            with pytest.raises(openai.NotFoundError) as missing:
                await create(lane, input_file_id=file_id)
            assert (missing.value.code, missing.value.param) == ("file_not_found", "input_file_id")
        record = await lane.store.batches.file(ours, None)
        changes: tuple[tuple[dict[str, Any], type[openai.APIStatusError]], ...] = (
            ({"size": None}, openai.NotFoundError),
            ({"expires_at": 1.0}, openai.NotFoundError),
            ({"purpose": "batch_output"}, openai.BadRequestError),
        )
        for number, (change, error) in enumerate(changes):
            file_id = f"file-{number:032}"
            await lane.store.batches.add_file(replace(record, file_id=file_id, **change))
            with pytest.raises(error) as refused:
                await create(lane, input_file_id=file_id)
            assert refused.value.param == "input_file_id"
        assert await lane.store.batches.batches(None, after=None, limit=9) == []

    run(scenario)


async def asked_again(lane: Lane, key: str, file_id: str, *, of: str = KEY, **fields: Any) -> Batch:
    """A batch made with an `Idempotency-Key`."""
    asked: Any = {"endpoint": CHAT, "completion_window": "24h", "input_file_id": file_id} | fields
    return await lane.sdk(of).batches.create(**asked, extra_headers={"Idempotency-Key": key})


def test_a_batch_asked_for_again_under_its_idempotency_key_is_the_first_one_at_any_router() -> None:
    async def scenario(lane: Lane) -> None:
        file_id = await uploaded(lane)
        made = await asked_again(lane, "night-1", file_id, metadata={"a": "b"})
        other_router = Lane(lane.store.file.parent)
        assert await asked_again(other_router, "night-1", file_id, metadata={"a": "b"}) == made
        await lane.set_batch(made.id, status=BatchStatus.COMPLETED)
        await lane.sdk().files.delete(file_id)
        assert (await asked_again(lane, "night-1", file_id, metadata={"a": "b"})).status == "completed"
        assert [one.id async for one in lane.sdk().batches.list()] == [made.id]
        other_router.store.sql.close()

    run(scenario)


def test_another_body_under_the_key_of_a_batch_is_refused_and_another_key_or_tenant_makes_its_own() -> None:
    async def scenario(lane: Lane) -> None:
        file_id = await uploaded(lane)
        made = await asked_again(lane, "night-1", file_id)
        with pytest.raises(openai.BadRequestError, match="was used for a different request") as refused:
            await asked_again(lane, "night-1", file_id, completion_window="48h")
        assert (refused.value.code, refused.value.param) == ("idempotency_key_reused", "Idempotency-Key")
        second = await asked_again(lane, "night-2", file_id)
        theirs = await asked_again(lane, "night-1", await uploaded(lane, OTHER_KEY), of=OTHER_KEY)
        assert len({made.id, second.id, theirs.id, (await create(lane, input_file_id=file_id)).id}) == 4
        assert len([one async for one in lane.sdk().batches.list()]) == 3
        with pytest.raises(openai.BadRequestError, match="visible ASCII") as wrong:
            await asked_again(lane, "k" * 256, file_id)
        assert wrong.value.param == "Idempotency-Key"

    run(scenario)


def test_a_refused_batch_uses_its_key_up_for_nothing() -> None:
    async def scenario(lane: Lane) -> None:
        with pytest.raises(openai.NotFoundError):
            await asked_again(lane, "night-1", UNKNOWN_FILE)
        assert (await asked_again(lane, "night-1", await uploaded(lane))).status == "validating"

    run(scenario)


def test_without_workers_no_batch_is_taken_and_those_there_are_seen() -> None:
    async def scenario(lane: Lane) -> None:
        made = await create(lane)
        lane.app.configure(lane.app.settings.model_validate(lane.app.settings.model_dump() | {"batch": {"workers": 0}}))
        with pytest.raises(openai.BadRequestError, match=r"batch\.workers is 0") as refused:
            await create(lane, input_file_id=made.input_file_id)
        assert refused.value.code == "no_batch_workers"
        assert [one.id async for one in lane.sdk().batches.list()] == [made.id]

    run(scenario)


def test_pages_of_batches_are_the_tenant_s_and_the_newest_first() -> None:
    async def scenario(lane: Lane) -> None:
        made = [(await create(lane)).id for _ in range(5)]
        await create(lane, OTHER_KEY)
        client = lane.sdk()
        assert [one.id async for one in client.batches.list()] == made[::-1]
        assert [one.id async for one in client.batches.list(limit=2)] == made[::-1]
        page = await client.batches.list(limit=2, after=made[3])
        assert ([one.id for one in page.data], page.has_more) == ([made[2], made[1]], True)
        assert [one.id async for one in lane.sdk(ADMIN_KEY).batches.list()] == []

    run(scenario)


@pytest.mark.parametrize(
    ("query", "named"), [("limit=101", "limit"), ("limit=-1", "limit"), ("after=x", "after"), ("order=asc", "order")]
)
def test_a_wrong_parameter_of_the_list_is_named(query: str, named: str) -> None:
    async def scenario(lane: Lane) -> None:
        reply = await lane.request("GET", "/v1/batches", query=query)
        assert (reply.status, reply.error["param"]) == (400, named)

    run(scenario)


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/batches/{}"), ("POST", "/v1/batches/{}/cancel")])
@pytest.mark.parametrize("key", [OTHER_KEY, ADMIN_KEY])
def test_another_tenant_s_batch_is_answered_like_an_unknown_one(method: str, path: str, key: str) -> None:
    async def scenario(lane: Lane) -> None:
        made = await create(lane)
        known, unknown = [await lane.request(method, path.format(one), key=key) for one in (made.id, UNKNOWN_BATCH)]
        assert (known.status, known.error["code"]) == (404, "batch_not_found")
        assert known.body.replace(made.id.encode(), b"") == unknown.body.replace(UNKNOWN_BATCH.encode(), b"")
        assert (await lane.sdk().batches.retrieve(made.id)).status == "validating"

    run(scenario)


@pytest.mark.parametrize("status", [BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING])
def test_a_cancel_is_repeatable(status: BatchStatus) -> None:
    async def scenario(lane: Lane) -> None:
        made = await create(lane)
        client = lane.sdk()
        await lane.set_batch(made.id, status=status)
        cancelling = checked(await client.batches.cancel(made.id))
        assert cancelling.status == "cancelling"
        assert cancelling.cancelling_at is not None
        assert await client.batches.cancel(made.id) == cancelling
        await lane.set_batch(made.id, status=BatchStatus.CANCELLED)
        assert (await client.batches.cancel(made.id)).status == "cancelled"

    run(scenario)


@pytest.mark.parametrize("status", [BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED])
def test_a_batch_that_is_over_cannot_be_cancelled(status: BatchStatus) -> None:
    async def scenario(lane: Lane) -> None:
        made = await create(lane)
        await lane.set_batch(made.id, status=status)
        with pytest.raises(openai.ConflictError, match=status.value) as refused:
            await lane.sdk().batches.cancel(made.id)
        assert refused.value.code == "batch_conflict"
        assert (await lane.store.batches.batch(made.id, None)).status is status

    run(scenario)


@pytest.mark.parametrize(
    "path", ["/v1/batches", f"/v1/batches/{UNKNOWN_BATCH}", "/v1/files", f"/v1/files/{UNKNOWN_FILE}"]
)
def test_a_store_that_is_away_is_reported(path: str) -> None:
    async def scenario(lane: Lane) -> None:
        lane.store.away = True
        reply = await lane.request("GET", path)
        assert (reply.status, reply.error["code"]) == (503, "no_store")

    run(scenario)


@pytest.mark.parametrize("name", ["x", "%00", "batch_" + "G" * 32, "b" * 5000])
def test_an_id_that_is_none_is_not_found_without_the_store(name: str) -> None:
    async def scenario(lane: Lane) -> None:
        lane.store.away = True
        reply = await lane.request("GET", f"/v1/batches/{name}")
        assert (reply.status, reply.error["code"]) == (404, "batch_not_found")
        assert len(reply.body) < 400

    run(scenario)
