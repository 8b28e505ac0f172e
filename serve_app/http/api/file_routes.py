"""OpenAI's Files API, for the input and the output of batches.

    POST   /v1/files                a form with `purpose` (batch), `file`, and `expires_after[anchor]`, `[seconds]`
    GET    /v1/files                the tenant's files: purpose, limit, after, order
    GET    /v1/files/{id}           one file
    GET    /v1/files/{id}/content   its bytes
    DELETE /v1/files/{id}           removes it; not while a batch reads it

Invariant: a file is complete and each of its lines is a row, or there is no file: the first bad line, a field that is
wrong and a client that leaves all end the upload, and nothing is kept. Neither an upload nor a download is in memory
as a whole. Another tenant's file is answered like an unknown one.

While an upload arrives, its bytes are reserved, so that several of a tenant stay within its bound together.

An upload has a record before it has content, and the record of a deleted file outlives its content: what a router
leaves behind that dies meanwhile is found by a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Container
from typing import Any

import msgspec

from serve_app.core.batches import INPUT_PURPOSE, OUTPUT_PURPOSE, FileRecord, check_stored
from serve_app.errors import BadRequest, BodyTooSlow, ServeAppError, Unavailable
from serve_app.http.api.batch_lane import (
    FILE_ID,
    BatchLane,
    cursor,
    file_not_found,
    find_file,
    page,
    seconds,
)
from serve_app.http.api.file_lines import LineCheck
from serve_app.http.api.routes import FileCall, HttpRoute
from serve_app.http.body import BodyThread
from serve_app.http.error_responses import JSON, Answer, Headers
from serve_app.http.fields import SHOWN_NAME_CHARS, query_number, query_words
from serve_app.http.multipart import FormReader
from serve_app.http.response import PieceAnswer
from serve_app.settings import BatchSettings, Settings
from serve_app.types import Identity

logger = logging.getLogger("ray.serve")

ANCHOR_FIELD = "expires_after[anchor]"
SECONDS_FIELD = "expires_after[seconds]"
FIELDS = ("purpose", ANCHOR_FIELD, SECONDS_FIELD, "file")
# OpenAI's bounds
MIN_EXPIRY_S = 3600
MAX_EXPIRY_S = 30 * 86_400
MAX_PAGE = 10_000  # files; OpenAI's bound, and its default
PIECE_BYTES = 2**20  # of a download: large beside the cost of a read, small beside a router's memory
RESERVED_BYTES = 2**20  # of its tenant, ahead of what has arrived, at most: a call of the store for each
DAY_S = 86_400.0
_CONTENT: Headers = [(b"content-type", b"application/octet-stream")]

OpenForm = Callable[[int], FormReader]  # of the request, for a file of so many bytes at most


class FileRoutes:
    """Answers the routes.

    Args:
        settings: those that hold now.
        thread: checks long lines.
    """

    def __init__(
        self,
        lane: BatchLane,
        settings: Callable[[], Settings],
        thread: BodyThread,
    ) -> None:
        self._lane = lane
        self._settings = settings
        self._thread = thread
        self._removals: set[asyncio.Task[None]] = set()  # of uploads that failed

    async def answer(
        self, route: HttpRoute, identity: Identity, query: bytes, open_form: OpenForm
    ) -> Answer | PieceAnswer:
        """The complete answer, or the content of a file.

        Raises:
            BadRequest: a wrong field or line, see `param`. NotFound: no such file of the tenant. BatchConflict: a batch
            reads the file. BodyTooLarge, BodyTooSlow, UnsupportedContent. StoreAway.
        """
        match route.target:
            case FileCall.UPLOAD:
                return 200, JSON, msgspec.json.encode(shown_file(await self._upload(identity, open_form)))
            case FileCall.LIST:
                return await self._list(identity, query)
        record = await find_file(self._lane, route.argument, identity.tenant, time.time())
        match route.target:
            case FileCall.CONTENT:
                return PieceAnswer(_CONTENT, record.size or 0, _pieces(self._lane, record))
            case FileCall.DELETE:
                await self._delete(record)
                gone = {"id": record.file_id, "object": "file", "deleted": True}
                return 200, JSON, msgspec.json.encode(gone)
            case _:
                return 200, JSON, msgspec.json.encode(shown_file(record))

    async def _upload(self, identity: Identity, open_form: OpenForm) -> FileRecord:
        batch = self._settings().batch
        if batch.max_bytes_per_tenant is not None:
            check_stored(await self._lane.get_store().stored_bytes(identity.tenant), 1, batch.max_bytes_per_tenant)
        form = open_form(batch.max_file_bytes)
        fields: dict[str, str] = {}
        record: FileRecord | None = None
        size = 0
        try:
            while (part := await form.next_part()) is not None:
                _check_field(part.name, {*fields, "file"} if record is not None else fields)
                if part.name != "file":
                    if record is not None and part.name != "purpose":
                        raise BadRequest(f"`{part.name}` must come before `file` in the form", param=part.name)
                    fields[part.name] = await form.text(part.name)
                    _check_purpose(fields)
                    continue
                if part.filename is None:
                    raise BadRequest("`file` must be a file: its part of the form has no filename", param="file")
                record = self._new_record(identity, part.filename, fields)
                await self._lane.get_store().add_file(record)
                size = await self._write(record, form, batch)
            if record is None:
                raise BadRequest("`file` is missing", param="file")
            if "purpose" not in fields:
                raise BadRequest(f"`purpose` is missing; it must be {INPUT_PURPOSE!r}", param="purpose")
            return await self._lane.get_store().finish_file(record.file_id, size, batch.max_bytes_per_tenant)
        except KeyError:
            raise BodyTooSlow("the upload took too long, and its file was removed", param="file") from None
        except BaseException:
            if record is not None:
                await self._discard(record)
            raise

    def _new_record(self, identity: Identity, filename: str, fields: dict[str, str]) -> FileRecord:
        now = time.time()
        lives_s = _expiry_s(fields)
        return FileRecord(
            file_id=f"file-{secrets.token_hex(16)}",
            tenant=identity.tenant,
            key_id=identity.key_id,
            filename=filename,
            purpose=INPUT_PURPOSE,
            size=None,
            created_at=now,
            expires_at=now + (self._settings().batch.files_expire_days * DAY_S if lives_s is None else lives_s),
        )

    async def _write(self, record: FileRecord, form: FormReader, batch: BatchSettings) -> int:
        """Write the file of the form, each line checked and each byte reserved before it is written. Returns its bytes.
        Raises KeyError: the file was removed."""
        check = LineCheck(batch.max_rows)
        most = batch.max_bytes_per_tenant

        async def checked() -> AsyncGenerator[bytes, None]:
            size = reserved = 0
            async for piece in form.file():
                size += len(piece)
                if most is not None and size > reserved:
                    wanted = size + min(size, RESERVED_BYTES)
                    reserved = await self._lane.get_store().reserve_bytes(record.file_id, size, wanted, most)
                await self._thread.run(check.pending + len(piece), functools.partial(check.feed, piece))
                yield piece
            await self._thread.run(check.pending, check.end)

        return await self._lane.get_files().write(record.file_id, checked(), batch.max_file_bytes)

    async def _discard(self, record: FileRecord) -> None:
        """Remove what an upload has left. A client that leaves does not end it."""
        removal = asyncio.ensure_future(self._give_up(record))
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)
        await asyncio.shield(removal)

    async def _give_up(self, record: FileRecord) -> None:
        try:
            # a record that was never stored, or that a worker has deleted, may have content all the same
            with contextlib.suppress(KeyError):
                await self._lane.get_store().delete_file(record.file_id, record.tenant, time.time())
        except ServeAppError as error:
            logger.warning("File %s failed to upload and takes space until it expires: %s", record.file_id, error)
        else:
            await self._remove_content(record.file_id)

    async def _remove_content(self, file_id: str) -> None:
        """Remove the content of a deleted file."""
        try:
            await self._lane.get_files().delete(file_id)
            await self._lane.get_store().content_removed(file_id, time.time())
        except ServeAppError as error:
            logger.info("File %s is deleted; a batch worker removes its content later: %s", file_id, error)

    async def _list(self, identity: Identity, query: bytes) -> Answer:
        words = query_words(query, ("purpose", "limit", "after", "order"))
        limit = query_number(words, "limit", MAX_PAGE, MAX_PAGE)
        order = words.get("order", "desc")
        if order not in ("asc", "desc"):
            raise BadRequest("`order` must be asc or desc", param="order")
        purpose = words.get("purpose")
        if purpose not in (None, INPUT_PURPOSE, OUTPUT_PURPOSE):
            return page([], limit)
        after = cursor(words, FILE_ID)
        newest_first = order == "desc"
        store = self._lane.get_store()
        tenant = identity.tenant
        found = await store.files(tenant, purpose=purpose, after=after, limit=limit + 1, newest_first=newest_first)
        return page([shown_file(record) for record in found], limit)

    async def _delete(self, record: FileRecord) -> None:
        """The record first: no batch that is made now reads a file without content."""
        try:
            await self._lane.get_store().delete_file(record.file_id, record.tenant, time.time())
        except KeyError:
            raise file_not_found(record.file_id) from None
        await self._remove_content(record.file_id)


def shown_file(record: FileRecord) -> dict[str, Any]:
    """A file in OpenAI's form."""
    return {
        "id": record.file_id,
        "object": "file",
        "bytes": record.size,
        "created_at": seconds(record.created_at),
        "expires_at": seconds(record.expires_at),
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }


async def _pieces(lane: BatchLane, record: FileRecord) -> AsyncGenerator[bytes, None]:
    """The content, read as the client takes it."""
    offset = 0
    size = record.size or 0
    while offset < size:
        piece = await lane.get_files().read(record.file_id, offset, min(PIECE_BYTES, size - offset))
        if not piece:
            raise Unavailable(f"{record.file_id} ends at byte {offset} of {size}", code="file_damaged")
        offset += len(piece)
        yield piece


def _check_field(name: str, seen: Container[str]) -> None:
    """Raises BadRequest: unknown, or given before."""
    if name not in FIELDS:
        shown = name[:SHOWN_NAME_CHARS]
        raise BadRequest(f"`{shown}`: there is no such field; there are {', '.join(FIELDS)}", param=shown)
    if name in seen:
        raise BadRequest(f"`{name}` is given twice", param=name)


def _check_purpose(fields: dict[str, str]) -> None:
    purpose = fields.get("purpose", INPUT_PURPOSE)
    if purpose != INPUT_PURPOSE:
        raise BadRequest(f"`purpose` must be {INPUT_PURPOSE!r}: files are for batches here", param="purpose")


def _expiry_s(fields: dict[str, str]) -> int | None:
    """How long the client wants its file kept; None: it does not say. Raises BadRequest."""
    anchor = fields.get(ANCHOR_FIELD)
    text = fields.get(SECONDS_FIELD)
    if anchor is None and text is None:
        return None
    if anchor != "created_at":
        raise BadRequest(f"`{ANCHOR_FIELD}` must be created_at", param=ANCHOR_FIELD)
    if not (text and text.isascii() and text.isdigit() and len(text) < 9 and MIN_EXPIRY_S <= int(text) <= MAX_EXPIRY_S):
        raise BadRequest(
            f"`{SECONDS_FIELD}` must be a whole number from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}", param=SECONDS_FIELD
        )
    return int(text)
