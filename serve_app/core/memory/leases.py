"""Devices, leases and their owners: the values that the ledger returns, and the nodes of its tree.

Invariant: the held amount of a node's space is the sum of its children's holds on it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from serve_app.core.messages import message
from serve_app.core.pools import TokenSpace
from serve_app.errors import InsufficientMemory, LeaseConflict

DEFAULT_RESERVED_BYTES = 2 * 10**9  # 2 GB a device: the driver's context, NCCL's buffers and CUDA graphs have no lease


class LeaseKind(enum.StrEnum):
    """What a lease is for; determines its parent and its unit."""

    DEVICE = "device"  # not a lease: the root of a tree
    ENGINE = "engine"  # on devices, in bytes: weights and KV pool of one engine, a hold per rank
    RESERVATION = "berth"  # on a device, in bytes: for an engine that has not started (`core.memory.reservations`)
    SESSION = "session"  # on an engine, in KV tokens: what an agent's requests draw from


class Phase(enum.StrEnum):
    """Phase of a lease. All leases but engines' are always COMMITTED."""

    RESERVED = "reserved"  # memory is reserved, the engine loads: no leases on it yet
    COMMITTED = "committed"
    ENDING = "ending"  # its owner is gone or has left, its memory was not observed free


PARENT_KINDS: dict[LeaseKind, LeaseKind] = {
    LeaseKind.ENGINE: LeaseKind.DEVICE,
    LeaseKind.RESERVATION: LeaseKind.DEVICE,
    LeaseKind.SESSION: LeaseKind.ENGINE,
}


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or a configured share of the memory of a node without GPU.

    Args:
        node: the node's id.
        index: the device's index on the node.
        total_bytes: its memory.
        reserved_bytes: the part not available to leases.

    Raises:
        ValueError: more reserved than the total, or a negative amount.
    """

    node: str
    index: int
    total_bytes: int
    reserved_bytes: int = DEFAULT_RESERVED_BYTES

    def __post_init__(self) -> None:
        if not 0 <= self.reserved_bytes <= self.total_bytes:
            raise ValueError(f"device {self.key}: reserved_bytes is {self.reserved_bytes} of {self.total_bytes}")

    @property
    def key(self) -> str:
        return f"{self.node}/{self.index}"

    @property
    def capacity_bytes(self) -> int:
        """Bytes available to leases."""
        return self.total_bytes - self.reserved_bytes


@message
@dataclass(frozen=True, slots=True)
class Hold:
    """Amount that a lease holds of one node of the tree: bytes of a device, or KV tokens of another lease."""

    on: str
    amount: int


@dataclass(frozen=True, slots=True)
class Lease:
    """A snapshot of a lease. `capacity`: KV tokens for the leases and requests on it; `held`: those in use."""

    lease_id: str
    kind: LeaseKind
    owner: str
    phase: Phase
    holds: tuple[Hold, ...]
    capacity: int
    held: int

    @property
    def amount(self) -> int:
        """Bytes or KV tokens, over all holds."""
        return sum(hold.amount for hold in self.holds)


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """A device and its leased bytes."""

    device: Device
    held_bytes: int

    @property
    def free_bytes(self) -> int:
        return self.device.capacity_bytes - self.held_bytes


@dataclass(slots=True)
class Owner:
    """A process that sends heartbeats, and its leases in order of creation."""

    ttl_s: float
    expires_at: float
    leases: dict[str, LedgerNode] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class LedgerNode:
    """A device, or a lease with its holds on other nodes. `space`: what the leases and requests on it use."""

    name: str
    kind: LeaseKind
    owner: str
    holds: list[tuple[LedgerNode, int]]
    space: TokenSpace
    phase: Phase = Phase.COMMITTED
    children: dict[str, LedgerNode] = field(default_factory=dict)

    def check(self, amount: int, *, growth: bool) -> None:
        """Raises InsufficientMemory, with the figures."""
        free = self.space.free(growth=growth)
        if amount > free:
            raise InsufficientMemory(f"{self.name}: {amount} asked, {free} of {self.space.capacity} free")

    def check_child(self, kind: LeaseKind) -> None:
        """Raises LeaseConflict if the kind of this node does not allow a lease of this kind on it, or its phase does
        not."""
        if self.kind is not PARENT_KINDS[kind]:
            raise LeaseConflict(f"a lease of a {kind} cannot lie on {self.name!r}")
        self.check_runs()

    def check_runs(self) -> None:
        """Raises LeaseConflict if its phase does not allow anything on it."""
        if self.phase is not Phase.COMMITTED:
            raise LeaseConflict(f"nothing can lie on {self.name!r}: it is {self.phase}")

    def view(self) -> Lease:
        """A snapshot of the lease."""
        holds = tuple(Hold(node.name, amount) for node, amount in self.holds)
        return Lease(self.name, self.kind, self.owner, self.phase, holds, self.space.capacity, self.space.used)
