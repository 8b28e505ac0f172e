"""Agent sessions: KV tokens of one engine, reserved until somebody lets go of them or falls silent.

Rules
- A session is on one engine, that of its model with most tokens free among those that take another; its requests draw
  from it before they draw from anybody's share.
- An engine takes as many sessions as it has places beside its line, so a request of a session waits for no other.
- One that does not fit now waits, in the order in which sessions were asked for, or is refused with the figures; one
  that could never fit is refused at once. What routers keep for requests to come is no reason to refuse anybody: it is
  called back, and one that does not want to wait does so for that (`RECALL_S`).
- While a session waits, no router's share in that pool grows, and what routers do not use comes back
  (`core.memory.shares`).

Invariant: a session that is open has its tokens; they are nobody else's while it waits for a tool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from serve_app.core.memory.grants import Grants
from serve_app.core.memory.leases import Hold, Kind, Lease
from serve_app.core.memory.ledger import Ledger
from serve_app.core.memory.shares import Shares
from serve_app.errors import BadRequest, InsufficientMemory, LeaseConflict, LeaseNotFound, Overloaded, Unavailable

KEEPER = "sessions"  # the owner of all of them: a session outlives the router that opened it
FOREVER_S = 1e12  # the keeper's time to live; a session has its own
ANY_NUMBER = 2**31
RECALL_S = 1.0  # a router gives credit back within a round trip, or it is silent and its time to live has to end first
TOO_LARGE = "session_too_large"  # the code of a session that could never fit


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

    def __post_init__(self) -> None:
        if self.tokens < 1 or not self.ttl_s > 0:
            raise ValueError(f"session {self.session_id!r}: {self.tokens} tokens for {self.ttl_s} s")


@dataclass(frozen=True, slots=True)
class Session:
    """An open session."""

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
    """Who has a session, and who waits for one.

    Args:
        idle: the KV tokens of an engine that routers have as credit, which nobody uses; by their last word.
    """

    def __init__(
        self, ledger: Ledger, grants: Grants, shares: Shares, now: float, idle: Callable[[str], int] = lambda pool: 0
    ) -> None:
        self._ledger, self._grants, self._shares, self._idle = ledger, grants, shares, idle
        self._open: dict[str, SessionAsk] = {}
        self._waiting: dict[str, SessionAsk] = {}  # in the order they came
        self.opened = 0  # counter: whoever has looked for a session before and found none has to look again
        ledger.join(KEEPER, FOREVER_S, now)

    def ask(self, ask: SessionAsk, now: float) -> Session | None:
        """Open a session; None: it waits, and `settle` will tell. The same again is the same session, renewed.

        Raises:
            LeaseConflict: it is open, and asks for something else now.
            BadRequest: it is larger than what any engine has to give.
            InsufficientMemory: it does not fit now and will not wait.
            Overloaded: its tenant has as many as it may.
            Unavailable: no engine of this model runs.
        """
        known = self._open.get(ask.session_id)
        if known is not None:
            if (known.model, known.tokens) != (ask.model, ask.tokens):
                raise LeaseConflict(
                    f"session {own_id(ask.session_id)!r} is open with {known.tokens} KV tokens of {known.model}; "
                    f"close it to have {ask.tokens} of {ask.model}"
                )
            return self.renew(ask.session_id, now)
        pools = self._grants.of(ask.model)
        if not pools:
            raise Unavailable(f"no engine of {ask.model!r} runs")
        largest = max(self._ledger.limit(pool) for pool in pools)
        if ask.tokens > largest:
            raise BadRequest(
                f"session {own_id(ask.session_id)!r}: {ask.tokens} KV tokens asked, no engine of {ask.model} has more "
                f"than {largest} to give",
                code=TOO_LARGE,
            )
        self._check_tenant(ask)
        self._waiting[ask.session_id] = ask
        self._place(now)
        if ask.session_id in self._open:
            return self.look(ask.session_id, now)
        if ask.wait_until is None and self._fits_after_recall(ask, pools):
            ask = self._waiting[ask.session_id] = replace(ask, wait_until=now + RECALL_S)
        if ask.wait_until is not None and ask.wait_until > now:
            return None
        del self._waiting[ask.session_id]
        self._reopen(ask.model)
        raise InsufficientMemory(self.shortage(ask))

    def _fits_after_recall(self, ask: SessionAsk, pools: list[str]) -> bool:
        """Whether there is enough where routers give back what nobody uses."""
        open_to = (pool for pool in pools if self._on(pool) < ask.per_engine)
        return any(self._ledger.free(pool) + self._idle(pool) >= ask.tokens for pool in open_to)

    def settle(self, now: float) -> tuple[list[Session], list[SessionAsk]]:
        """Open what fits by now; returns the sessions that opened and those whose wait is over."""
        before = set(self._open)
        self._place(now)
        late = [ask for ask in self._waiting.values() if ask.wait_until is None or ask.wait_until <= now]
        for ask in late:
            del self._waiting[ask.session_id]
            self._reopen(ask.model)
        return [self.look(name, now) for name in self._open if name not in before], late

    def renew(self, session_id: str, now: float) -> Session:
        """Somebody still wants it. Raises LeaseNotFound."""
        ask = self._known(session_id)
        self._ledger.renew(session_id, now + ask.ttl_s)
        return self.look(session_id, now)

    def close(self, session_id: str) -> list[Lease]:
        """Nobody wants it any more; returns the leases that ended. Raises LeaseNotFound."""
        if self._waiting.pop(session_id, None) is not None:
            return []
        self._known(session_id)
        del self._open[session_id]
        self._shares.drop(session_id)
        return self._ledger.end(session_id)

    def forget(self, ended: list[Lease]) -> None:
        """Leases ended, by silence or with their engine; drop the sessions among them."""
        for lease in ended:
            if lease.kind is Kind.SESSION:
                self._open.pop(lease.lease_id, None)
                self._shares.drop(lease.lease_id)

    def touch(self, session_id: str, now: float) -> None:
        """A request of it runs or waits for its tokens; one that is no session (any more) changes nothing."""
        ask = self._open.get(session_id)
        if ask is not None:
            self._ledger.renew(session_id, now + ask.ttl_s)

    def is_open(self, session_id: str) -> bool:
        return session_id in self._open

    def asked(self, session_id: str) -> SessionAsk:
        """What an open session was asked for with, as it is stored. Raises LeaseNotFound."""
        return replace(self._known(session_id), wait_until=None)

    def shortage(self, ask: SessionAsk) -> str:
        """Why a session does not fit now, with the figures."""
        pools = self._grants.of(ask.model)
        free = max((self._ledger.free(pool) for pool in pools), default=0)
        text = f"session {own_id(ask.session_id)!r}: {ask.tokens} KV tokens asked, {free} free"
        fullest = min((self._on(pool) for pool in pools), default=0)
        places = f"; {fullest} sessions are open there, {ask.per_engine} at most" if fullest >= ask.per_engine else ""
        return f"{text} on the best engine of {ask.model}{places}"

    def restore(self, ask: SessionAsk, pool: str, now: float) -> None:
        """A session from the roster. Raises as `Ledger.reserve`."""
        self._reserve(ask, pool, now)

    def look(self, session_id: str, now: float) -> Session:
        """Raises LeaseNotFound."""
        ask = self._known(session_id)
        lease = self._ledger.lease(session_id)
        expires_at = lease.expires_at if lease.expires_at is not None else now + ask.ttl_s
        return Session(
            session_id,
            ask.model,
            lease.holds[0].on,
            lease.holds[0].amount,
            ask.ttl_s,
            expires_at,
            ask.given,
            ask.granted_bytes,
        )

    def all(self, now: float) -> list[Session]:
        """Those open, oldest first."""
        return [self.look(name, now) for name in self._open]

    def waiting(self) -> list[SessionAsk]:
        """Those that wait, the first first."""
        return list(self._waiting.values())

    def _known(self, session_id: str) -> SessionAsk:
        ask = self._open.get(session_id)
        if ask is None:
            raise LeaseNotFound(
                f"there is no session {own_id(session_id)!r}: it was never opened, was closed, has been silent for too "
                "long, or its engine has ended",
                param="session_id",
                code="session_not_found",
            )
        return ask

    def _check_tenant(self, ask: SessionAsk) -> None:
        if ask.session_id in self._waiting:
            return
        tenant = ask.session_id.rpartition(" ")[0]
        having = sum(name.rpartition(" ")[0] == tenant for name in (*self._open, *self._waiting))
        if having >= ask.per_tenant:
            raise Overloaded(
                f"this key's tenant has {having} sessions, open or waiting, of {ask.per_tenant} it may have; close one",
                code="too_many_sessions",
            )

    def _on(self, pool: str) -> int:
        """Sessions on an engine."""
        return sum(lease.kind is Kind.SESSION for lease in self._ledger.on(pool))

    def _place(self, now: float) -> None:
        """Open what fits; the first of a model that does not holds back those behind it."""
        short: set[str] = set()
        for ask in list(self._waiting.values()):
            pools = self._grants.of(ask.model)
            if ask.model in short or not pools:
                continue
            open_to_it = [one for one in pools if self._on(one) < ask.per_engine]
            pool = max(open_to_it, key=self._ledger.free, default=None)
            if pool is not None and self._ledger.free(pool) >= ask.tokens:
                del self._waiting[ask.session_id]
                self._reserve(ask, pool, now)
                self._reopen(ask.model)
            else:
                short.add(ask.model)
                for one in open_to_it:
                    self._shares.recall(one)

    def _reserve(self, ask: SessionAsk, pool: str, now: float) -> None:
        hold = Hold(pool, ask.tokens)
        self._ledger.reserve(ask.session_id, Kind.SESSION, KEEPER, [hold], expires_at=now + ask.ttl_s)
        self._open[ask.session_id] = ask
        self.opened += 1

    def _reopen(self, model: str) -> None:
        if not any(ask.model == model for ask in self._waiting.values()):
            for pool in self._grants.of(model):
                self._shares.reopen(pool)
