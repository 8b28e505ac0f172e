"""What the ledger of GPU memory keeps: devices and the leases on them, as frozen values."""

from __future__ import annotations

import enum
from dataclasses import dataclass

DEFAULT_RESERVED_BYTES = (
    2 * 10**9
)  # 2 GB a device: the driver's context, NCCL's buffers and CUDA graphs are nobody's lease
GROWTH_SHARE = 0.10  # of a KV pool, kept for requests that outgrow their estimate


class Kind(enum.StrEnum):
    """What a lease is for, and so what it lies on and in which unit it counts."""

    ENGINE = "engine"  # on devices, in bytes: weights and KV pool of one engine, a hold per rank
    BERTH = "berth"  # on a device, in bytes: kept for an engine that has not started (`core.memory.reservations`)
    SLOTS = "slots"  # on an engine or a session, of which it takes nothing; itself a pool, of sequences in the batch
    SHARE = "share"  # on an engine or a session, in KV tokens, or on slots: the account of one router
    SESSION = "session"  # on an engine, in KV tokens: what an agent's requests draw from


class Phase(enum.StrEnum):
    """How far a lease is. Only engines are ever anything but COMMITTED."""

    RESERVED = "reserved"  # the memory is kept, the engine loads: nothing can lie on it yet
    COMMITTED = "committed"
    ENDING = "ending"  # its owner is gone or has let go, its memory has not been seen free


def slots_of(engine: str) -> str:
    """The name of the pool of slots of an engine, or of a session."""
    return f"{engine}/slots"


# What each kind may lie on; None: devices.
LIES_ON: dict[Kind, frozenset[Kind] | None] = {
    Kind.ENGINE: None,
    Kind.BERTH: None,
    Kind.SLOTS: frozenset({Kind.ENGINE, Kind.SESSION}),
    Kind.SHARE: frozenset({Kind.ENGINE, Kind.SESSION, Kind.SLOTS}),  # a session is a pool of all routers, too
    Kind.SESSION: frozenset({Kind.ENGINE}),
}


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or on a machine without one a stated share of its memory.

    Args:
        node: the machine's id.
        index: which of its devices.
        total_bytes: of its memory.
        reserved_bytes: of them, those no lease gets.

    Raises:
        ValueError: more reserved than there is, or a negative amount.
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
        """What leases can have of it."""
        return self.total_bytes - self.reserved_bytes


@dataclass(frozen=True, slots=True)
class Hold:
    """What a lease holds of one node of the tree: bytes of a device, or KV tokens of another lease."""

    on: str
    amount: int


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease as it is at this moment.

    `capacity` is what leases on it can have together (KV tokens), `held` what they have. `expires_at` is its own end if
    nobody renews it, beside that of its owner; None: only its owner's.
    """

    lease_id: str
    kind: Kind
    owner: str
    phase: Phase
    holds: tuple[Hold, ...]
    capacity: int
    held: int
    expires_at: float | None

    @property
    def amount(self) -> int:
        """Bytes or KV tokens, over all it lies on."""
        return sum(hold.amount for hold in self.holds)


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """A device and the bytes of it that are leased."""

    device: Device
    held_bytes: int

    @property
    def free_bytes(self) -> int:
        return self.device.capacity_bytes - self.held_bytes
