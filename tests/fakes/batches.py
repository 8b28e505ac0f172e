"""Batches in a store of the test and files in memory, a router application over them, and callers of it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import httpx2
import openai

from serve_app.core.batches import BatchStatus
from serve_app.errors import BodyTooLarge, NotFound, StoreAway
from serve_app.http.api.batch_lane import BatchLane
from serve_app.http.app import RouterApp
from serve_app.router import RouterMetrics
from serve_app.settings import KeySettings, Settings
from tests.fakes.asgi_client import Reply, exchange, router_app
from tests.fakes.engines import model
from tests.fakes.stores import FakeStore

KEY = "sk-night-0123456789"
OTHER_KEY = "sk-other-0123456789"
ADMIN_KEY = "sk-admin-0123456789"
BASE_URL = "http://test/v1"
STORE_FILE = "store.sqlite"  # of a `FakeStore`
BOUNDARY = "x-boundary"
FORM = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}


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
        self.away = False
        self.most_held = 0
        self.reads = 0

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
    """A router application with a store in `folder` and files in memory.

    Args:
        batch, http: settings.
    """

    def __init__(
        self, folder: Path, *, batch: dict[str, Any] | None = None, http: dict[str, Any] | None = None
    ) -> None:
        keys = (
            KeySettings(key=KEY, tenant="night", name="night"),
            KeySettings(key=OTHER_KEY, tenant="other", name="other"),
            KeySettings(key=ADMIN_KEY, tenant="ops", name="ops", admin=True),
        )
        given = {"auth": {"keys": keys}, "batch": batch or {}, "http": http or {}, "models": (model(),)}
        self.store = FakeStore(folder)
        self.files = MemoryFiles()
        lane = BatchLane(lambda: self.store.batches, lambda: self.files)
        self.app: RouterApp = router_app(Settings.model_validate(given), {}, RouterMetrics(), batches=lane)

    def sdk(self, key: str = KEY) -> openai.AsyncOpenAI:
        """The official SDK."""
        client = httpx2.AsyncClient(transport=httpx2.ASGITransport(self.app))
        return openai.AsyncOpenAI(api_key=key, base_url=BASE_URL, http_client=client, max_retries=0)

    async def set_batch(self, batch_id: str, **fields: Any) -> None:
        """Change a batch as a worker does."""
        assert await self.store.batches.change_batch(batch_id, if_status=list(BatchStatus), **fields)

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
        messages = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
        if rest is None:
            messages.append({"type": "http.request", "body": b"", "more_body": False})
        return await exchange(
            self.app, method, path, messages, headers, key=key, query=query, rest=rest, reply=reply, reading=reading
        )


def run(scenario: Callable[[Lane], Awaitable[None]], **settings: Any) -> None:
    """Run a scenario on a lane of its own."""

    async def everything(folder: str) -> None:
        lane = Lane(Path(folder), **settings)
        try:
            await scenario(lane)
        finally:
            lane.store.sql.close()

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, STORE_FILE).write_bytes(_empty_store())
        asyncio.run(everything(folder))


@functools.cache
def _empty_store() -> bytes:
    """A store's file with its tables, which take a tenth of a second to make."""
    with tempfile.TemporaryDirectory() as folder:
        store = FakeStore(Path(folder))
        store.sql.batches.work()
        store.sql.close()
        return Path(folder, STORE_FILE).read_bytes()


def part(name: str, content: bytes, filename: str | None = None, more: str = "") -> bytes:
    """A part of a form."""
    named = "" if filename is None else f'; filename="{filename}"'
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{named}\r\n{more}\r\n'
    return head.encode() + content + b"\r\n"


def form(*parts: bytes) -> list[bytes]:
    return [*parts, f"--{BOUNDARY}--\r\n".encode()]


ROWS = jsonl(row("a"), row("b"))
PURPOSE = part("purpose", b"batch")
FILE = part("file", ROWS, "rows.jsonl")


async def upload(lane: Lane, *parts: bytes, **more: Any) -> Reply:
    return await lane.request("POST", "/v1/files", form(*parts), FORM, **more)


async def kept(lane: Lane) -> tuple[list[str], list[str]]:
    """Ids of the files that are there: by their records, complete or not, and by their content."""
    with contextlib.closing(sqlite3.connect(lane.store.file)) as connection:
        records = connection.execute("SELECT file_id FROM batch_files WHERE removed_at IS NULL ORDER BY created_at")
        return [file_id for (file_id,) in records], list(lane.files.content)
