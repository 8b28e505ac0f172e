"""Where the files of batches are kept: input, output and error files, by their ids.

Invariant: a file is complete or not there. Each call may be repeated: the second one changes nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterable
from typing import Protocol
from urllib.parse import unquote, urlsplit

from serve_app.batch.owned_files import OwnedFiles
from serve_app.errors import ConfigError


class FileStorage(Protocol):
    """Files by name. Each call raises StorageFull or StorageAway where the disk or the bucket cannot be used."""

    async def write(self, name: str, chunks: AsyncIterable[bytes], max_bytes: int) -> int:
        """Write a file, and replace the one of this name. Returns its bytes.

        Raises:
            BodyTooLarge: more than `max_bytes`. What `chunks` raises. Nothing is kept then.
        """
        ...

    async def read(self, name: str, offset: int, length: int) -> bytes:
        """Fewer bytes than `length` only at the end. Raises NotFound."""
        ...

    async def size(self, name: str) -> int:
        """Bytes of a file. Raises NotFound."""
        ...

    async def delete(self, name: str) -> None:
        """Remove a file; one that is not there is no error."""
        ...


def storage_at(url: str | None) -> FileStorage:
    """The storage of a URL: None is a folder beside the store's SQLite file on the head node, file:///... that folder
    there, anything else a URL of fsspec. Raises ConfigError."""
    if url is None:
        return OwnedFiles.at(None)
    parts = urlsplit(url)
    if parts.scheme != "file":
        from serve_app.batch.bucket_files import FsspecFiles  # here: without a bucket no process needs fsspec

        return FsspecFiles(url)
    if parts.netloc or not parts.path.startswith("/"):
        raise ConfigError(f"{url} must be file:///, and the path of a folder on the head node", param="batch.files_url")
    return OwnedFiles.at(unquote(parts.path))
