"""Answers kept by `Idempotency-Key`, so that a client that repeats a request is answered, not served twice.

Invariant: while an answer is kept or being made, a repeat with the same body gets exactly its bytes and runs nothing; a
run that ended without a full answer leaves nothing behind, and the next repeat runs.

Kept in one router replica, within bounds: a repeat that reaches another one, or comes too late, runs again.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from serve_app.errors import BadRequest

KEPT_S = 600.0  # a client's retries are over within minutes: the OpenAI SDK's own time limit is ten
MAX_ENTRIES = 4096  # keys remembered per router replica
MAX_BYTES = 64 * 2**20  # of kept answers per router replica; about 30,000 chat answers

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
    ended: asyncio.Event = field(default_factory=asyncio.Event)


def fingerprint(operation: str, body: Mapping[str, Any]) -> bytes:
    """Tells two requests under one key apart; field order does not count."""
    return hashlib.blake2b(_encoder.encode([operation, body]), digest_size=16).digest()


class Replays:
    """The kept answers of one router replica.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        kept_s: float = KEPT_S,
        max_entries: int = MAX_ENTRIES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._clock = clock
        self._kept_s = kept_s
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Owner, _Entry] = OrderedDict()  # oldest first
        self._bytes = 0

    async def claim(self, owner: Owner, print_: bytes) -> Answer | None:
        """The kept answer, waited for while its run is under way; or None: the caller runs it and must call `settle`.

        Raises:
            BadRequest: the key was used for another request.
        """
        while True:
            self._forget_old()
            entry = self._entries.get(owner)
            if entry is None:
                self._entries[owner] = _Entry(print_, self._clock())
                return None
            if entry.fingerprint != print_:
                raise BadRequest(
                    "this Idempotency-Key was used for a different request",
                    param="Idempotency-Key",
                    code="idempotency_key_reused",
                )
            if entry.answer is not None:
                return entry.answer
            await entry.ended.wait()

    def settle(self, owner: Owner, answer: Answer | None) -> None:
        """The run that `claim` allowed has ended, with a full answer or without."""
        entry = self._entries[owner]
        if answer is None or len(answer.body) > self._max_bytes:
            del self._entries[owner]
        else:
            entry.answer, entry.since = answer, self._clock()
            self._entries.move_to_end(owner)
            self._bytes += len(answer.body)
            self._forget_old()
        entry.ended.set()

    def _forget_old(self) -> None:
        """Drop kept answers that are too old or too many; runs under way stay."""
        horizon = self._clock() - self._kept_s
        crowded = len(self._entries) > self._max_entries or self._bytes > self._max_bytes
        for owner, entry in list(self._entries.items()) if crowded else self._oldest():
            if entry.answer is None:
                continue
            if entry.since > horizon and len(self._entries) <= self._max_entries and self._bytes <= self._max_bytes:
                return
            del self._entries[owner]
            self._bytes -= len(entry.answer.body)

    def _oldest(self) -> list[tuple[Owner, _Entry]]:
        for owner, entry in self._entries.items():
            return [(owner, entry)]
        return []
