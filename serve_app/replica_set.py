"""The engine replicas of one model as one router sees them: who runs, with how many slots for us, over which channel.

A replica that failed a call is ejected: it gets nothing new for as long as Serve takes to notice a death.

Invariant: who hears of slots knows them at every moment: 0 from when a replica leaves or is ejected, what it has while
it runs. A replica that has left is forgotten as soon as nothing of ours runs there.
"""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from serve_app.channel import Channel
from serve_app.errors import EngineUnreachable
from serve_app.serve_adapter import Handle

EJECT_S = 1.0  # a replica that failed a call gets nothing new for as long as Serve takes to notice a death


class ReplicaSet:
    """Replicas, ejections and channels.

    Args:
        handle: the engine deployment.
        router_id: this router's name.
        initial_slots: what a replica is taken to have for us until it says so itself.
        on_slots: called with a replica and the slots it has for us from now on.
        on_forgotten: called with a replica that has left and on which nothing of ours runs any more.
    """

    def __init__(
        self,
        handle: Handle,
        router_id: str,
        initial_slots: int,
        on_slots: Callable[[str, int], None],
        on_forgotten: Callable[[str], None],
    ) -> None:
        self._handle = handle
        self._router_id = router_id
        self.initial_slots = initial_slots
        self._on_slots = on_slots
        self._on_forgotten = on_forgotten
        self.running: frozenset[str] = frozenset()  # what Serve counts as running
        self._slots: dict[str, int] = {}
        self._ejected: dict[str, asyncio.TimerHandle] = {}
        self._channels: dict[str, Channel] = {}
        self.channels: Mapping[str, Channel] = MappingProxyType(self._channels)  # always the present ones
        self._turn = 0
        self._numbers = itertools.count(1)  # of the requests handed in; one series, for a replica may leave and return

    def change(self, names: frozenset[str]) -> None:
        """Serve counts these as running."""
        gone, new = self.running - names, names - self.running
        self.running = names  # first: what a channel tells while it retires must find its replica gone
        for replica_id in gone:
            self._on_slots(replica_id, 0)  # drains: what runs there finishes
            if replica_id in self._channels:
                self._channels[replica_id].retire()
        for replica_id in new:
            self._slots.setdefault(replica_id, self.initial_slots)
            if replica_id in self._channels:
                self._channels[replica_id].restore()
            if replica_id not in self._ejected:
                self._on_slots(replica_id, self._slots[replica_id])
        self.forget_gone()

    def forget_gone(self) -> None:
        """Drop what is known of replicas that have left and on which nothing of ours runs any more."""
        for replica_id in [name for name in self._slots if name not in self.running]:
            channel = self._channels.get(replica_id)
            if channel is None or not channel.busy:
                self._channels.pop(replica_id, None)
                del self._slots[replica_id]
                self._on_forgotten(replica_id)

    @property
    def largest(self) -> int:
        """The slots of the replica that has most of them for this router."""
        return max((self._slots[name] for name in self.running), default=self.initial_slots)

    def usable(self, replica_id: str) -> bool:
        """Whether a replica takes new requests."""
        return replica_id in self.running and replica_id not in self._ejected

    def any(self) -> str | None:
        """One after the other of those that take new requests, or of all if none does; None: none runs."""
        names = sorted(self.running - self._ejected.keys()) or sorted(self.running)
        if not names:
            return None
        self._turn += 1
        return names[self._turn % len(names)]

    def preferred(self, key: str) -> str | None:
        """The replica for this key: the same while the set of replicas is (rendezvous hashing); None: none runs."""
        return max(self.running, key=lambda name: zlib.crc32(f"{key}\0{name}".encode()), default=None)

    def eject(self, replica_id: str) -> None:
        """Grant nothing on a replica that just failed a call, until Serve has had time to notice its death."""
        if self.usable(replica_id):
            self._on_slots(replica_id, 0)
            self._ejected[replica_id] = asyncio.get_running_loop().call_later(EJECT_S, self._readmit, replica_id)

    def _readmit(self, replica_id: str) -> None:
        del self._ejected[replica_id]
        if replica_id in self.running:
            self._on_slots(replica_id, self._slots[replica_id])

    def channel(self, replica_id: str) -> Channel:
        """The channel to a replica. EngineUnreachable: it has left since it was granted, and takes no new calls."""
        if replica_id not in self.running:
            raise EngineUnreachable(f"engine replica {replica_id} has left")
        channel = self._channels.get(replica_id)
        if channel is None:
            channel = self._channels[replica_id] = Channel(
                self._handle,
                self._router_id,
                replica_id,
                self._numbers,
                lambda slots: self._share_changed(replica_id, slots),
            )
        return channel

    def _share_changed(self, replica_id: str, slots: int | None) -> None:
        """Without a channel nobody tells our share, so no more than the cautious first guess is granted."""
        if replica_id not in self._slots:
            return  # forgotten: what its channel still has to say is of no interest
        slots = self._slots[replica_id] = self.initial_slots if slots is None else slots
        if self.usable(replica_id):
            self._on_slots(replica_id, slots)
