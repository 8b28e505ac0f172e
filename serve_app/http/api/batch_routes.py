"""OpenAI's Batches API.

    POST /v1/batches               {"input_file_id", "endpoint", "completion_window", "metadata"}
    GET  /v1/batches               the tenant's batches, the newest first: limit, after
    GET  /v1/batches/{id}          one batch
    POST /v1/batches/{id}/cancel   no row of it begins any more; those that run end, and it has its files

Invariant: another tenant's batch is answered like an unknown one, to a key with `admin` too: as with sessions, what
operators see of all tenants is under /admin. A batch that is answered is stored; the workers find it there. Of one
`Idempotency-Key` there is one batch, as long as the store has its record.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from serve_app.core.batches import ENDPOINTS, INPUT_PURPOSE, BatchRecord, BatchStatus
from serve_app.errors import BadRequest, BatchConflict, Forbidden, NotFound
from serve_app.http.api.batch_lane import (
    BATCH_ID,
    FILE_ID,
    BatchLane,
    cursor,
    file_not_found,
    find_file,
    page,
    seconds,
)
from serve_app.http.api.key_routes import ReadBody
from serve_app.http.api.routes import SHOWN_ID_CHARS, BatchCall, HttpRoute
from serve_app.http.contract import idempotency_key
from serve_app.http.error_responses import JSON, Answer
from serve_app.http.fields import parse_fields, query_number, query_words
from serve_app.http.keyed import fingerprint, key_digest, reused
from serve_app.settings import Settings
from serve_app.types import Identity

MIN_WINDOW_H = 1
MAX_WINDOW_H = 168  # a week; OpenAI has 24h alone
# batches; OpenAI's
DEFAULT_PAGE = 20
MAX_PAGE = 100
HOUR_S = 3600.0
CREATE_OPERATION = "batch"  # in fingerprints
_WINDOW = re.compile(r"([1-9][0-9]{0,2})h")
_CANCELLABLE = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING)
_CANCELLED = (BatchStatus.CANCELLING, BatchStatus.CANCELLED)
_TIMES = (  # those that OpenAI shows, in its order
    "created_at",
    "in_progress_at",
    "expires_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)

# OpenAI's bounds
MetadataKey = Annotated[str, StringConstraints(max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]


class _BatchFields(BaseModel):
    """The body that makes a batch."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[MetadataKey, MetadataValue] | None = Field(None, max_length=16)


class BatchRoutes:
    """Answers the routes.

    Args:
        settings: those that hold now.
    """

    def __init__(self, lane: BatchLane, settings: Callable[[], Settings]) -> None:
        self._lane = lane
        self._settings = settings

    async def answer(
        self, route: HttpRoute, identity: Identity, query: bytes, headers: Mapping[bytes, bytes], read: ReadBody
    ) -> Answer:
        """The complete answer.

        Args:
            headers: by name in lower case.
            read: the body, for the call that has one.

        Raises:
            BadRequest: a wrong field, see `param`; or no worker runs batches here. NotFound: no such batch or file of
            the tenant. BatchConflict: the batch cannot be cancelled any more. StoreAway.
        """
        match route.target:
            case BatchCall.CREATE:
                batch = await self._create(identity, idempotency_key(headers), read)
            case BatchCall.LIST:
                words = query_words(query, ("limit", "after"))
                limit = query_number(words, "limit", DEFAULT_PAGE, MAX_PAGE)
                found = await self._lane.get_store().batches(
                    identity.tenant, after=cursor(words, BATCH_ID), limit=limit + 1
                )
                return page([shown_batch(record) for record in found], limit)
            case BatchCall.GET:
                batch = await _find(self._lane, route.argument, identity)
            case _:
                batch = await self._cancel(await _find(self._lane, route.argument, identity))
        return 200, JSON, msgspec.json.encode(shown_batch(batch))

    async def _create(self, identity: Identity, key: str | None, read: ReadBody) -> BatchRecord:
        if not self._settings().batch.workers:
            raise BadRequest("no batch is run here: batch.workers is 0", code="no_batch_workers")
        if identity.is_token:  # its rows run for hours, when the token has expired and its subject may have left
            raise Forbidden("a batch needs an API key: it runs longer than a token is valid", code="needs_api_key")
        body = (await read())[0]
        asked = parse_fields(_BatchFields, body)
        if asked.endpoint not in ENDPOINTS:
            raise BadRequest(f"`endpoint` must be one of {', '.join(sorted(ENDPOINTS))}", param="endpoint")
        window_s = _window_s(asked.completion_window)
        now = time.time()
        if FILE_ID.fullmatch(asked.input_file_id) is None:
            raise file_not_found(asked.input_file_id, "input_file_id")
        record = BatchRecord(
            batch_id=f"batch_{secrets.token_hex(16)}",
            tenant=identity.tenant,
            key_id=identity.key_id,
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            completion_window=asked.completion_window,
            status=BatchStatus.VALIDATING,
            created_at=now,
            expires_at=now + window_s,
            metadata=asked.metadata or {},
        )
        request: dict[str, bytes] = {}
        if key is not None:
            request = {"key": key_digest(identity.tenant, key), "fingerprint": fingerprint(CREATE_OPERATION, body)}
        try:
            return await self._lane.get_store().create_batch(record, **request)
        except ValueError:
            raise reused() from None
        except KeyError:
            file = await find_file(self._lane, asked.input_file_id, identity.tenant, now, param="input_file_id")
            raise BadRequest(
                f"`input_file_id` must be a file whose purpose is {INPUT_PURPOSE!r}; that of {file.file_id} is "
                f"{file.purpose!r}",
                param="input_file_id",
            ) from None

    async def _cancel(self, batch: BatchRecord) -> BatchRecord:
        changed = await self._lane.get_store().change_batch(
            batch.batch_id, if_status=_CANCELLABLE, status=BatchStatus.CANCELLING, cancelling_at=time.time()
        )
        if changed is not None:
            return changed
        batch = await self._lane.get_store().batch(batch.batch_id, batch.tenant)
        if batch.status in _CANCELLED:
            return batch  # by a call before this one, whose answer may be lost
        raise BatchConflict(f"{batch.batch_id} is {batch.status} and cannot be cancelled")


async def _find(lane: BatchLane, batch_id: str, identity: Identity) -> BatchRecord:
    try:
        if BATCH_ID.fullmatch(batch_id) is None:
            raise KeyError(batch_id)
        return await lane.get_store().batch(batch_id, identity.tenant)
    except KeyError:
        shown = batch_id[:SHOWN_ID_CHARS]
        raise NotFound(f"there is no batch {shown!r}", code="batch_not_found") from None


def _window_s(text: str) -> float:
    """Seconds of a completion window, such as "24h". Raises BadRequest."""
    found = _WINDOW.fullmatch(text)
    if found is None or not MIN_WINDOW_H <= int(found[1]) <= MAX_WINDOW_H:
        raise BadRequest(
            f"`completion_window` must be whole hours from {MIN_WINDOW_H}h to {MAX_WINDOW_H}h, as 24h",
            param="completion_window",
        )
    return int(found[1]) * HOUR_S


def shown_batch(batch: BatchRecord) -> dict[str, Any]:
    """A batch in OpenAI's form."""
    errors = [asdict(error) for error in batch.errors]
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status.value,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        **{name: seconds(getattr(batch, name)) for name in _TIMES},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": dict(batch.metadata) or None,
    }
