"""An engine replica's memory report, and the quota actor's reply."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.core.memory.leases import Hold
from serve_app.core.messages import message

Process = tuple[int, int]  # id, and start in clock ticks since boot, because ids are reused
NodeProcesses = tuple[str, tuple[Process, ...]]  # a node and processes there


@message
@dataclass(frozen=True, slots=True)
class Rank:
    """Location of a rank of an engine: the node and its device; None: any device."""

    node: str
    device: int | None = None


@message
@dataclass(frozen=True, slots=True)
class StartReport:
    """How far an engine's start is.

    Args:
        phase: environment, downloading, loading, memory, compile or warm-up.
        elapsed_s: since it may load.
        share: of the phase; None: not known.
        done_bytes: downloaded; None: nothing is downloaded.
        last_s: seconds of the model's last start on that node; None: not known.
        total_bytes: of the download; None: not known.
    """

    phase: str
    elapsed_s: float
    share: float | None = None
    done_bytes: int | None = None
    last_s: float | None = None
    total_bytes: int | None = None


@message
@dataclass(frozen=True, slots=True)
class DrainReport:
    """What became of the requests of an engine since it drains.

    Args:
        left_s: until its deadline.
        running: requests that it runs.
        finished: those that have ended there.
        moved: those that their routers took elsewhere at the deadline.
    """

    left_s: float
    running: int = 0
    finished: int = 0
    moved: int = 0


@message
@dataclass(frozen=True, slots=True)
class EngineReport:
    """An engine replica's report.

    Args:
        owner: the replica's id, and the name of its lease.
        model: the model it serves.
        ranks: the locations of its ranks.
        wanted_bytes: per rank, weights and KV pool together.
        least_bytes: per rank, the minimum with which it starts.
        holds: its grant, as far as it knows; empty: it requests one.
        kv_tokens: size of its KV pool, once it runs; 0: it does not run yet.
        kv_bytes: size of that pool in bytes, over all ranks.
        measured_bytes: use of its processes on each device of `holds`; None: could not be measured there.
        processes: its processes by node, by id and start (ticks), the replica's own first: its memory is free once they
            are gone.
        loading: it was allowed to load, and does not run yet; a restarted actor must know.
        gone: it has ended, and its memory is free.
        slots: sequences of its batch for the shared queue; 0: its routers queue on their own.
        measures: it sizes itself by the free memory on its devices while it loads.
        failed: why it is about to end; its memory is not free yet.
        start: how far its start is, while it loads.
        drain_s: how long it may finish its requests when it is to end.
        drain: what became of its requests since it drains; None: it does not.
        fingerprint: equal for engines that may continue each other's streams; None: not known yet.
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
    processes: tuple[NodeProcesses, ...] = ()
    loading: bool = False
    gone: bool = False
    slots: int = 0
    measures: bool = True
    failed: str = ""
    start: StartReport | None = None
    drain_s: float = 0.0
    drain: DrainReport | None = None
    fingerprint: str | None = None

    def __post_init__(self) -> None:
        if not self.ranks or not 0 < self.least_bytes <= self.wanted_bytes:
            sizes = f"{self.least_bytes} to {self.wanted_bytes} bytes"
            raise ValueError(f"{self.owner}: {len(self.ranks)} ranks, {sizes} each")


@message
@dataclass(frozen=True, slots=True)
class EngineReply:
    """Reply to an engine. `holds`: its grant; empty while it waits for memory, with the reason in `why`. `may_load`: it
    may load now. `drain`: it must finish its requests within `drain_s`, let its routers move the rest, and end."""

    holds: tuple[Hold, ...] = ()
    may_load: bool = False
    why: str = ""
    drain: bool = False
    drain_s: float = 0.0
