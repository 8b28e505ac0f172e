"""The ledger in any order of operations, ends and expiries: it equals a second implementation and never overflows."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from serve_app.core.memory.leases import Device, Hold, LeaseKind, Phase
from serve_app.core.memory.ledger import Ledger
from serve_app.core.pools import Holder
from serve_app.errors import InsufficientMemory, LeaseConflict, LeaseNotFound
from tests.core.memory.reference_ledger import Entry, Reference
from tests.effort import effort

DEVICES = ("a/0", "a/1", "b/0")
OWNERS = ("engine-1", "engine-2", "router-1", "router-2")
ROUTERS = ("router-1", "router-2")  # with accounts in pools
TTL_S = (2.0, 5.0)
amounts = st.integers(1, 60)
spans = st.sampled_from([0.0, 0.0, 0.0, 0.5, 0.5, 1.0, 3.0, 6.0])


class LedgerMachine(RuleBasedStateMachine):
    """Drives the ledger and the reference with the same operations."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ids = itertools.count()
        self.holders = {name: Holder(name) for name in ROUTERS}

    @initialize(growth=st.sampled_from([0.0, 0.1, 0.5]))
    def start(self, growth: float) -> None:
        self.ledger = Ledger(growth)
        self.reference = Reference(growth)
        for key, size in zip(DEVICES, (100, 100, 40), strict=True):
            self.add_device(key, size)
        # What single steps seldom build up: two engines that run, and something on one of them.
        for owner in OWNERS:
            self.join(owner, 5.0)
        self.grant("engine-a", LeaseKind.ENGINE, "engine-1", {"a/0": 30, "a/1": 30})
        self.grant("engine-b", LeaseKind.ENGINE, "engine-2", {"b/0": 40})
        for name in ("engine-a", "engine-b"):
            self.ledger.commit(name, 100)
            self.reference.entries[name].phase = Phase.COMMITTED
            self.reference.entries[name].pool = 100
            self.open_pool(name, 4)
        self.grant("session", LeaseKind.SESSION, "router-2", {"engine-a": 10})
        self.open_pool("session", 1)
        self.charge("engine-a", "router-1", 2, 30)
        self.charge("session", "router-1", 1, 5)

    def open_pool(self, name: str, slots: int) -> None:
        self.ledger.open_pool(name, slots)
        self.reference.slots[name] = slots

    def charge(self, name: str, router: str, slots: int, tokens: int, growth: bool = False) -> None:
        """An account grows in both; it fits."""
        pool = self.ledger.pool(name)
        assert pool is not None
        pool.charge(self.holders[router], slots, tokens, growth=growth)
        had_slots, had_tokens = self.reference.account(name, router)
        self.reference.set_account(name, router, had_slots + slots, had_tokens + tokens)

    @rule(data=st.data(), slots=st.integers(0, 6))
    def open_some_pool(self, data: st.DataObject, slots: int) -> None:
        name = self.some(data, LeaseKind.ENGINE, LeaseKind.SESSION)
        entry = self.reference.entries.get(name or "")
        if entry is not None and entry.phase is Phase.COMMITTED:
            self.open_pool(entry.lease_id, slots)
            return
        with pytest.raises((LeaseNotFound, LeaseConflict)):
            self.ledger.open_pool(name or "none", slots)

    @rule(
        data=st.data(), router=st.sampled_from(ROUTERS), slots=st.integers(0, 3), tokens=amounts, growth=st.booleans()
    )
    def charge_some_pool(self, data: st.DataObject, router: str, slots: int, tokens: int, growth: bool) -> None:
        name = data.draw(st.sampled_from([*self.reference.slots, "none"]))
        pool = self.ledger.pool(name)
        assert (pool is None) == (name not in self.reference.slots)
        if pool is None:
            return
        free_slots = max(0, self.reference.slots[name] - self.reference.used_slots(name))
        if slots <= free_slots and self.reference.fits({name: tokens}, growth):
            self.charge(name, router, slots, tokens, growth)
        else:
            with pytest.raises(InsufficientMemory, match="asked"):
                pool.charge(self.holders[router], slots, tokens, growth=growth)

    @rule(data=st.data(), router=st.sampled_from(ROUTERS), slots=st.integers(0, 6), tokens=st.integers(0, 200))
    def give_back(self, data: st.DataObject, router: str, slots: int, tokens: int) -> None:
        """To zero at least."""
        name = data.draw(st.sampled_from([*self.reference.slots, "none"]))
        pool = self.ledger.pool(name)
        if pool is not None:
            had_slots, had_tokens = self.reference.account(name, router)
            less_slots = min(slots, had_slots)
            less_tokens = min(tokens, had_tokens)
            assert pool.give_back(self.holders[router], slots, tokens) == (less_slots, less_tokens)
            self.reference.set_account(name, router, had_slots - less_slots, had_tokens - less_tokens)

    def grant(
        self, lease_id: str, kind: LeaseKind, owner: str, on: dict[str, int], growth: bool = False, ttl_s: float = 5.0
    ) -> None:
        """Reserve what fits, in both; a lease that is its own owner alone."""
        holds = [Hold(name, amount) for name, amount in on.items()]
        if owner == lease_id:
            self.ledger.reserve_alone(lease_id, kind, holds[0], ttl_s, self.now, growth=growth)
            self.reference.owners[lease_id] = (ttl_s, self.now + ttl_s)
        else:
            self.ledger.reserve(lease_id, kind, owner, holds, growth=growth)
        phase = Phase.RESERVED if kind is LeaseKind.ENGINE else Phase.COMMITTED
        self.reference.entries[lease_id] = Entry(lease_id, kind, owner, on, phase)

    @rule()
    def all_beat(self) -> None:
        for owner in OWNERS:
            self.beat(owner)

    def some(self, data: st.DataObject, *kinds: LeaseKind) -> str | None:
        """A lease of these kinds, of any without; now and then one that is not there."""
        known = [name for name, entry in self.reference.entries.items() if not kinds or entry.kind in kinds]
        return data.draw(st.sampled_from([*known, "none"])) if known else None

    @rule(key=st.sampled_from(DEVICES), size=st.sampled_from([40, 100]))
    def add_device(self, key: str, size: int) -> None:
        node, index = key.split("/")
        device = Device(node, int(index), size + 10, 10)
        if self.reference.devices.get(key, size) != size and self.reference.held(key):
            with pytest.raises(LeaseConflict):
                self.ledger.add_device(device)
            return
        self.ledger.add_device(device)
        self.reference.devices[key] = size

    @rule(key=st.sampled_from(DEVICES))
    def remove_device(self, key: str) -> None:
        before = set(self.alive())
        ended = {lease.lease_id for lease in self.ledger.remove_device(key)}
        if key in self.reference.devices:
            self.reference.remove_device(key)
        assert ended == before - set(self.alive())

    @rule(owner=st.sampled_from(OWNERS), ttl_s=st.sampled_from(TTL_S))
    def join(self, owner: str, ttl_s: float) -> None:
        self.ledger.join(owner, ttl_s, self.now)
        self.reference.owners[owner] = (ttl_s, self.now + ttl_s)

    @rule(owner=st.sampled_from(OWNERS))
    def beat(self, owner: str) -> None:
        known = self.reference.owners.get(owner)
        assert self.ledger.heartbeat(owner, self.now) == (known is not None)
        if known is not None:
            self.reference.owners[owner] = (known[0], max(known[1], self.now + known[0]))

    @rule(owner=st.sampled_from(OWNERS))
    def leave(self, owner: str) -> None:
        before = set(self.alive())
        ended = [lease.lease_id for lease in self.ledger.leave(owner)]
        self.reference.leave(owner)
        assert sorted(ended) == sorted(before - set(self.alive()))

    @rule(
        data=st.data(),
        kind=st.sampled_from([LeaseKind.ENGINE, LeaseKind.SESSION]),
        owner=st.sampled_from(OWNERS),
        growth=st.booleans(),
        ttl_s=st.sampled_from([None, None, 1.0, 4.0]),
    )
    def reserve(self, data: st.DataObject, kind: LeaseKind, owner: str, growth: bool, ttl_s: float | None) -> None:
        """`ttl_s`: of a lease that is its own owner; None: it is another's."""
        if kind is LeaseKind.ENGINE:
            on = data.draw(st.lists(st.sampled_from(DEVICES), min_size=1, max_size=2))
        else:
            on = [name] if (name := self.some(data)) is not None else ["a/0"]
        holds = [Hold(name, data.draw(amounts)) for name in on]
        lease_id = f"lease-{next(self.ids)}"
        alone = ttl_s is not None and len(holds) == 1
        owner = lease_id if alone else owner
        wanted = {hold.on: hold.amount for hold in holds}
        is_present = (alone or owner in self.reference.owners) and all(
            name in self.reference.devices or name in self.reference.entries for name in on
        )

        def refused() -> None:
            if alone:
                self.ledger.reserve_alone(lease_id, kind, holds[0], ttl_s or 0.0, self.now, growth=growth)
            else:
                self.ledger.reserve(lease_id, kind, owner, holds, growth=growth)

        if not is_present or len(wanted) < len(on) or not all(self.reference.may_lie(kind, name) for name in on):
            with pytest.raises((LeaseNotFound, LeaseConflict)):
                refused()
        elif not self.reference.fits(wanted, growth):
            with pytest.raises(InsufficientMemory, match="asked"):
                refused()
        else:
            self.grant(lease_id, kind, owner, wanted, growth, ttl_s or 0.0)

    @rule(data=st.data(), tokens=st.integers(0, 200))
    def commit(self, data: st.DataObject, tokens: int) -> None:
        name = self.some(data, LeaseKind.ENGINE)
        entry = self.reference.entries.get(name or "")
        if entry is None or entry.phase is not Phase.RESERVED:
            with pytest.raises((LeaseNotFound, LeaseConflict)):
                self.ledger.commit(name or "none", tokens)
            return
        self.ledger.commit(entry.lease_id, tokens)
        entry.phase = Phase.COMMITTED
        entry.pool = tokens

    @rule(data=st.data(), amount=amounts, growth=st.booleans())
    def resize(self, data: st.DataObject, amount: int, growth: bool) -> None:
        entry = self.reference.entries.get(self.some(data) or "")
        if entry is None:
            return
        changed = dict.fromkeys(entry.holds, amount)
        fits = all(
            new <= old or self.reference.held(on) + new - old <= self.reference.limit(on, growth)
            for (on, old), new in zip(entry.holds.items(), changed.values(), strict=True)
        )
        fits &= entry.kind is LeaseKind.ENGINE or amount >= self.reference.held(entry.lease_id)
        if entry.phase is Phase.ENDING or not fits:
            with pytest.raises((InsufficientMemory, LeaseConflict)):
                self.ledger.resize(entry.lease_id, list(changed.values()), growth=growth)
        else:
            self.ledger.resize(entry.lease_id, list(changed.values()), growth=growth)
            entry.holds = changed

    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        """A lease that is its own owner."""
        self.beat(self.some(data) or "none")

    @rule(data=st.data(), memory_gone=st.booleans())
    def end(self, data: st.DataObject, memory_gone: bool) -> None:
        name = self.some(data)
        if name not in self.reference.entries:
            with pytest.raises(LeaseNotFound):
                self.ledger.end(name or "none", memory_gone=memory_gone)
            return
        before = set(self.alive())
        ended = [lease.lease_id for lease in self.ledger.end(name, memory_gone=memory_gone)]
        self.reference.end(name, memory_gone)
        assert sorted(ended) == sorted(before - set(self.alive()))

    @rule(data=st.data())
    def revive(self, data: st.DataObject) -> None:
        entry = self.reference.entries.get(self.some(data, LeaseKind.ENGINE) or "")
        if entry is None:
            return
        if entry.phase is not Phase.ENDING or entry.was_of not in self.reference.owners:
            with pytest.raises((LeaseConflict, LeaseNotFound)):
                self.ledger.revive(entry.lease_id)
            return
        self.ledger.revive(entry.lease_id)
        entry.phase = Phase.RESERVED
        entry.owner = entry.was_of

    @rule(span_s=spans)
    def expire(self, span_s: float) -> None:
        self.now += span_s
        before = set(self.alive())
        ended = [lease.lease_id for lease in self.ledger.expire(self.now)]
        self.reference.expire(self.now)
        assert sorted(ended) == sorted(before - set(self.alive()))

    def alive(self) -> list[str]:
        return [name for name, entry in self.reference.entries.items() if entry.phase is not Phase.ENDING]

    @invariant()
    def it_equals_the_reference(self) -> None:
        if not hasattr(self, "ledger"):
            return
        found = {
            lease.lease_id: (lease.kind, lease.phase, {hold.on: hold.amount for hold in lease.holds}, lease.held)
            for lease in self.ledger.leases()
        }
        assert found == self.reference.state()
        for name in [*self.reference.devices, *self.reference.entries]:
            limit = max(0, self.reference.limit(name, False) - self.reference.held(name))
            assert self.ledger.free(name) == limit
        pools = {name: pool for name in self.reference.entries if (pool := self.ledger.pool(name)) is not None}
        assert {name: pool.slots for name, pool in pools.items()} == self.reference.slots
        assert {name: pool.used_slots for name, pool in pools.items()} == {
            name: self.reference.used_slots(name) for name in self.reference.slots
        }
        assert self.reference.accounts == {
            (name, holder.name): (one.slots, one.tokens)
            for name, pool in pools.items()
            for holder, one in pool.accounts.items()
        }
        owners = self.ledger.lease_owners
        assert {owner: set(known.leases) for owner, known in owners.items()} == {
            owner: {name for name, entry in self.reference.entries.items() if entry.owner == owner}
            for owner in self.reference.owners
        }

    @invariant()
    def nothing_overflows(self) -> None:
        if hasattr(self, "ledger"):
            for use in self.ledger.devices():
                assert 0 <= use.held_bytes <= use.device.capacity_bytes
            for lease in self.ledger.leases():
                assert 0 <= lease.held <= lease.capacity or (lease.kind is LeaseKind.ENGINE and not lease.held)


HISTORIES = settings(  # 1,200 and 100,000 operations, after each of which everything is compared
    max_examples=effort(30, 500), stateful_step_count=effort(40, 200), suppress_health_check=list(HealthCheck)
)


def test_the_ledger_equals_the_reference_in_any_order_of_operations() -> None:
    run_state_machine_as_test(LedgerMachine, settings=HISTORIES)
