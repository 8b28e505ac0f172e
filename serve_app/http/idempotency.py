"""Answers kept by `Idempotency-Key`, so that a client that repeats a request is answered, not served twice.

Invariant: while an answer is kept or being made, a repeat with the same body gets exactly its bytes and runs nothing; a
run that ended without a full answer leaves nothing behind, and the next repeat runs. What is kept, answers that are
being made included, is within `max_bytes`; where it would be more, the tenant with most of it loses its oldest.

Kept in one router replica: a repeat that reaches another one, or comes too late, runs again. An answer that is longer
than `max_answer_bytes` is not kept, and its repeats are refused (409): who sends a key does not want a second run.
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

KEPT_S = 600.0  # a client's retries are over within minutes: the OpenAI SDK's own time limit is ten
MAX_BYTES = 64 * 2**20  # per router replica; about 30,000 chat answers
MAX_ANSWER_BYTES = 4 * 2**20  # about 15,000 chunks of a stream
ENTRY_BYTES = 1024  # of an answer beside its body: a key, headers, what holds them

Headers = list[tuple[bytes, bytes]]
Owner = tuple[str, str]  # tenant, key
_encoder = msgspec.json.Encoder(order="deterministic")


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, as it went out."""

    status: int
    headers: Headers
    body: bytes


@dataclass(slots=True)
class _Entry:
    fingerprint: bytes
    since: float
    answer: Answer | None = None
    lost: bool = False  # not kept: it is too long, or others have the room
    parts: list[bytes] = field(default_factory=list)
    bytes: int = ENTRY_BYTES
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _Tenant:
    entries: dict[str, _Entry] = field(default_factory=dict)  # by key
    made: OrderedDict[str, _Entry] = field(default_factory=OrderedDict)  # answers that are being made, oldest first
    kept: OrderedDict[str, _Entry] = field(default_factory=OrderedDict)  # whole ones
    bytes: int = 0


def fingerprint(operation: str, body: Mapping[str, Any]) -> bytes:
    """Tells two requests under one key apart; field order does not count."""
    return hashlib.blake2b(_encoder.encode([operation, body]), digest_size=16).digest()


class Replays:
    """The kept answers of one router replica. Each call takes the same time however many there are, but for a look at
    each tenant when there is no room.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        kept_s: float = KEPT_S,
        max_bytes: int = MAX_BYTES,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        self._clock = clock
        self._kept_s = kept_s
        self._max_bytes = max_bytes
        self._max_answer_bytes = max_answer_bytes
        self._tenants: dict[str, _Tenant] = {}
        self.bytes = 0

    async def claim(self, owner: Owner, print_: bytes) -> Answer | None:
        """The kept answer, waited for while its run is under way; or None: the caller runs it and must call `settle`.

        Raises:
            BadRequest: the key was used for another request. AnswerNotKept: its answer is too long to be repeated.
        """
        name, key = owner
        while True:
            tenant = self._tenants.setdefault(name, _Tenant())
            self._forget_old(tenant)
            entry = tenant.entries.get(key)
            if entry is None:
                entry = tenant.entries[key] = tenant.made[key] = _Entry(print_, self._clock())
                self._weigh(tenant, ENTRY_BYTES)
                return None
            if entry.fingerprint != print_:
                raise BadRequest(
                    "this Idempotency-Key was used for a different request",
                    param="Idempotency-Key",
                    code="idempotency_key_reused",
                )
            if entry.lost:
                raise AnswerNotKept(
                    f"the answer to the first request under this Idempotency-Key was not kept: it has more than "
                    f"{self._max_answer_bytes} bytes, or there was no room; to run it again, send another key",
                    param="Idempotency-Key",
                )
            if entry.answer is not None:
                return entry.answer
            await entry.ended.wait()

    def add(self, owner: Owner, body: bytes) -> None:
        """A part of the answer goes out."""
        tenant = self._tenants[owner[0]]
        entry = tenant.entries[owner[1]]
        if entry.lost:
            return
        entry.parts.append(body)
        entry.bytes += len(body)
        if entry.bytes - ENTRY_BYTES > self._max_answer_bytes:
            tenant.bytes, self.bytes = tenant.bytes + len(body), self.bytes + len(body)
            self._lose(tenant, owner[1])
        else:
            self._weigh(tenant, len(body))

    def settle(self, owner: Owner, head: tuple[int, Headers] | None) -> None:
        """The run that `claim` allowed has ended, with a full answer (this is its status and headers) or without."""
        tenant, key = self._tenants[owner[0]], owner[1]
        entry = tenant.entries[key]
        tenant.made.pop(key, None)
        entry.since = self._clock()
        entry.ended.set()
        if head is None:
            del tenant.entries[key]
            self._weigh(tenant, -entry.bytes)
            return
        if entry.lost:  # that much is remembered
            entry.bytes = ENTRY_BYTES
            self._weigh(tenant, ENTRY_BYTES)
        else:
            entry.answer, entry.parts = Answer(*head, b"".join(entry.parts)), []
        tenant.kept[key] = entry

    def _weigh(self, tenant: _Tenant, more: int) -> None:
        """So many bytes more are this tenant's; the oldest of whoever has most make room."""
        tenant.bytes += more
        self.bytes += more
        while self.bytes > self._max_bytes:
            largest = max(self._tenants.values(), key=lambda one: one.bytes)
            if largest.kept:
                self._forget(largest)
            elif largest.made:
                self._lose(largest, next(iter(largest.made)))
            else:
                return

    def _lose(self, tenant: _Tenant, key: str) -> None:
        """Keep nothing of an answer that is being made."""
        entry = tenant.made.pop(key)
        tenant.bytes -= entry.bytes
        self.bytes -= entry.bytes
        entry.lost, entry.parts, entry.bytes = True, [], 0
        entry.ended.set()

    def _forget(self, tenant: _Tenant) -> None:
        key, entry = tenant.kept.popitem(last=False)
        del tenant.entries[key]
        tenant.bytes -= entry.bytes
        self.bytes -= entry.bytes

    def _forget_old(self, tenant: _Tenant) -> None:
        horizon = self._clock() - self._kept_s
        while tenant.kept and next(iter(tenant.kept.values())).since <= horizon:
            self._forget(tenant)
