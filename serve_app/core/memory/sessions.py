"""Agent sessions: KV tokens of one engine, reserved until the session is closed or expires.

Rules
- A session is a lease on its engine, and a pool for one request at a time: its tokens, and one slot besides those of
  the queue (`core.queue.session_place`). An engine takes as many sessions as it has such slots.
- Requests renew a session when they arrive and when they end; a session with a running request does not expire.
- A session closed while its request runs is unknown at once, and keeps what the request holds until that ends. So long
  it counts for its tenant, with that many tokens. If what runs is unknown, it keeps everything until that is known.
- A session can be taken back for others that wait (`core.shared_queue.session_reclaim`). Its agent is told why.

Invariant: an open session has its tokens; no other party uses them, also while the agent runs a tool.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from math import inf

from serve_app.core.memory.checkpoint import Checkpoint, EntryKind
from serve_app.core.memory.leases import Hold, LeaseKind
from serve_app.core.memory.ledger import Ledger
from serve_app.core.messages import message
from serve_app.errors import LeaseNotFound
from serve_app.types import RequestClass

SESSIONS_OWNER = "sessions"  # has the accounts of openings in the queue, as a router has those of its requests
UNLIMITED = 2**31
MAX_TAKEN_BACK = 1024  # sessions whose agents are told why; each is a name and a sentence


@message
@dataclass(frozen=True, slots=True)
class SessionRequest:
    """A request to open a session.

    Args:
        session_id: unique among open sessions: `session_name` of its tenant and the tenant's own id.
        model: the model to reserve KV tokens of.
        tokens: KV tokens.
        ttl_s: time without requests and renewals after which it ends.
        wait_until: time until which it waits for free capacity; None: it does not wait.
        requested_size: the size in the caller's own unit, for reports.
        granted_bytes: size of these tokens in bytes, over the KV caches of all ranks.
        per_engine: maximum number of sessions of one engine.
        per_tenant: maximum number of sessions of its tenant, open or waiting, this one included.
        request_class: its class in the queue.
        max_share: the part of the model's KV tokens that sessions of its tenant may hold, this one included.
    """

    session_id: str
    model: str
    tokens: int
    ttl_s: float
    wait_until: float | None = None
    requested_size: str = ""
    granted_bytes: int = 0
    per_engine: int = UNLIMITED
    per_tenant: int = UNLIMITED
    request_class: RequestClass = RequestClass.NORMAL
    max_share: float = 1.0

    def __post_init__(self) -> None:
        if self.tokens < 1 or not self.ttl_s > 0:
            raise ValueError(f"session {self.session_id!r}: {self.tokens} tokens for {self.ttl_s} s")

    @property
    def tenant(self) -> str:
        return self.session_id.rpartition(" ")[0]


@message
@dataclass(frozen=True, slots=True)
class SessionEntry:
    """A session in the checkpoint: its request, lease and engine. `closed`: it is closed, a request still runs, and the
    request's tokens are those that the lease has kept."""

    request: SessionRequest
    lease: str
    engine: str
    closed: bool = False


@message
@dataclass(frozen=True, slots=True)
class Session:
    """An open session, as its callers see it. `taken_back_at`: when it ends for others that wait; None: it does not."""

    request: SessionRequest
    engine: str
    expires_at: float
    taken_back_at: float | None = None

    def relative_to(self, now: float) -> Session:
        """The same with seconds from `now` instead of moments, because clocks of two machines differ."""
        ends = self.taken_back_at
        return replace(self, expires_at=self.expires_at - now, taken_back_at=None if ends is None else ends - now)


def session_name(tenant: str, session_id: str) -> str:
    """A session's unique name. A tenant's own id has no space, so names of two tenants never collide.

    Raises:
        LeaseNotFound: the id has one, so there is no such session: else its first part would count to the tenant.
    """
    if " " in session_id:
        raise _unknown(session_id)
    return f"{tenant} {session_id}"


def tenant_session_id(name: str) -> str:
    """A session's id as used by its tenant."""
    return name.rpartition(" ")[2]


def round_up_to_bucket(amount: int, sizes: Sequence[int]) -> int:
    """Round up to the next size; above the largest to its next multiple; no sizes: `amount` itself (whole GPUs).

    Multiples, because other sizes leave gaps that only the same sizes can fill, and a refusal would let a deployment
    setting decide what can run.

    Raises:
        ValueError: a negative amount, or sizes that do not rise from above zero.
    """
    if amount < 0 or any(size <= 0 for size in sizes) or list(sizes) != sorted(set(sizes)):
        raise ValueError(f"amount is {amount}, sizes are {sizes}")
    if not sizes:
        return amount
    return next((size for size in sizes if size >= amount), -(-amount // sizes[-1]) * sizes[-1])


def tokens_in_bytes(size: int, pool_bytes: int, pool_tokens: int, block_tokens: int) -> int:
    """KV tokens that fit into `size` bytes of a pool, in whole blocks: floor(bytes / bytes of a block) x block size.

    Args:
        size: bytes over all ranks; so are `pool_bytes`.
    """
    return size * pool_tokens // (block_tokens * pool_bytes) * block_tokens


def bytes_for_tokens(tokens: int, pool_bytes: int, pool_tokens: int, block_tokens: int) -> int:
    """The least bytes over all ranks that hold these tokens: `tokens_in_bytes` of them is at least `tokens`."""
    return -(-(-(-tokens // block_tokens) * block_tokens * pool_bytes) // pool_tokens)


class SessionLeases:
    """The sessions. O(1) per method, unless stated.

    Args:
        checkpoint: where they are kept.
        epoch: of the quota actor; part of lease names, so that they differ from those of earlier epochs.
    """

    def __init__(self, ledger: Ledger, checkpoint: Checkpoint, epoch: int, now: float) -> None:
        self._ledger = ledger
        self._checkpoint = checkpoint
        self._lease_suffixes = (f"#{epoch}.{number}" for number in itertools.count(1))
        self.by_session_id: dict[str, SessionEntry] = {}  # open sessions, oldest first
        self.by_lease: dict[str, SessionEntry] = {}  # by lease, closed ones included
        self._by_engine: dict[str, dict[str, None]] = {}  # the leases of `by_lease` on each engine
        self.closed_leases: set[str] = set()  # leases of closed sessions with a running request
        self.reserved_tokens: Counter[str] = Counter()  # KV tokens of open sessions, by engine
        # KV tokens of sessions by model and tenant, and their number by tenant; closed ones included
        self.held_by_tenant = defaultdict[str, Counter[str]](Counter)
        self.count_by_tenant: Counter[str] = Counter()
        self.notices: dict[str, float] = {}  # leases that are to be taken back, and when
        self._taken_back: dict[str, str] = {}  # why these sessions have ended, by name
        self._opened_and_ended: list[SessionEntry] = []
        self.version = 0  # rises when an engine's capacity for sessions changes
        self.changed_engines: dict[str, None] = {}  # those whose has changed, until taken out
        ledger.join(SESSIONS_OWNER, inf, now)

    def reserve(self, request: SessionRequest, engine: str, now: float) -> Session:
        """Open a session on an engine. Raises as `Ledger.reserve`."""
        lease = f"{request.session_id}{next(self._lease_suffixes)}"
        entry = SessionEntry(replace(request, wait_until=None), lease, engine)
        self.restore(entry, now)
        self._checkpoint.put((EntryKind.SESSION, entry.lease), entry)
        return self.view(request.session_id)

    def restore(self, entry: SessionEntry, now: float) -> None:
        """Restore a session from the checkpoint. Raises as `Ledger.reserve`."""
        hold = Hold(entry.engine, entry.request.tokens)
        # `growth`: its tokens were granted before, but running requests may have grown since
        self._ledger.reserve_alone(entry.lease, LeaseKind.SESSION, hold, entry.request.ttl_s, now, growth=True)
        self._ledger.open_pool(entry.lease, 1)
        self.by_lease[entry.lease] = entry
        self._by_engine.setdefault(entry.engine, {})[entry.lease] = None
        self._count(entry, 1)
        self._on_change(entry.engine)
        if entry.closed:
            self.closed_leases.add(entry.lease)
        else:
            self.by_session_id[entry.request.session_id] = entry
            self._taken_back.pop(entry.request.session_id, None)
            self.reserved_tokens[entry.engine] += entry.request.tokens
            self._opened_and_ended.append(entry)

    def renew(self, session_id: str, now: float) -> Session:
        """Extend a session by its time to live. Raises LeaseNotFound."""
        self.touch(self._require_open(session_id).lease, now)
        return self.view(session_id)

    def touch(self, lease: str, now: float) -> None:
        """A request of a session arrives or has ended: renew it. An unknown lease changes nothing."""
        self._ledger.heartbeat(lease, now)

    def renew_in_use(self, now: float, unreported: Container[str], used: Container[str]) -> None:
        """Renew sessions that have a request in their place or elsewhere (`used`, by lease), and those on engines where
        this is unknown. O(sessions)."""
        for lease, entry in self.by_lease.items():
            if entry.engine in unreported or lease in used or self.in_use(lease):
                self.touch(lease, now)

    def close(self, session_id: str, unreported: Container[str] = ()) -> None:
        """Close a session; `unreported`: engines where it is unknown what runs. Raises LeaseNotFound."""
        entry = self._require_open(session_id)
        self._mark_closed(entry)
        if entry.engine in unreported:
            self._keep(entry, entry.request.tokens)
        elif self.in_use(entry.lease):
            self._keep(entry, self._ledger.held(entry.lease))
        else:
            self.forget(entry.lease)

    def _keep(self, entry: SessionEntry, tokens: int) -> None:
        """A closed session keeps so many tokens, at least one: its lease has the slot of its request."""
        tokens = max(1, tokens)
        self._ledger.resize(entry.lease, [tokens])
        closed = replace(entry, request=replace(entry.request, tokens=tokens), closed=True)
        self._count(entry, -1)
        self._count(closed, 1)
        self.by_lease[entry.lease] = closed
        self.closed_leases.add(entry.lease)
        self._checkpoint.put((EntryKind.SESSION, entry.lease), closed)
        self._on_change(entry.engine)

    def take_back(self, session_id: str, why: str) -> None:
        """Close a session for others that wait; its agent is told why when it asks for it. Raises LeaseNotFound."""
        self.close(session_id)
        self._taken_back[session_id] = why
        if len(self._taken_back) > MAX_TAKEN_BACK:
            del self._taken_back[next(iter(self._taken_back))]

    def end_unused(self, unreported: Container[str] = ()) -> list[str]:
        """Give back what requests in closed sessions do not hold any more, and end those without one, where this is
        known; returns their engines. O(closed)."""
        # a lease that is not in the ledger has expired, and is forgotten soon
        known = [self.by_lease[lease] for lease in self.closed_leases if lease in self._ledger]
        freed: list[str] = []
        for entry in [entry for entry in known if entry.engine not in unreported]:
            held = self._ledger.held(entry.lease)
            if not self.in_use(entry.lease):
                self.forget(entry.lease)
            elif max(1, held) < entry.request.tokens:
                self._keep(entry, held)
            else:
                continue
            freed.append(entry.engine)
        return freed

    def forget(self, lease: str) -> None:
        """End a session, also after its lease has ended in the ledger; a lease of no session changes nothing."""
        entry = self.by_lease.pop(lease, None)
        if entry is not None:
            self._ledger.leave(lease)
            del self._by_engine[entry.engine][lease]
            if not self._by_engine[entry.engine]:
                del self._by_engine[entry.engine]
            self.closed_leases.discard(lease)
            self._count(entry, -1)
            self._checkpoint.forget((EntryKind.SESSION, lease))
            self._on_change(entry.engine)
            if not entry.closed and self.by_session_id.get(entry.request.session_id) is entry:
                self._mark_closed(entry)

    def in_use(self, lease: str) -> bool:
        """Whether a request runs in a session."""
        pool = self._ledger.pool(lease)
        return pool is not None and pool.is_used

    def _mark_closed(self, entry: SessionEntry) -> None:
        del self.by_session_id[entry.request.session_id]
        self.notices.pop(entry.lease, None)
        self.reserved_tokens[entry.engine] -= entry.request.tokens
        self._on_change(entry.engine)
        self._opened_and_ended.append(replace(entry, closed=True))

    def _on_change(self, engine: str) -> None:
        """An engine has more or less for sessions and requests."""
        self.version += 1
        self.changed_engines[engine] = None

    def _count(self, entry: SessionEntry, sign: int) -> None:
        request = entry.request
        held = self.held_by_tenant[entry.request.model]
        self.count_by_tenant[request.tenant] += sign
        if not self.count_by_tenant[request.tenant]:
            del self.count_by_tenant[request.tenant]
        held[request.tenant] += sign * request.tokens
        if not held[request.tenant]:
            del held[request.tenant]
            if not held:
                del self.held_by_tenant[request.model]

    # Looking

    def open_by_lease(self, lease: str) -> SessionEntry | None:
        """The open session that has this lease."""
        entry = self.by_lease.get(lease)
        return None if entry is None or entry.closed else entry

    def leases_on(self, engine: str) -> list[str]:
        """The leases of sessions on an engine, closed ones included. O(sessions there)."""
        return list(self._by_engine.get(engine, ()))

    def count_on(self, engine: str) -> int:
        """The number of sessions on an engine, closed ones included."""
        return len(self._by_engine.get(engine, ()))

    def held_tokens(self, model: str, tenant: str) -> int:
        """The KV tokens of a tenant's sessions of a model, closed ones included."""
        held = self.held_by_tenant.get(model)
        return 0 if held is None else held[tenant]

    def has_closed(self, model: str, tenant: str) -> bool:
        """Whether a request runs in a closed session of a tenant. O(closed sessions)."""
        closed = (self.by_lease[lease].request for lease in self.closed_leases)
        return any((one.model, one.tenant) == (model, tenant) for one in closed)

    def view(self, session_id: str) -> Session:
        """Raises LeaseNotFound."""
        entry = self._require_open(session_id)
        expires_at = self._ledger.lease_owners[entry.lease].expires_at
        return Session(entry.request, entry.engine, expires_at, self.notices.get(entry.lease))

    def used_at(self, lease: str) -> float:
        """When a session was last used or renewed."""
        return self._ledger.last_seen(lease)

    def all(self) -> list[Session]:
        """The open sessions, oldest first."""
        return [self.view(name) for name in self.by_session_id]

    def take_opened_and_ended(self) -> list[SessionEntry]:
        """Sessions opened and (`closed`) ended since the last call."""
        news, self._opened_and_ended = self._opened_and_ended, []
        return news

    def take_changed(self) -> dict[str, None]:
        """Engines on which sessions have begun, ended or shrunk since the last call."""
        changed, self.changed_engines = self.changed_engines, {}
        return changed

    def _require_open(self, session_id: str) -> SessionEntry:
        entry = self.by_session_id.get(session_id)
        if entry is None and session_id in self._taken_back:
            raise LeaseNotFound(self._taken_back[session_id], param="session_id", code="session_taken_back")
        if entry is None:
            raise _unknown(tenant_session_id(session_id))
        return entry


def _unknown(session_id: str) -> LeaseNotFound:
    return LeaseNotFound(
        f"there is no session {session_id!r}: it was never opened, was closed, has expired, or its engine has ended",
        param="session_id",
        code="session_not_found",
    )
