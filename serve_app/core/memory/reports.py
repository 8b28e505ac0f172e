"""What an engine replica reports of its memory, and what the quota actor replies."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.core.memory.leases import Hold

OWNER_TTL_S = 4.0  # a dead owner's leases are back within 5 s: its silence, and a look every half second
FENCE_S = OWNER_TTL_S - 0.5  # half a second for a router's word on its way to the actor and for clocks that run unlike
Process = tuple[int, int]  # id, and start in clock ticks since boot: ids are used again
LOADING_TTL_S = 9.0  # loading holds Python's lock for seconds; 10 s with the look


@dataclass(frozen=True, slots=True)
class Rank:
    """Where a rank of an engine is: on this node, on this device of it; None: any device."""

    node: str
    device: int | None = None


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What an engine replica says of itself.

    Args:
        owner: the replica's id, and the name of its lease.
        model: what it serves.
        ranks: where its ranks are.
        wanted_bytes: for each rank, weights and KV pool together.
        least_bytes: for each rank, with which it would start, too.
        holds: what it has been granted, as it knows; none: it asks.
        kv_tokens: its KV pool, once it runs; 0: it does not run yet.
        kv_bytes: of that pool, over all ranks.
        measured_bytes: of its processes on each device of `holds`; None: could not be measured there.
        processes: its processes by node, each by id and start (ticks): when they are gone, so is its memory.
        loading: it was told that it is its turn, and does not run yet; an actor that has just come up has to know.
        gone: it has ended, and its memory is free.
        slots: sequences of its batch that are for the line; 0: its line is the routers' own.
        measures: it sizes itself by what is free on its devices while it loads.
        failed: why it is about to end; its memory is not free yet.
    """

    owner: str
    model: str
    ranks: tuple[Rank, ...]
    wanted_bytes: int
    least_bytes: int
    holds: tuple[Hold, ...] = ()
    kv_tokens: int = 0
    kv_bytes: int = 0
    measured_bytes: tuple[int | None, ...] = ()
    processes: tuple[tuple[str, tuple[Process, ...]], ...] = ()
    loading: bool = False
    gone: bool = False
    slots: int = 0
    measures: bool = True
    failed: str = ""

    def __post_init__(self) -> None:
        if not self.ranks or not 0 < self.least_bytes <= self.wanted_bytes:
            sizes = f"{self.least_bytes} to {self.wanted_bytes} bytes"
            raise ValueError(f"{self.owner}: {len(self.ranks)} ranks, {sizes} each")


@dataclass(frozen=True, slots=True)
class EngineReply:
    """What an engine may have. `holds`: none while it waits, and `why` says for what; `may_load`: it is its turn;
    `drain`: it is to finish what it runs and end, for others to have its place."""

    holds: tuple[Hold, ...] = ()
    may_load: bool = False
    why: str = ""
    drain: bool = False
