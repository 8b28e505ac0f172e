"""Storages of files without Ray, and chunks to write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

from serve_app.batch.owned_files import FileOwner, OwnedFiles


def owned(folder: str | None) -> OwnedFiles:
    """The storage over an owner in this process."""
    owner = FileOwner()

    async def call(method: str, *arguments: Any, **named: Any) -> Any:
        return await asyncio.to_thread(owner.run, folder, method, arguments, named)

    return OwnedFiles(call)


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def failing(parts: Iterable[bytes], error: BaseException) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
    raise error
