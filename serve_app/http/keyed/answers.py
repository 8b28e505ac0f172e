"""The answers to requests with an `Idempotency-Key` at one router: those in progress, and those that it keeps.

The quota actor says which run a key has (`core.claims`); here are the bytes of runs, by the name of the run. A run
writes its answer into a log; every reader, the first client included, reads the log from its beginning.

Invariant: all readers of a run get the same bytes. The last bytes are readable only once the log is sealed. A tenant
has at most `TENANT_BYTES` here, and what it has more of costs its own oldest answers, never another tenant's.

An answer longer than `MAX_ANSWER_BYTES` is not kept: its log becomes a window of `WINDOW_BYTES` behind its fastest
reader, and the run waits for that reader.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from serve_app.core.claims import KEPT_S, Claim, ClaimState
from serve_app.errors import AnswerNotKept, BadRequest
from serve_app.http.idempotency import AnswerCopy, AnswerPart, Head

TENANT_BYTES = 16 * 2**20  # of one tenant per router; about 7,000 chat answers
MAX_BYTES = 512 * 2**20  # of all tenants per router: 32 that use all of theirs
MAX_ANSWER_BYTES = 4 * 2**20  # about 15,000 chunks of a stream
ENTRY_BYTES = 1024  # of an answer besides its body: key, headers, Python objects
WINDOW_BYTES = 256 * 1024  # of an answer that is not kept, for readers of different speed
PART_BYTES = 2**20  # of an answer in one message between routers

_encoder = msgspec.json.Encoder(order="deterministic")


def fingerprint(operation: str, body: Mapping[str, Any]) -> bytes:
    """Distinguishes two requests under one key; the order of fields does not count."""
    return hashlib.blake2b(_encoder.encode([operation, body]), digest_size=16).digest()


def key_digest(tenant: str, key: str) -> bytes:
    """Stands for the key outside this router: short, and without the client's text."""
    return hashlib.blake2b(_encoder.encode([tenant, key]), digest_size=16).digest()


def reused() -> BadRequest:
    """The refusal of a request under the key of another one."""
    return BadRequest(
        "this Idempotency-Key was used for a different request", param="Idempotency-Key", code="idempotency_key_reused"
    )


def not_kept() -> AnswerNotKept:
    """The refusal of a repeat whose answer cannot be repeated."""
    return AnswerNotKept(
        f"the answer to the first request under this Idempotency-Key was not kept: it has more than "
        f"{MAX_ANSWER_BYTES} bytes, or there was no room; to run it again, send another key",
        param="Idempotency-Key",
    )


@dataclass(slots=True, eq=False)
class AnswerLog:
    """The answer of one run. Times are of the host's monotonic clock.

    Args:
        is_kept: False: it is too long, or there was no room; repeats are refused.
        start: offset of the first byte that is still here; above 0 only if the answer is not kept.
        readable: offset up to which readers may read.
        is_sealed: nothing more comes.
        error: what ended the run without an answer.
        offsets: where its readers are, by reader.
    """

    claim: Claim
    changed_at: float
    head: Head | None = None
    is_kept: bool = True
    body: bytearray = field(default_factory=bytearray)
    start: int = 0
    readable: int = 0
    is_sealed: bool = False
    error: BaseException | None = None
    offsets: dict[object, int] = field(default_factory=dict)
    charged: int = 0  # bytes, as the tenant's account has them
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def end(self) -> int:
        return self.start + len(self.body)

    def notify(self) -> None:
        """Wake all that wait for a change."""
        self._news.set()
        self._news = asyncio.Event()

    async def changed(self) -> None:
        """Wait for the next change."""
        await self._news.wait()

    def part(self, offset: int) -> AnswerPart | None:
        """What is readable from there; None: nothing now."""
        if offset < self.start:
            return AnswerPart(self.head, error=not_kept())
        if self.readable > offset or self.is_sealed:
            body = bytes(self.body[offset - self.start : min(self.readable, offset + PART_BYTES) - self.start])
            return AnswerPart(self.head, body, self.is_sealed and offset + len(body) == self.end)
        return None if self.error is None else AnswerPart(self.head, error=self.error)


@dataclass(slots=True)
class _TenantAnswers:
    """By run, the oldest first."""

    running: OrderedDict[str, AnswerLog] = field(default_factory=OrderedDict)
    kept: OrderedDict[str, AnswerLog] = field(default_factory=OrderedDict)
    bytes: int = 0


class AnswerStore:
    """The logs of one router, in progress and kept. Each call is O(1) in their number, except for what it evicts.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tenants: dict[str, _TenantAnswers] = {}
        self.logs: dict[str, AnswerLog] = {}  # by run
        self.bytes = 0

    def begin(self, claim: Claim) -> AnswerLog:
        """The log of a run that begins here."""
        log = self.logs[claim.run] = AnswerLog(claim, self._clock())
        self._tenants.setdefault(claim.tenant, _TenantAnswers()).running[claim.run] = log
        self._charge(log)
        return log

    async def append(self, log: AnswerLog, head: Head, body: bytes, *, is_last: bool) -> None:
        """Add to an answer; returns once there is room for more. The last bytes wait until the log is sealed."""
        log.head = head
        log.body += body
        log.readable = log.end - len(body) if is_last else log.end
        if log.is_kept and log.end > MAX_ANSWER_BYTES:
            self._stop_keeping(log)
        self._charge(log)
        log.notify()
        while not log.is_kept and log.end - log.start > WINDOW_BYTES and not is_last:
            self.trim(log)
            if log.end - max(log.offsets.values(), default=log.start) <= WINDOW_BYTES:
                break
            await log.changed()

    def trim(self, log: AnswerLog) -> None:
        """Drop what all readers have read of an answer that is not kept, and what the fastest has long read; everything
        if there is no reader, since another one would be refused."""
        if log.is_kept:
            return
        if not log.offsets:
            start = log.end
        else:
            start = max(min(log.offsets.values()), max(log.offsets.values()) - WINDOW_BYTES, log.start)
        if start > log.start:
            del log.body[: start - log.start]
            log.start = start
            self._charge(log)
            log.notify()

    def keep(self, log: AnswerLog) -> None:
        """The answer is complete: keep it, or of one that was too long only that it was answered."""
        tenant = self._tenants[log.claim.tenant]
        del tenant.running[log.claim.run]
        log.claim = replace(log.claim, state=ClaimState.KEPT if log.is_kept else ClaimState.NOT_KEPT)
        log.changed_at = self._clock()
        tenant.kept[log.claim.run] = log
        self._make_room(tenant)

    def keep_copy(self, copy: AnswerCopy) -> None:
        """Keep another router's answer."""
        claim = copy.claim
        if claim.run in self.logs or len(copy.body) > MAX_ANSWER_BYTES:
            return
        log = AnswerLog(claim, self._clock(), copy.head, body=bytearray(copy.body))
        log.readable = log.end
        log.is_sealed = True
        self.logs[claim.run] = log
        tenant = self._tenants.setdefault(claim.tenant, _TenantAnswers())
        tenant.kept[claim.run] = log
        self._charge(log)

    def seal(self, log: AnswerLog, error: BaseException | None = None) -> None:
        """Let readers have the last bytes; with an error, what there is is all."""
        log.error = error
        log.is_sealed = error is None
        log.readable = log.end
        self.trim(log)
        log.notify()

    def forget(self, log: AnswerLog) -> None:
        """Remove a log; its present readers can read on."""
        if self.logs.pop(log.claim.run, None) is None:
            return
        tenant = self._tenants[log.claim.tenant]
        tenant.running.pop(log.claim.run, None)
        tenant.kept.pop(log.claim.run, None)
        tenant.bytes -= log.charged
        self.bytes -= log.charged
        log.charged = 0
        if not tenant.running and not tenant.kept:
            del self._tenants[log.claim.tenant]

    def forget_expired(self) -> None:
        """Remove what has been kept for `KEPT_S`."""
        horizon = self._clock() - KEPT_S
        for tenant in list(self._tenants.values()):
            while tenant.kept and (oldest := next(iter(tenant.kept.values()))).changed_at <= horizon:
                self.forget(oldest)

    def claim_of(self, run: str) -> tuple[Claim, float] | None:
        """The claim of a run that this router has, and for how long it has been so."""
        log = self.logs.get(run)
        return None if log is None else (log.claim, self._clock() - log.changed_at)

    def runs(self) -> list[str]:
        """The runs of all logs here."""
        return list(self.logs)

    def running(self) -> frozenset[str]:
        """The runs in progress."""
        return frozenset(run for tenant in self._tenants.values() for run in tenant.running)

    def _charge(self, log: AnswerLog) -> None:
        """Charge the log's present size to its tenant."""
        if log.claim.run not in self.logs:
            return
        more = ENTRY_BYTES + len(log.body) - log.charged
        log.charged += more
        self.bytes += more
        tenant = self._tenants[log.claim.tenant]
        tenant.bytes += more
        self._make_room(tenant)

    def _make_room(self, tenant: _TenantAnswers) -> None:
        """Evict the tenant's oldest answers; if there are none, stop keeping its oldest one in progress."""
        while tenant.bytes > TENANT_BYTES or self.bytes > MAX_BYTES:
            if tenant.kept:
                self.forget(next(iter(tenant.kept.values())))
                continue
            kept = (log for log in tenant.running.values() if log.is_kept and log.body)
            log = next(kept, None)
            if log is None:
                return
            self._stop_keeping(log)

    def _stop_keeping(self, log: AnswerLog) -> None:
        log.is_kept = False
        self.trim(log)
        log.notify()
