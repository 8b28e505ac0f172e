"""Agent sessions: KV tokens of one engine, reserved until somebody lets go of them or falls silent.

Rules
- A session is a lease on its engine, and a pool for its requests: its tokens, and one slot of its own beside those of
  the queue (`core.shared_queue.granting` draws from it). An engine takes as many sessions as it has such slots.
- Requests renew a session when they come and when they end; one that has a request running is not silent.
- A session that is closed while a request of it runs is unknown at once, and keeps what that holds until its end.

Invariant: a session that is open has its tokens; they are nobody else's while it waits for a tool.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from serve_app.core.memory.leases import Hold, Kind, slots_of
from serve_app.core.memory.ledger import Ledger
from serve_app.errors import LeaseNotFound
from serve_app.types import RequestClass

KEEPER = "sessions"  # the owner of all of them: a session outlives the router that opened it
FOREVER_S = 1e12  # the keeper's time to live; a session has its own
ANY_NUMBER = 2**31


@dataclass(frozen=True, slots=True)
class SessionAsk:
    """A session somebody wants.

    Args:
        session_id: unique among open sessions: `name_of` its tenant and the tenant's own id.
        model: whose engine.
        tokens: of the KV cache.
        ttl_s: silence after which it ends.
        wait_until: the moment until which it waits for room; None: it does not.
        given: what was asked for in the caller's own unit, for reports.
        granted_bytes: of all ranks' KV cache, which those tokens are.
        per_engine: sessions that one engine takes at most.
        per_tenant: sessions its tenant may have, open or waiting, this one included.
        request_class: as which it waits in the queue.
    """

    session_id: str
    model: str
    tokens: int
    ttl_s: float
    wait_until: float | None = None
    given: str = ""
    granted_bytes: int = 0
    per_engine: int = ANY_NUMBER
    per_tenant: int = ANY_NUMBER
    request_class: RequestClass = RequestClass.NORMAL

    def __post_init__(self) -> None:
        if self.tokens < 1 or not self.ttl_s > 0:
            raise ValueError(f"session {self.session_id!r}: {self.tokens} tokens for {self.ttl_s} s")

    @property
    def tenant(self) -> str:
        return self.session_id.rpartition(" ")[0]


@dataclass(frozen=True, slots=True)
class Reserved:
    """A session as the roster has it: what was asked for, its lease and engine. `closed`: requests of it still run."""

    ask: SessionAsk
    lease: str
    engine: str
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Session:
    """An open session, as its callers see it. `pool`: its engine."""

    session_id: str
    model: str
    pool: str
    tokens: int
    ttl_s: float
    expires_at: float
    given: str
    granted_bytes: int = 0


def name_of(tenant: str, session_id: str) -> str:
    """A session's name here. A tenant's own id has no space, so no two tenants' sessions have the same."""
    return f"{tenant} {session_id}"


def own_id(name: str) -> str:
    """A session's id as its tenant knows it."""
    return name.rpartition(" ")[2]


def bucketed(amount: int, sizes: Sequence[int]) -> int:
    """Round up to the next size; above the largest to its next multiple; no sizes: `amount` itself (whole GPUs).

    Multiples, since a size that is no bucket would leave gaps only its like can fill, and refusing would make a
    deployment setting decide what can run.

    Raises:
        ValueError: a negative amount, or sizes that do not rise from above zero.
    """
    if amount < 0 or any(size <= 0 for size in sizes) or list(sizes) != sorted(set(sizes)):
        raise ValueError(f"amount is {amount}, sizes are {sizes}")
    if not sizes:
        return amount
    return next((size for size in sizes if size >= amount), -(-amount // sizes[-1]) * sizes[-1])


def tokens_in(size: int, pool_bytes: int, pool_tokens: int, block_tokens: int) -> int:
    """KV tokens that fit into so many bytes of a pool, in whole blocks: floor(bytes / bytes of a block) x block size.

    Args:
        size: bytes over all ranks; so are `pool_bytes`.
    """
    return size * pool_tokens // (block_tokens * pool_bytes) * block_tokens


def bytes_of(tokens: int, pool_bytes: int, pool_tokens: int, block_tokens: int) -> int:
    """The least bytes over all ranks that hold these tokens: `tokens_in` of them is at least `tokens`."""
    return -(-(-(-tokens // block_tokens) * block_tokens * pool_bytes) // pool_tokens)


class Sessions:
    """The sessions that there are. O(1) per method save where it is said.

    Args:
        epoch: of the quota actor; no lease of an earlier one has a name of this one's.
    """

    def __init__(self, ledger: Ledger, epoch: int, now: float) -> None:
        self._ledger = ledger
        self._names = (f"#{epoch}.{number}" for number in itertools.count(1))
        self._open: dict[str, Reserved] = {}
        self._leases: dict[str, Reserved] = {}  # of closed ones, too
        self._closed: set[str] = set()  # leases of those
        self._reserved: Counter[str] = Counter()  # tokens of open sessions, by engine
        self._changes: dict[str, Reserved | None] = {}
        self._news: list[Reserved] = []
        self.version = 0  # rises whenever an engine has more or less room for sessions
        ledger.join(KEEPER, FOREVER_S, now)

    def reserve(self, ask: SessionAsk, engine: str, now: float) -> Session:
        """Open a session on an engine. Raises as `Ledger.reserve`."""
        one = Reserved(replace(ask, wait_until=None), f"{ask.session_id}{next(self._names)}", engine)
        self.restore(one, now)
        self._changes[one.lease] = one
        return self.look(ask.session_id, now)

    def restore(self, one: Reserved, now: float) -> None:
        """A session from the roster. Raises as `Ledger.reserve`."""
        hold = Hold(one.engine, one.ask.tokens)
        expires_at = now + one.ask.ttl_s
        # `growth`: what was granted for it is there, be it that those who run have grown since
        self._ledger.reserve(one.lease, Kind.SESSION, KEEPER, [hold], expires_at=expires_at, growth=True)
        self._ledger.open_slots(one.lease, 1)
        self._leases[one.lease] = one
        self.version += 1
        if one.closed:
            self._closed.add(one.lease)
        else:
            self._open[one.ask.session_id] = one
            self._reserved[one.engine] += one.ask.tokens
            self._news.append(one)

    def renew(self, session_id: str, now: float) -> Session:
        """Somebody still wants it. Raises LeaseNotFound."""
        self.touch(self._known(session_id).lease, now)
        return self.look(session_id, now)

    def touch(self, lease: str, now: float) -> None:
        """A request of a session comes or has ended; one that is no session (any more) changes nothing."""
        one = self._leases.get(lease)
        if one is not None:
            self._ledger.renew(lease, now + one.ask.ttl_s)

    def keep(self, now: float, unknown: Container[str] = ()) -> None:
        """Sessions of which a request runs are not silent, nor are those where that is not known. O(sessions)."""
        for lease, one in self._leases.items():
            if one.engine in unknown or self._in_use(lease):
                self.touch(lease, now)

    def close(self, session_id: str) -> None:
        """Nobody wants it any more. Raises LeaseNotFound."""
        one = self._known(session_id)
        self._shut(one)
        if self._in_use(one.lease):
            self._ledger.resize(one.lease, [max(1, self._ledger.held(one.lease))])
            self._changes[one.lease] = self._leases[one.lease] = replace(one, closed=True)
            self._closed.add(one.lease)
        else:
            self._ledger.end(one.lease)
            self.forget(one.lease)

    def take_ended(self, unknown: Container[str] = ()) -> list[str]:
        """End closed sessions of which nothing runs any more, where that is known; returns their engines. O(closed)."""
        there = [lease for lease in self._closed if lease in self._ledger]  # else ended by silence, and forgotten soon
        ended = [self._leases[lease] for lease in there if not self._in_use(lease)]
        ended = [one for one in ended if one.engine not in unknown]
        for one in ended:
            self._ledger.end(one.lease)
            self.forget(one.lease)
        return [one.engine for one in ended]

    def forget(self, lease: str) -> None:
        """A lease has ended, by silence or with its engine; one that is no session's changes nothing."""
        one = self._leases.pop(lease, None)
        if one is not None:
            self._closed.discard(lease)
            self._changes[lease] = None
            self.version += 1
            if not one.closed and self._open.get(one.ask.session_id) is one:
                self._shut(one)

    def _in_use(self, lease: str) -> bool:
        return self._ledger.held(lease) > 0 or self._ledger.held(slots_of(lease)) > 0

    def _shut(self, one: Reserved) -> None:
        del self._open[one.ask.session_id]
        self._reserved[one.engine] -= one.ask.tokens
        self.version += 1
        self._news.append(replace(one, closed=True))

    # Looking

    def get(self, session_id: str) -> Reserved | None:
        """An open session; None: there is none of this name."""
        return self._open.get(session_id)

    def of(self, lease: str) -> Reserved | None:
        """The open session that has this lease."""
        one = self._leases.get(lease)
        return None if one is None or one.closed else one

    def engine_of(self, lease: str) -> str | None:
        """The engine that a session's lease lies on; None: it is no session's."""
        one = self._leases.get(lease)
        return None if one is None else one.engine

    def on(self, engine: str) -> list[str]:
        """The leases of sessions on an engine, of closed ones, too. O(sessions)."""
        return [lease for lease, one in self._leases.items() if one.engine == engine]

    def reserved(self, engine: str) -> int:
        """KV tokens that open sessions have on an engine."""
        return self._reserved[engine]

    def having(self, tenant: str) -> int:
        """Open sessions of a tenant. O(sessions)."""
        return sum(one.ask.tenant == tenant for one in self._open.values())

    def open(self) -> list[Reserved]:
        """Those open, oldest first."""
        return list(self._open.values())

    def look(self, session_id: str, now: float) -> Session:
        """Raises LeaseNotFound."""
        one = self._known(session_id)
        ask, expires_at = one.ask, self._ledger.lease(one.lease).expires_at
        ends_at = now + ask.ttl_s if expires_at is None else expires_at
        return Session(session_id, ask.model, one.engine, ask.tokens, ask.ttl_s, ends_at, ask.given, ask.granted_bytes)

    def all(self, now: float) -> list[Session]:
        """Those open, oldest first."""
        return [self.look(name, now) for name in self._open]

    def take_changes(self) -> dict[str, Reserved | None]:
        """What the roster has to know since this was last asked, by lease; None: it has ended."""
        changes, self._changes = self._changes, {}
        return changes

    def take_news(self) -> list[Reserved]:
        """Sessions that were opened and, `closed`, those that have ended since this was last asked."""
        news, self._news = self._news, []
        return news

    def _known(self, session_id: str) -> Reserved:
        one = self._open.get(session_id)
        if one is None:
            raise LeaseNotFound(
                f"there is no session {own_id(session_id)!r}: it was never opened, was closed, has been silent for too "
                "long, or its engine has ended",
                param="session_id",
                code="session_not_found",
            )
        return one
