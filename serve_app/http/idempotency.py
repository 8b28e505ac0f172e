"""Keeps answers by `Idempotency-Key`, so that a repeated request gets the kept answer and does not run twice.

Invariant: while an answer is kept or in progress, a repeat with the same body gets exactly its bytes and runs nothing;
a run that ended without a full answer leaves no entry, and the next repeat runs. All answers, those in progress
included, are within `MAX_BYTES`; beyond it, the tenant with the most bytes loses its oldest answer.

Each router replica keeps its own answers: a repeat that reaches another replica, or comes too late, runs again. An
answer longer than `MAX_ANSWER_BYTES` is not kept, and its repeats are refused (409): the key forbids a second run.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from serve_app.errors import AnswerNotKept, BadRequest
from serve_app.http.error_responses import Answer, Headers

KEPT_S = 600.0  # a client's retries are over within minutes: the OpenAI SDK's own time limit is ten
MAX_BYTES = 64 * 2**20  # per router replica; about 30,000 chat answers
MAX_ANSWER_BYTES = 4 * 2**20  # about 15,000 chunks of a stream
ENTRY_BYTES = 1024  # of an answer besides its body: key, headers, Python objects

Owner = tuple[str, str]  # tenant, key
_encoder = msgspec.json.Encoder(order="deterministic")


@dataclass(slots=True)
class _Entry:
    fingerprint: bytes
    changed_at: float
    answer: Answer | None = None  # complete, as it was sent
    is_dropped: bool = False  # not kept: too long, or evicted for lack of capacity
    parts: list[bytes] = field(default_factory=list)
    bytes: int = ENTRY_BYTES
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _Tenant:
    entries: dict[str, _Entry] = field(default_factory=dict)  # by key
    in_progress: OrderedDict[str, _Entry] = field(default_factory=OrderedDict)  # answers in progress, oldest first
    kept: OrderedDict[str, _Entry] = field(default_factory=OrderedDict)  # complete answers
    bytes: int = 0


def fingerprint(operation: str, body: Mapping[str, Any]) -> bytes:
    """Distinguishes two requests under one key; the order of fields does not count."""
    return hashlib.blake2b(_encoder.encode([operation, body]), digest_size=16).digest()


class IdempotencyCache:
    """The kept answers of one router replica. Each call is O(1) in their number, but O(tenants) when `MAX_BYTES` is
    reached.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.tenants: dict[str, _Tenant] = {}
        self.bytes = 0

    async def claim(self, owner: Owner, body_fingerprint: bytes) -> Answer | None:
        """The kept answer, awaited while its run is in progress; or None: the caller runs it and must call `finish`.

        Raises:
            BadRequest: the key was used for another request. AnswerNotKept: its answer is too long to be repeated.
        """
        name, key = owner
        while True:
            tenant = self.tenants.setdefault(name, _Tenant())
            self._evict_expired(tenant)
            entry = tenant.entries.get(key)
            if entry is None:
                entry = tenant.entries[key] = tenant.in_progress[key] = _Entry(body_fingerprint, self._clock())
                self._add_bytes(tenant, ENTRY_BYTES)
                return None
            if entry.fingerprint != body_fingerprint:
                raise BadRequest(
                    "this Idempotency-Key was used for a different request",
                    param="Idempotency-Key",
                    code="idempotency_key_reused",
                )
            if entry.is_dropped:
                raise AnswerNotKept(
                    f"the answer to the first request under this Idempotency-Key was not kept: it has more than "
                    f"{MAX_ANSWER_BYTES} bytes, or there was no room; to run it again, send another key",
                    param="Idempotency-Key",
                )
            if entry.answer is not None:
                return entry.answer
            await entry.ended.wait()

    def add(self, owner: Owner, body: bytes) -> None:
        """Record a part of the answer that is sent."""
        tenant = self.tenants[owner[0]]
        entry = tenant.entries[owner[1]]
        if entry.is_dropped:
            return
        if entry.bytes + len(body) - ENTRY_BYTES > MAX_ANSWER_BYTES:
            self._drop_in_progress(tenant, owner[1])
            return
        entry.parts.append(body)
        entry.bytes += len(body)
        self._add_bytes(tenant, len(body))

    def finish(self, owner: Owner, head: tuple[int, Headers] | None) -> None:
        """End the run that `claim` allowed; `head`: status and headers of its full answer, None without one."""
        tenant, key = self.tenants[owner[0]], owner[1]
        entry = tenant.entries[key]
        tenant.in_progress.pop(key, None)
        entry.changed_at = self._clock()
        entry.ended.set()
        if head is None:
            del tenant.entries[key]
            self._add_bytes(tenant, -entry.bytes)
            return
        if entry.is_dropped:  # the entry stays, to refuse repeats
            entry.bytes = ENTRY_BYTES
            self._add_bytes(tenant, ENTRY_BYTES)
        else:
            entry.answer, entry.parts = (*head, b"".join(entry.parts)), []
        tenant.kept[key] = entry

    def _add_bytes(self, tenant: _Tenant, more: int) -> None:
        """Charge `more` bytes to this tenant; evict the oldest answers of the tenant with the most bytes if needed."""
        tenant.bytes += more
        self.bytes += more
        while self.bytes > MAX_BYTES:
            largest = max(self.tenants.values(), key=lambda one: one.bytes)
            if largest.kept:
                self._evict_oldest(largest)
            elif largest.in_progress:
                self._drop_in_progress(largest, next(iter(largest.in_progress)))
            else:
                return

    def _drop_in_progress(self, tenant: _Tenant, key: str) -> None:
        """Stop keeping an answer in progress, and drop its parts."""
        entry = tenant.in_progress.pop(key)
        tenant.bytes -= entry.bytes
        self.bytes -= entry.bytes
        entry.is_dropped, entry.parts, entry.bytes = True, [], 0
        entry.ended.set()

    def _evict_oldest(self, tenant: _Tenant) -> None:
        key, entry = tenant.kept.popitem(last=False)
        del tenant.entries[key]
        tenant.bytes -= entry.bytes
        self.bytes -= entry.bytes

    def _evict_expired(self, tenant: _Tenant) -> None:
        horizon = self._clock() - KEPT_S
        while tenant.kept and next(iter(tenant.kept.values())).changed_at <= horizon:
            self._evict_oldest(tenant)
