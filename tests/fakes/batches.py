"""Batches and files in memory, a router application over them, and callers of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import httpx2
import openai

from serve_app.core.batches import BatchRecord, BatchStatus, BatchWork, FileRecord
from serve_app.errors import BodyTooLarge, NotFound, StoreAway
from serve_app.http.app import RouterApp
from serve_app.http.batch_lane import BatchLane
from serve_app.router import RouterMetrics
from serve_app.settings import KeySettings, Settings
from tests.fakes.asgi_client import Reply, router_app
from tests.fakes.engines import model

KEY, OTHER_KEY, ADMIN_KEY = "sk-night-0123456789", "sk-other-0123456789", "sk-admin-0123456789"
BASE_URL = "http://test/v1"


def row(custom_id: str = "a", **body: Any) -> dict[str, Any]:
    """A row of a batch of chats."""
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": asked}


def jsonl(*rows: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in rows)


class MemoryFiles:
    """`FileStorage` in memory. `away`: every call fails; `most_held`: bytes of the largest piece it was given."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.away, self.most_held, self.reads = False, 0, 0

    def _check(self) -> None:
        if self.away:
            raise StoreAway("the files are away")

    async def write(self, name: str, chunks: AsyncIterator[bytes], max_bytes: int) -> int:
        self._check()
        written = bytearray()
        async for chunk in chunks:
            self.most_held = max(self.most_held, len(chunk))
            written += chunk
            if len(written) > max_bytes:
                raise BodyTooLarge("too large")
        self.content[name] = bytes(written)
        return len(written)

    async def read(self, name: str, offset: int, length: int) -> bytes:
        self._check()
        self.reads += 1
        if name not in self.content:
            raise NotFound(f"no content of {name}")
        return self.content[name][offset : offset + length]

    async def size(self, name: str) -> int:
        return len(self.content[name])

    async def delete(self, name: str) -> None:
        self._check()
        self.content.pop(name, None)


class Lane:
    """A router application whose batches and files are in memory.

    Args:
        batch, http: settings.
    """

    def __init__(self, store: Any, *, batch: dict[str, Any] | None = None, http: dict[str, Any] | None = None) -> None:
        keys = (
            KeySettings(key=KEY, tenant="night", name="night"),
            KeySettings(key=OTHER_KEY, tenant="other", name="other"),
            KeySettings(key=ADMIN_KEY, tenant="ops", name="ops", admin=True),
        )
        given = {"auth": {"keys": keys}, "batch": batch or {}, "http": http or {}, "models": (model(),)}
        self.store, self.files = store, MemoryFiles()
        lane = BatchLane(lambda: self.store, lambda: self.files)
        self.app: RouterApp = router_app(Settings.model_validate(given), {}, RouterMetrics(), batches=lane)

    def sdk(self, key: str = KEY) -> openai.AsyncOpenAI:
        """The official SDK."""
        client = httpx2.AsyncClient(transport=httpx2.ASGITransport(self.app))
        return openai.AsyncOpenAI(api_key=key, base_url=BASE_URL, http_client=client, max_retries=0)

    async def request(
        self,
        method: str,
        path: str,
        chunks: Iterable[bytes] = (),
        headers: dict[str, str] | None = None,
        *,
        key: str | None = KEY,
        query: str = "",
        rest: Callable[[], Awaitable[dict[str, Any]]] | None = None,
        reading: Callable[[Reply], Awaitable[None]] | None = None,
        reply: Reply | None = None,
    ) -> Reply:
        """One exchange of bare ASGI, to its end.

        Args:
            rest: gives the messages of the body behind `chunks`; None: the body ends with them.
            reading: awaited whenever a part of the answer has come; `send` blocks as long.
        """
        got = Reply() if reply is None else reply
        sent = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        sent += [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
        messages = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
        if rest is None:
            messages.append({"type": "http.request", "body": b"", "more_body": False})
        asked = iter(messages)

        async def receive() -> dict[str, Any]:
            message = next(asked, None)
            if message is None:
                message = await (asyncio.Event().wait() if rest is None else rest())  # type: ignore[assignment]
            assert message is not None
            return message

        async def send(message: Any) -> None:
            assert not got.ended, "nothing may follow the end"
            if message["type"] == "http.response.start":
                assert not got.status, "one start"
                got.status = message["status"]
                got.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                got.chunks.append(message["body"])
                got.ended = not message.get("more_body", False)
            if reading is not None:
                await reading(got)

        scope = {"type": "http", "method": method, "path": path, "headers": sent, "query_string": query.encode()}
        await self.app(scope, receive, send)
        assert got.ended
        return got


class MemoryBatches:
    """`BatchStore` in memory, as far as HTTP needs it. `away`: every call fails."""

    def __init__(self) -> None:
        self.kept_files: dict[str, FileRecord] = {}
        self.kept_batches: dict[str, BatchRecord] = {}
        self.away = False

    def _check(self) -> None:
        if self.away:
            raise StoreAway("the store is away")

    async def add_file(self, record: FileRecord) -> FileRecord:
        self._check()
        return self.kept_files.setdefault(record.file_id, record)

    async def finish_file(self, file_id: str, size: int) -> FileRecord:
        self._check()
        self.kept_files[file_id] = replace(self.kept_files[file_id], size=size)
        return self.kept_files[file_id]

    async def file(self, file_id: str, tenant: str | None) -> FileRecord:
        self._check()
        found = self.kept_files[file_id]
        if found.deleted_at is not None or tenant not in (None, found.tenant):
            raise KeyError(file_id)
        return found

    async def files(
        self, tenant: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> list[FileRecord]:
        self._check()
        found = [
            one
            for one in self.kept_files.values()
            if one.tenant == tenant
            and one.size is not None
            and one.deleted_at is None
            and purpose in (None, one.purpose)
        ]
        ordered = found[::-1] if newest_first else found
        start = next((place + 1 for place, one in enumerate(ordered) if one.file_id == after), 0)
        return ordered[start : start + limit]

    async def delete_file(self, file_id: str, tenant: str, now: float) -> FileRecord:
        found = await self.file(file_id, tenant)
        self.kept_files[file_id] = replace(found, deleted_at=now)
        return self.kept_files[file_id]

    async def create_batch(self, record: BatchRecord) -> BatchRecord:
        self._check()
        return self.kept_batches.setdefault(record.batch_id, record)

    async def batch(self, batch_id: str, tenant: str | None) -> BatchRecord:
        self._check()
        found = self.kept_batches[batch_id]
        if tenant not in (None, found.tenant):
            raise KeyError(batch_id)
        return found

    async def batches(self, tenant: str | None, *, after: str | None, limit: int) -> list[BatchRecord]:
        self._check()
        ordered = [one for one in self.kept_batches.values() if tenant in (None, one.tenant)][::-1]
        start = next((place + 1 for place, one in enumerate(ordered) if one.batch_id == after), 0)
        return ordered[start : start + limit]

    async def change_batch(
        self, batch_id: str, *, if_status: Sequence[BatchStatus], **fields: Any
    ) -> BatchRecord | None:
        self._check()
        found = self.kept_batches[batch_id]
        if found.status not in if_status:
            return None
        self.kept_batches[batch_id] = replace(found, **fields)
        return self.kept_batches[batch_id]

    async def work(self) -> list[BatchWork]:
        self._check()
        running = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING)
        return [BatchWork(one, {}, 0) for one in self.kept_batches.values() if one.status in running]
