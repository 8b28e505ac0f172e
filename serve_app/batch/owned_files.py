"""Files in a folder of the head node, through the one actor there that owns it.

Invariant: a call that was answered is on the disk; a call repeated after the actor's death changes nothing twice, since
each piece of an upload names its place. Of a file the client holds one piece.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import AsyncIterable, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from serve_app.batch.local_files import LocalFiles
from serve_app.batch.pieces import in_pieces
from serve_app.core.times import FILES_CALL_S
from serve_app.errors import ServeAppError, StorageAway
from serve_app.names import FILES_ACTOR
from serve_app.ray_adapter import HeadActor, restart_as
from serve_app.store import default_file
from serve_app.system import set_up_log

logger = logging.getLogger("ray.serve")

THREADS = 8  # calls at once: uploads and reads of several routers and workers
FOLDER = "files"  # beside the store's SQLite file
DISCARD_S = 2.0  # the wait for the removal of a failed upload; it goes on without its caller

Call = Callable[..., Awaitable[Any]]  # the name of a method of `LocalFiles`, and its arguments


class FileOwner:
    """The actor's class. It owns every folder that it is asked for."""

    def __init__(self) -> None:
        set_up_log("files")
        self._folders: dict[str | None, LocalFiles] = {}
        self._opening = threading.Lock()

    def upgrade(self, release: str) -> None:
        """See `HeadActor`."""
        restart_as(release)

    def run(self, folder: str | None, method: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """A method of the `LocalFiles` of a folder; None: of the one beside the store's file."""
        with self._opening:
            if folder not in self._folders:
                self._folders[folder] = LocalFiles(Path(folder) if folder else default_file().parent / FOLDER)
        return getattr(self._folders[folder], method)(*arguments, **named)


class OwnedFiles:
    """`FileStorage` over the calls of `LocalFiles`, wherever that is."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._discards: set[asyncio.Task[None]] = set()

    @classmethod
    def at(cls, folder: str | None) -> OwnedFiles:
        actor = HeadActor(FILES_ACTOR, FileOwner, THREADS)
        return cls(actor.calls_of(folder, "the actor of the files", FILES_CALL_S, StorageAway))

    async def write(self, name: str, chunks: AsyncIterable[bytes], max_bytes: int) -> int:
        upload = secrets.token_hex(8)
        size = 0
        try:
            await self._call("write_at", name, upload, 0, b"")
            async with aclosing(in_pieces(chunks, max_bytes)) as pieces:
                async for piece in pieces:
                    await self._call("write_at", name, upload, size, piece)
                    size += len(piece)
            await self._call("finish", name, upload, size)
        except BaseException:
            task = asyncio.ensure_future(self._discard(name, upload))
            self._discards.add(task)
            task.add_done_callback(self._discards.discard)
            await asyncio.wait({task}, timeout=DISCARD_S)
            raise
        return size

    async def read(self, name: str, offset: int, length: int) -> bytes:
        return await self._call("read", name, offset, length)  # type: ignore[no-any-return]

    async def size(self, name: str) -> int:
        return await self._call("size", name)  # type: ignore[no-any-return]

    async def delete(self, name: str) -> None:
        await self._call("delete", name)

    async def _discard(self, name: str, upload: str) -> None:
        try:
            await self._call("discard", name, upload)
        except ServeAppError as error:
            logger.info("Upload %s failed and could not be removed; it is removed later as abandoned: %s", name, error)
