"""The ledger of GPU memory: a tree of leases.

    device (bytes) <- engine (a hold per rank) <- session (KV tokens)
                   <- reservation, of an engine that has not started

A running engine and a session each have a pool (`core.pools`): what requests use of their slots and KV tokens.

Rules
- Siblings are summed, children are never counted twice: what a request uses of a session counts in the session, not in
  the engine.
- A tenth of an engine's KV pool is reserved for growth: only calls with `growth=True` may use it.
- A lease has one owner, and an owner sends heartbeats. When they stop, its leases end; those of engines stay on their
  devices as ENDING until the memory was observed free (`end`). A session or a reservation is its own owner: the
  requests and the controller that use it send its heartbeats.
- A lease that ends also ends the leases on it, and its pool.
- A method that raises has changed nothing.

Invariant: the leases on a node and what its pool uses never exceed its capacity, in any order of operations, ends and
expiries.

Each method is O(1) in leases and owners, `leave` and `end` per lease that ends; `expire` looks at every owner. No
clock: `now` is seconds of the host's one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter

from serve_app.core.memory.leases import Device, DeviceUse, Hold, Lease, LeaseKind, LedgerNode, Owner, Phase
from serve_app.core.pools import RequestPool, TokenSpace
from serve_app.errors import InsufficientMemory, LeaseConflict, LeaseNotFound

GROWTH_SHARE = 0.10  # of a KV pool, kept for requests that outgrow their estimate


class Ledger:
    """Devices, the leases on them and their owners."""

    def __init__(self, growth_share: float = GROWTH_SHARE) -> None:
        self._growth_share = growth_share
        self._devices: dict[str, tuple[Device, LedgerNode]] = {}
        self._leases: dict[str, LedgerNode] = {}
        self.lease_owners: dict[str, Owner] = {}

    # Devices

    def add_device(self, device: Device) -> None:
        """Add a device, or change the size of one without leases; adding the same one again changes nothing.

        Raises:
            LeaseConflict: it has leases and another size than before, or its key is a lease's name.
        """
        known = self._devices.get(device.key)
        if known is not None and known[0] == device:
            return
        if device.key in self._leases or (known is not None and known[1].children):
            raise LeaseConflict(f"device {device.key} has other bytes than before, and is in use")
        size = device.capacity_bytes
        self._devices[device.key] = (device, LedgerNode(device.key, LeaseKind.DEVICE, "", [], TokenSpace(size, size)))

    def remove_device(self, key: str) -> list[Lease]:
        """Remove a device, and end every engine with a rank on it; returns the leases that ended.

        Such an engine's holds on other devices stay as ENDING. An unknown key changes nothing.
        """
        known = self._devices.pop(key, None)
        if known is None:
            return []
        _, node = known
        ended: list[Lease] = []
        for lease in list(node.children.values()):
            ended += self.end(lease.name, memory_gone=False)
            lease.holds = [(on, amount) for on, amount in lease.holds if on is not node]
            if not lease.holds:
                self._leases.pop(lease.name, None)  # a reservation ends with its device
        return ended

    # Owners

    def join(self, owner: str, ttl_s: float, now: float) -> None:
        """Add an owner that sends a heartbeat at least every `ttl_s`; for a known owner, set another time to live.

        Raises:
            ValueError: `ttl_s` is not above zero.
        """
        if not ttl_s > 0:
            raise ValueError(f"ttl_s is {ttl_s}")
        known = self.lease_owners.get(owner)
        if known is None:
            self.lease_owners[owner] = Owner(ttl_s, now + ttl_s)
        else:
            known.ttl_s = ttl_s
            known.expires_at = now + ttl_s

    def heartbeat(self, owner: str, now: float) -> bool:
        """An owner is alive; False: unknown or expired, it has to join and report its holds again. An older heartbeat
        changes nothing."""
        known = self.lease_owners.get(owner)
        if known is None:
            return False
        known.expires_at = max(known.expires_at, now + known.ttl_s)
        return True

    def last_seen(self, owner: str) -> float:
        """When a known owner has sent its last heartbeat, if the time that `extend` was told of had not passed."""
        known = self.lease_owners[owner]
        return known.expires_at - known.ttl_s

    def extend(self, span_s: float) -> None:
        """No heartbeat could be processed for this long: extend all expiries by it. O(n), and rare."""
        for owner in self.lease_owners.values():
            owner.expires_at += span_s

    def leave(self, owner: str) -> list[Lease]:
        """Remove an owner; returns the leases that ended. An unknown owner changes nothing."""
        known = self.lease_owners.pop(owner, None)
        if known is None:
            return []
        ended: list[Lease] = []
        for name in list(known.leases):
            if name in self._leases:  # not ended together with its parent
                ended += self.end(name, memory_gone=False)
        return ended

    # Leases

    def reserve(
        self, lease_id: str, kind: LeaseKind, owner: str, holds: Sequence[Hold], *, growth: bool = False
    ) -> None:
        """Create a lease with all its holds, or raise.

        Args:
            lease_id: unique among leases and devices.
            owner: an owner that has joined.
            holds: of an engine: a device and bytes for each rank; of all others: one lease and KV tokens.
            growth: the growth reserve may be used.

        Raises:
            InsufficientMemory: names the node and the missing amount.
            LeaseNotFound: the owner or the parent is unknown.
            LeaseConflict: the id is taken, the parent cannot have a lease of this kind, or two ranks are on one device.
            ValueError: no hold, too many, or one that is not above zero.
        """
        if lease_id in self._leases or lease_id in self._devices:
            raise LeaseConflict(f"lease {lease_id!r} exists already")
        known = self.lease_owners.get(owner)
        if known is None:
            raise LeaseNotFound(f"owner {owner!r} has not joined, or has expired")
        if not holds or (kind is not LeaseKind.ENGINE and len(holds) > 1):
            where = {LeaseKind.ENGINE: "devices", LeaseKind.RESERVATION: "one device"}.get(kind, "one other lease")
            raise ValueError(f"a lease of a {kind} lies on {where}")
        for hold in holds:
            if hold.amount <= 0:
                raise ValueError(f"{hold.on}: {hold.amount} asked")
        if len({hold.on for hold in holds}) < len(holds):
            raise LeaseConflict("two ranks of one engine cannot be on one device")
        nodes = [(self._node(hold.on), hold.amount) for hold in holds]
        for node, amount in nodes:
            node.check_child(kind)
            node.check(amount, growth=growth)
        known.leases[lease_id] = self._add(lease_id, kind, owner, nodes)

    def reserve_alone(
        self, lease_id: str, kind: LeaseKind, hold: Hold, ttl_s: float, now: float, *, growth: bool = False
    ) -> None:
        """Create a lease that is its own owner: it ends unless `heartbeat` or `join` renews it. Raises as `reserve`."""
        if lease_id in self.lease_owners:
            raise LeaseConflict(f"owner {lease_id!r} exists already")
        self.join(lease_id, ttl_s, now)
        try:
            self.reserve(lease_id, kind, lease_id, [hold], growth=growth)
        except Exception:
            self.leave(lease_id)
            raise

    def commit(self, lease_id: str, kv_tokens: int) -> Lease:
        """An engine runs, with this many tokens in its KV pool; from now on leases on it are possible.

        Raises:
            LeaseNotFound: no such lease.
            LeaseConflict: not an engine's lease, or not RESERVED.
            ValueError: negative tokens.
        """
        lease = self._require_lease(lease_id)
        if lease.kind is not LeaseKind.ENGINE or lease.phase is not Phase.RESERVED:
            raise LeaseConflict(f"lease {lease_id!r} ({lease.kind}, {lease.phase}) cannot be committed")
        if kv_tokens < 0:
            raise ValueError(f"kv_tokens is {kv_tokens}")
        lease.phase = Phase.COMMITTED
        lease.space.capacity = kv_tokens
        lease.space.limit = kv_tokens - int(kv_tokens * self._growth_share)
        return lease.view()

    def open_pool(self, name: str, slots: int) -> None:
        """Open the pool of a running engine, or of a session (by its lease), with these slots; it ends with its lease.
        If it is open, set its slots.

        Raises:
            LeaseNotFound, LeaseConflict: there is no such engine or session, or the engine does not run.
            ValueError: negative slots.
        """
        if slots < 0:
            raise ValueError(f"engine {name!r}: slots is {slots}")
        node = self._require_lease(name)
        node.check_runs()
        pool = node.space.pool or RequestPool(name, node.space, slots)
        pool.set_slots(slots)

    def pool(self, name: str) -> RequestPool | None:
        """The pool of an engine or a session; None: there is none, or the engine does not run."""
        lease = self._leases.get(name)
        return None if lease is None else lease.space.pool

    def resize(self, lease_id: str, amounts: Sequence[int], *, growth: bool = False) -> None:
        """Set a lease's amounts, in the order of its holds, all of them or none.

        Raises:
            InsufficientMemory: growing: names the node and the missing amount; shrinking: leases on it need more.
            LeaseNotFound: no such lease.
            LeaseConflict: it is ENDING.
            ValueError: another number of amounts, or one that is not above zero.
        """
        lease = self._require_lease(lease_id)
        if lease.phase is Phase.ENDING:
            raise LeaseConflict(f"lease {lease_id!r} is ending")
        if len(amounts) != len(lease.holds) or min(amounts) <= 0:
            raise ValueError(f"lease {lease_id!r}: {len(lease.holds)} amounts above zero are wanted, got {amounts}")
        for (node, before), amount in zip(lease.holds, amounts, strict=True):
            if amount > before:
                node.check(amount - before, growth=growth)
        space = lease.space
        if lease.kind is not LeaseKind.ENGINE and amounts[0] < space.used:
            raise InsufficientMemory(f"{lease_id}: {space.used} of {space.capacity} are in use, {amounts[0]} wanted")
        for (node, before), amount in zip(lease.holds, amounts, strict=True):
            node.space.hold(amount - before)
        lease.holds = [(node, amount) for (node, _), amount in zip(lease.holds, amounts, strict=True)]
        if lease.kind is LeaseKind.SESSION:
            space.capacity = space.limit = amounts[0]

    def end(self, lease_id: str, *, memory_gone: bool = True) -> list[Lease]:
        """End a lease and all leases on it; returns them, children first.

        Args:
            memory_gone: False: an engine's memory was not observed free; it stays on its devices as ENDING.

        Raises:
            LeaseNotFound: no such lease.
        """
        lease = self._require_lease(lease_id)
        ended = [one for child in list(lease.children) for one in self.end(child)]
        if lease.phase is not Phase.ENDING:
            ended.append(lease.view())
        if memory_gone or lease.kind is not LeaseKind.ENGINE:
            for node, amount in lease.holds:
                node.space.hold(-amount)
                del node.children[lease_id]
            del self._leases[lease_id]
        else:
            lease.phase = Phase.ENDING
            lease.space = TokenSpace()
        owner = self.lease_owners.get(lease.owner)
        if owner is not None:
            owner.leases.pop(lease_id, None)
        return ended

    def revive(self, lease_id: str) -> Lease:
        """An engine that was declared gone is alive, and its memory is not leased again: RESERVED again.

        Raises:
            LeaseNotFound: no such lease, or its owner has not joined again.
            LeaseConflict: it is not ENDING.
        """
        lease = self._require_lease(lease_id)
        owner = self.lease_owners.get(lease.owner)
        if owner is None:
            raise LeaseNotFound(f"owner {lease.owner!r} has not joined again")
        if lease.phase is not Phase.ENDING:
            raise LeaseConflict(f"lease {lease_id!r} is {lease.phase}, not ending")
        lease.phase = Phase.RESERVED
        owner.leases[lease_id] = lease
        return lease.view()

    # Time

    def expire(self, now: float) -> list[Lease]:
        """End all leases of expired owners, the earliest expired first; returns the leases that ended. O(owners)."""
        late = [(owner.expires_at, name) for name, owner in self.lease_owners.items() if owner.expires_at <= now]
        return [lease for _, name in sorted(late, key=itemgetter(0)) for lease in self.leave(name)]

    # Looking

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._leases

    def lease(self, lease_id: str) -> Lease:
        """Raises LeaseNotFound."""
        return self._require_lease(lease_id).view()

    def phase(self, lease_id: str) -> Phase:
        """The phase of a lease. Raises LeaseNotFound."""
        return self._require_lease(lease_id).phase

    def leases(self, kind: LeaseKind | None = None, phase: Phase | None = None) -> Iterator[Lease]:
        """All leases, or all of a kind, in a phase. O(n)."""
        of_kind = (lease for lease in self._leases.values() if kind is None or lease.kind is kind)
        return (lease.view() for lease in of_kind if phase is None or lease.phase is phase)

    def leases_on(self, name: str) -> list[Lease]:
        """The leases on a device or a lease, oldest first. Raises LeaseNotFound."""
        return [child.view() for child in self._node(name).children.values()]

    def knows(self, owner: str) -> bool:
        """Whether an owner has joined and has not expired by the last call of `expire`."""
        return owner in self.lease_owners

    def free(self, name: str, *, growth: bool = False) -> int:
        """Free amount of a device (bytes) or a lease (KV tokens). Raises LeaseNotFound."""
        return self._node(name).space.free(growth=growth)

    def held(self, name: str) -> int:
        """The amount that leases and requests use of a device or a lease. Raises LeaseNotFound."""
        return self._node(name).space.used

    def limit(self, name: str) -> int:
        """The amount that can be reserved on an empty device or lease. Raises LeaseNotFound."""
        return self._node(name).space.limit

    def devices(self) -> list[DeviceUse]:
        """All devices with their leased bytes."""
        return [DeviceUse(device, node.space.held) for device, node in self._devices.values()]

    def free_bytes(self) -> dict[str, int]:
        """Free bytes of each device, by its key."""
        return {key: device.capacity_bytes - node.space.held for key, (device, node) in self._devices.items()}

    # Inside

    def _require_lease(self, lease_id: str) -> LedgerNode:
        lease = self._leases.get(lease_id)
        if lease is None:
            raise LeaseNotFound(f"there is no lease {lease_id!r}")
        return lease

    def _node(self, name: str) -> LedgerNode:
        device = self._devices.get(name)
        return device[1] if device is not None else self._require_lease(name)

    def _add(self, name: str, kind: LeaseKind, owner: str, holds: list[tuple[LedgerNode, int]]) -> LedgerNode:
        phase = Phase.RESERVED if kind is LeaseKind.ENGINE else Phase.COMMITTED
        tokens = holds[0][1] if kind is LeaseKind.SESSION else 0
        lease = self._leases[name] = LedgerNode(name, kind, owner, holds, TokenSpace(tokens, tokens), phase)
        for node, amount in holds:
            node.space.hold(amount)
            node.children[name] = lease
        return lease
