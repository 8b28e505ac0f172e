"""The one truth about GPU memory: a tree of leases.

    device (bytes) <- engine (a hold per rank) <- share of a router (KV tokens)
                                               <- session (KV tokens)           <- share of a router
                                               <- slots (sequences)             <- share of a router
                   <- berth, of an engine that has not started

Rules
- Siblings are summed, children are never counted twice: a share of a session counts in the session, not in the engine.
- A tenth of an engine's KV pool is given to nobody beforehand: `grow` may use it, `reserve` may not.
- A lease has one owner, and an owner a heartbeat. When it falls silent its leases end; those of engines stay on their
  devices as ENDING until `memory_gone` says that the memory has been seen free.
- A lease that ends takes what lies on it along.
- A method that raises has changed nothing.

Invariant: what lies on a node never exceeds its capacity, in any order of operations, ends and expiries.

Each method is O(log n) in leases and owners; `leave`, `end` and `expire` are so per lease that ends. No clock: `now` is
seconds of the host's one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from serve_app.core.memory.lease_owners import Alarms, Owner
from serve_app.core.memory.lease_tree import LeaseNode, Node, check_holds, check_may_lie
from serve_app.core.memory.leases import GROWTH_SHARE, Device, DeviceUse, Hold, Kind, Lease, Phase, slots_of
from serve_app.errors import InsufficientMemory, LeaseConflict, LeaseNotFound


class Ledger:
    """Devices, the leases on them and their owners."""

    def __init__(self, growth_share: float = GROWTH_SHARE) -> None:
        if not 0 <= growth_share < 1:
            raise ValueError(f"growth_share is {growth_share}")
        self._growth_share = growth_share
        self._devices: dict[str, tuple[Device, Node]] = {}
        self._leases: dict[str, LeaseNode] = {}
        self._owners: dict[str, Owner] = {}
        self._owner_alarms, self._lease_alarms = Alarms(), Alarms()

    # Devices

    def add_device(self, device: Device) -> None:
        """A device is there; the same one again changes nothing.

        Raises:
            LeaseConflict: it is known with other bytes, or its key is a lease's name.
        """
        known = self._devices.get(device.key)
        if known is not None and known[0] == device:
            return
        if known is not None or device.key in self._leases:
            raise LeaseConflict(f"device {device.key} is known already, and differs")
        self._devices[device.key] = (device, Node(device.key, device.capacity_bytes))

    def remove_device(self, key: str) -> list[Lease]:
        """A device is gone, and with it every engine that has a rank on it; returns the leases that ended.

        What such an engine holds on other devices stays, as ENDING. An unknown key changes nothing.
        """
        known = self._devices.pop(key, None)
        if known is None:
            return []
        _, node = known
        ended: list[Lease] = []
        for lease in list(node.children.values()):
            ended += self.end(lease.name, memory_gone=False) if lease.phase is not Phase.ENDING else []
            lease.let_go_of(node)
            if not lease.holds:
                self._leases.pop(lease.name, None)  # a berth has ended with its device
        return ended

    # Owners

    def join(self, owner: str, ttl_s: float, now: float) -> None:
        """An owner is there and will be silent for no longer than `ttl_s`; again: with another time to live.

        Raises:
            ValueError: `ttl_s` is not above zero.
        """
        if not ttl_s > 0:
            raise ValueError(f"ttl_s is {ttl_s}")
        known = self._owners.get(owner)
        if known is None:
            known = self._owners[owner] = Owner(ttl_s, now)
        known.ttl_s, known.expires_at = ttl_s, now + ttl_s
        self._owner_alarms.set(owner, known.expires_at)

    def beat(self, owner: str, now: float) -> bool:
        """An owner is alive; False: it is not known (any more), and has to join and present what it holds."""
        known = self._owners.get(owner)
        if known is None:
            return False
        known.beat(now)
        return True

    def excuse(self, span_s: float) -> None:
        """Nobody could be heard for this long: whatever ends by silence ends so much later. O(n), and rare."""
        for owner in self._owners.values():
            owner.expires_at += span_s
        for lease in self._leases.values():
            if lease.expires_at is not None:
                lease.expires_at += span_s

    def leave(self, owner: str, *, memory_gone: bool = False) -> list[Lease]:
        """An owner is gone; returns the leases that ended. An unknown one changes nothing."""
        known = self._owners.pop(owner, None)
        if known is None:
            return []
        ended: list[Lease] = []
        for name in list(known.leases):
            if name in self._leases:  # not gone with another one it lay on
                ended += self.end(name, memory_gone=memory_gone)
        return ended

    # Leases

    def reserve(
        self,
        lease_id: str,
        kind: Kind,
        owner: str,
        holds: Sequence[Hold],
        *,
        expires_at: float | None = None,
        growth: bool = False,
    ) -> Lease:
        """Take what a lease needs, all of it or nothing.

        Args:
            lease_id: unique among leases and devices.
            owner: who has joined.
            holds: an engine's: a device and bytes for each rank; all others': one lease and KV tokens.
            expires_at: when it ends unless renewed, in `now`'s seconds.
            growth: what is kept for growth may be used.

        Raises:
            InsufficientMemory: says where and how much is missing.
            LeaseNotFound: the owner or what it would lie on is not known.
            LeaseConflict: the id is taken, or a lease of this kind cannot lie there.
            ValueError: no hold, or one that is not above zero.
        """
        if lease_id in self._leases or lease_id in self._devices:
            raise LeaseConflict(f"lease {lease_id!r} exists already")
        known = self._owners.get(owner)
        if known is None:
            raise LeaseNotFound(f"owner {owner!r} has not joined, or has been silent for too long")
        check_holds(kind, holds)
        nodes = [self._node(hold.on) for hold in holds]
        for node, hold in zip(nodes, holds, strict=True):
            check_may_lie(kind, node)
            node.check(hold.amount, growth=growth)
        lease = LeaseNode(lease_id, kind, owner, [(node, hold.amount) for node, hold in zip(nodes, holds, strict=True)])
        lease.attach()
        self._leases[lease_id] = known.leases[lease_id] = lease
        if expires_at is not None:
            lease.expires_at = expires_at
            self._lease_alarms.set(lease_id, expires_at)
        return lease.view()

    def commit(self, lease_id: str, kv_tokens: int) -> Lease:
        """An engine runs, with this many tokens in its KV pool; requests can lie on it from now on.

        Raises:
            LeaseNotFound: no such lease.
            LeaseConflict: it is no engine's, or not RESERVED.
            ValueError: negative tokens.
        """
        lease = self._known(lease_id)
        if lease.kind is not Kind.ENGINE or lease.phase is not Phase.RESERVED:
            raise LeaseConflict(f"lease {lease_id!r} ({lease.kind}, {lease.phase}) cannot be committed")
        if kv_tokens < 0:
            raise ValueError(f"kv_tokens is {kv_tokens}")
        lease.phase = Phase.COMMITTED
        lease.capacity = kv_tokens
        lease.limit = kv_tokens - int(kv_tokens * self._growth_share)
        return lease.view()

    def open_slots(self, engine: str, slots: int) -> str:
        """An engine that runs has this many slots in its batch for its queue, or for one session (which is named then);
        a pool that ends with it. Returns the pool's name.

        Raises:
            LeaseNotFound, LeaseConflict: there is no such engine or session, or the engine does not run.
            ValueError: negative slots.
        """
        if slots < 0:
            raise ValueError(f"engine {engine!r}: slots is {slots}")
        node, name = self._known(engine), slots_of(engine)
        pool = self._leases.get(name)
        if pool is None:
            check_may_lie(Kind.SLOTS, node)
            pool = LeaseNode(name, Kind.SLOTS, node.owner, [(node, 0)])
            pool.attach()
            self._leases[name] = pool
        pool.capacity = pool.limit = slots
        return name

    def resize(self, lease_id: str, amounts: Sequence[int], *, growth: bool = False) -> Lease:
        """Give a lease these amounts of what it lies on, in the order of its holds, all of them or nothing.

        Raises:
            InsufficientMemory: growing, says where and how much is missing; shrinking, what lies on it needs more.
            LeaseNotFound: no such lease.
            LeaseConflict: it is ENDING.
            ValueError: another number of amounts, or one that is not above zero.
        """
        lease = self._known(lease_id)
        if lease.phase is Phase.ENDING:
            raise LeaseConflict(f"lease {lease_id!r} is ending")
        if len(amounts) != len(lease.holds) or min(amounts) <= 0:
            raise ValueError(f"lease {lease_id!r}: {len(lease.holds)} amounts above zero are wanted, got {amounts}")
        for (node, before), amount in zip(lease.holds, amounts, strict=True):
            if amount > before:
                node.check(amount - before, growth=growth)
        if lease.kind is not Kind.ENGINE and amounts[0] < lease.held:
            raise InsufficientMemory(f"{lease_id}: {lease.held} of {lease.capacity} are in use, {amounts[0]} wanted")
        lease.change(amounts)
        return lease.view()

    def renew(self, lease_id: str, expires_at: float) -> Lease:
        """Put off a lease's own end; never brings it forward.

        Raises:
            LeaseNotFound: no such lease.
        """
        lease = self._known(lease_id)
        if lease.expires_at is not None and expires_at > lease.expires_at:
            lease.expires_at = expires_at
        return lease.view()

    def end(self, lease_id: str, *, memory_gone: bool = True) -> list[Lease]:
        """End a lease and all that lies on it; returns them, what lay on it first.

        Args:
            memory_gone: False: an engine's memory has not been seen free; it stays on its devices as ENDING.

        Raises:
            LeaseNotFound: no such lease.
        """
        lease = self._known(lease_id)
        ended: list[Lease] = []
        for child in list(lease.children.values()):
            ended += self.end(child.name)
        if lease.kind is Kind.ENGINE and not memory_gone:
            if lease.phase is not Phase.ENDING:
                ended.append(lease.view())
                lease.phase, lease.capacity, lease.limit = Phase.ENDING, 0, 0
                lease.expires_at = None
                self._disown(lease)
        else:
            if lease.phase is not Phase.ENDING:
                ended.append(lease.view())
            self._remove(lease)
        return ended

    def memory_gone(self, lease_id: str) -> None:
        """The memory of an engine that was ENDING has been seen free. An unknown lease changes nothing.

        Raises:
            LeaseConflict: it is not ENDING.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            return
        if lease.phase is not Phase.ENDING:
            raise LeaseConflict(f"lease {lease_id!r} is {lease.phase}, not ending")
        self._remove(lease)

    def revive(self, lease_id: str) -> Lease:
        """An engine that was taken for gone is there, and its memory was given to nobody yet: RESERVED again.

        Raises:
            LeaseNotFound: no such lease, or its owner has not joined again.
            LeaseConflict: it is not ENDING.
        """
        lease = self._known(lease_id)
        owner = self._owners.get(lease.owner)
        if owner is None:
            raise LeaseNotFound(f"owner {lease.owner!r} has not joined again")
        if lease.phase is not Phase.ENDING:
            raise LeaseConflict(f"lease {lease_id!r} is {lease.phase}, not ending")
        lease.phase = Phase.RESERVED
        owner.leases[lease_id] = lease
        return lease.view()

    # Time

    def expire(self, now: float) -> list[Lease]:
        """End what nobody has renewed and whose owner has been silent for too long; returns the leases that ended."""
        ended: list[Lease] = []
        while (owner := self._owner_alarms.due(now, self._owner_ends_at)) is not None:
            ended += self.leave(owner)
        while (lease_id := self._lease_alarms.due(now, self._lease_ends_at)) is not None:
            ended += self.end(lease_id, memory_gone=False)
        return ended

    # Looking

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._leases

    def __len__(self) -> int:
        return len(self._leases)

    def lease(self, lease_id: str) -> Lease:
        """Raises LeaseNotFound."""
        return self._known(lease_id).view()

    def leases(self, kind: Kind | None = None) -> Iterator[Lease]:
        """All leases, or all of a kind. O(n)."""
        return (lease.view() for lease in self._leases.values() if kind is None or lease.kind is kind)

    def on(self, name: str) -> list[Lease]:
        """What lies on a device or a lease, oldest first. Raises LeaseNotFound."""
        return [child.view() for child in self._node(name).children.values()]

    def knows(self, owner: str) -> bool:
        """Whether an owner has joined and was not silent for too long, as far as `expire` has looked."""
        return owner in self._owners

    def free(self, name: str, *, growth: bool = False) -> int:
        """What can still be reserved on a device (bytes) or a lease (KV tokens). Raises LeaseNotFound."""
        return self._node(name).free(growth=growth)

    def held(self, name: str) -> int:
        """What lies on a device or a lease. Raises LeaseNotFound."""
        return self._node(name).held

    def limit(self, name: str) -> int:
        """What could be reserved if nothing lay on it. Raises LeaseNotFound."""
        return self._node(name).limit

    def devices(self) -> list[DeviceUse]:
        """Every device and what is leased of it."""
        return [DeviceUse(device, node.held) for device, node in self._devices.values()]

    # Inside

    def _known(self, lease_id: str) -> LeaseNode:
        lease = self._leases.get(lease_id)
        if lease is None:
            raise LeaseNotFound(f"there is no lease {lease_id!r}")
        return lease

    def _node(self, name: str) -> Node:
        device = self._devices.get(name)
        return device[1] if device is not None else self._known(name)

    def _owner_ends_at(self, owner: str) -> float | None:
        known = self._owners.get(owner)
        return None if known is None else known.expires_at

    def _lease_ends_at(self, lease_id: str) -> float | None:
        lease = self._leases.get(lease_id)
        return None if lease is None else lease.expires_at

    def _disown(self, lease: LeaseNode) -> None:
        owner = self._owners.get(lease.owner)
        if owner is not None:
            owner.leases.pop(lease.name, None)

    def _remove(self, lease: LeaseNode) -> None:
        lease.detach()
        del self._leases[lease.name]
        self._disown(lease)
