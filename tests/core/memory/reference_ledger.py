"""The ledger once more, by brute force: a flat list of leases, every figure counted anew. Slow, and plainly right."""

from __future__ import annotations

from dataclasses import dataclass, field

from serve_app.core.memory.leases import PARENT_KINDS, LeaseKind, Phase


@dataclass
class Entry:
    lease_id: str
    kind: LeaseKind
    owner: str
    holds: dict[str, int]
    phase: Phase
    pool: int = 0  # an engine's KV tokens
    was_of: str = ""  # the owner of an engine that is ENDING


@dataclass
class Reference:
    growth_share: float
    devices: dict[str, int] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
    owners: dict[str, tuple[float, float]] = field(default_factory=dict)  # time to live, end
    slots: dict[str, int] = field(default_factory=dict)  # of each pool
    accounts: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)  # by pool and router

    def held(self, name: str) -> int:
        leased = sum(entry.holds.get(name, 0) for entry in self.entries.values())
        return leased + sum(tokens for (pool, _), (_, tokens) in self.accounts.items() if pool == name)

    def used_slots(self, name: str) -> int:
        return sum(slots for (pool, _), (slots, _) in self.accounts.items() if pool == name)

    def account(self, name: str, router: str) -> tuple[int, int]:
        return self.accounts.get((name, router), (0, 0))

    def set_account(self, name: str, router: str, slots: int, tokens: int) -> None:
        self.accounts[name, router] = (slots, tokens)
        if (slots, tokens) == (0, 0):
            del self.accounts[name, router]

    def capacity(self, name: str) -> int:
        if name in self.devices:
            return self.devices[name]
        entry = self.entries[name]
        if entry.kind is LeaseKind.ENGINE:
            return entry.pool if entry.phase is Phase.COMMITTED else 0
        return sum(entry.holds.values())

    def limit(self, name: str, growth: bool) -> int:
        whole = self.capacity(name)
        if growth or name in self.devices or self.entries[name].kind is not LeaseKind.ENGINE:
            return whole
        return whole - int(whole * self.growth_share)

    def may_lie(self, kind: LeaseKind, on: str) -> bool:
        parent = PARENT_KINDS[kind]
        if parent is LeaseKind.DEVICE:
            return on in self.devices
        return on in self.entries and self.entries[on].kind is parent and self.entries[on].phase is Phase.COMMITTED

    def fits(self, holds: dict[str, int], growth: bool) -> bool:
        return all(self.held(on) + amount <= self.limit(on, growth) for on, amount in holds.items())

    def end(self, lease_id: str, memory_gone: bool) -> None:
        for child in [entry.lease_id for entry in self.entries.values() if lease_id in entry.holds]:
            if child in self.entries:
                self.end(child, True)
        entry = self.entries[lease_id]
        self.slots.pop(lease_id, None)
        self.accounts = {key: had for key, had in self.accounts.items() if key[0] != lease_id}
        if entry.kind is LeaseKind.ENGINE and not memory_gone:
            if entry.phase is not Phase.ENDING:
                entry.was_of = entry.owner
            entry.phase = Phase.ENDING
            entry.owner = ""
        else:
            del self.entries[lease_id]

    def leave(self, owner: str) -> None:
        self.owners.pop(owner, None)
        while (own := next((e.lease_id for e in self.entries.values() if e.owner == owner), None)) is not None:
            self.end(own, memory_gone=False)

    def remove_device(self, key: str) -> None:
        self.devices.pop(key)
        for entry in [entry for entry in self.entries.values() if key in entry.holds]:
            self.end(entry.lease_id, memory_gone=False)
            del entry.holds[key]
            if not entry.holds:
                del self.entries[entry.lease_id]

    def expire(self, now: float) -> None:
        for owner in [owner for owner, (_, end) in self.owners.items() if end <= now]:
            self.leave(owner)

    def state(self) -> dict[str, tuple[LeaseKind, Phase, dict[str, int], int]]:
        """What the ledger's leases must equal."""
        return {
            name: (entry.kind, entry.phase, dict(entry.holds), self.held(name)) for name, entry in self.entries.items()
        }
