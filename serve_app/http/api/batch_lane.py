"""What the routes of files and of batches have in common: where both are kept, ids, times, and pages of a list."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from serve_app.batch import FileStorage
from serve_app.core.batches import FileRecord
from serve_app.errors import BadRequest, NotFound
from serve_app.http.api.routes import SHOWN_ID_CHARS
from serve_app.http.error_responses import JSON, Answer
from serve_app.store import BatchStore

FILE_ID = re.compile(r"file-[0-9a-f]{32}")
BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class BatchLane:
    """Where batches and their files are. Both change with the configuration, so they are asked for at each call."""

    get_store: Callable[[], BatchStore]
    get_files: Callable[[], FileStorage]


async def find_file(lane: BatchLane, file_id: str, tenant: str, now: float, param: str | None = None) -> FileRecord:
    """A complete file of the tenant.

    Raises:
        NotFound: unknown, not complete, deleted, expired, or another tenant's; these cannot be told apart.
    """
    try:
        if FILE_ID.fullmatch(file_id) is None:
            raise KeyError(file_id)
        found = await lane.get_store().file(file_id, tenant)
        if found.size is None or (found.expires_at is not None and found.expires_at <= now):
            raise KeyError(file_id)
    except KeyError:
        raise file_not_found(file_id, param) from None
    return found


def file_not_found(file_id: str, param: str | None = None) -> NotFound:
    return NotFound(f"there is no file {file_id[:SHOWN_ID_CHARS]!r}", param=param, code="file_not_found")


def cursor(words: Mapping[str, str], ids: re.Pattern[str]) -> str | None:
    """The id that a page begins behind. Raises BadRequest: it is no id."""
    after = words.get("after")
    if after is not None and ids.fullmatch(after) is None:
        raise BadRequest("`after` must be the id of the last one of the page before", param="after")
    return after


def page(shown: Sequence[dict[str, Any]], limit: int) -> Answer:
    """A page of a list, of as many as were found: one more than `limit`, if others follow."""
    data = shown[:limit]
    ids = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    found = {"object": "list", "data": data, **ids, "has_more": len(shown) > limit}
    return 200, JSON, msgspec.json.encode(found)


def seconds(time_s: float | None) -> int | None:
    """A time as OpenAI has it."""
    return None if time_s is None else int(time_s)
