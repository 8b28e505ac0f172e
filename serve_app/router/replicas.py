"""The engine replicas of one model as one router sees them: which run, over which channel, and which takes a request.

Invariant: the queue knows at every moment whether a replica takes a request: not after it has left, drains or was
ejected, one while it is on probation. A replica that has left is forgotten as soon as nothing of ours runs there.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from types import MappingProxyType

from serve_app.core.queue import ReplicaUse
from serve_app.core.routing import FREE_SHARE, Aim, Key, Routing, Why
from serve_app.errors import EngineUnreachable
from serve_app.ray_adapter import Handle
from serve_app.router.health import Health, Sent
from serve_app.router.model_queue import ModelQueue
from serve_app.transport import Channel, Unread


class ReplicaSet:
    """Replicas, what runs on them, and channels.

    Args:
        handle: the engine deployment.
        router_id: this router's name.
        queue: of the model; it is told which replicas take requests.
        slots: what a replica is taken to have until it says so itself.
        routers: how many router replicas share the engines.
        unread: what all requests of this router have not read.
    """

    def __init__(
        self, handle: Handle, router_id: str, queue: ModelQueue, slots: int, routers: int, unread: Unread
    ) -> None:
        self._handle = handle
        self._router_id = router_id
        self._queue = queue
        self._unread = unread
        self.running: frozenset[str] = frozenset()  # what Serve counts as running
        self._slots: dict[str, int] = {}  # of the whole replica; 0: it drains
        self.health = Health(self._tell)
        self._routing = Routing()
        self.configure(slots, routers)
        self._draw = random.Random()
        self._channels: dict[str, Channel] = {}
        self.channels: Mapping[str, Channel] = MappingProxyType(self._channels)  # always the present ones
        self._turn = 0
        self._numbers = itertools.count(1)  # of the requests handed in; one series, for a replica may leave and return

    def configure(self, slots: int, routers: int) -> None:
        """Take over changed settings."""
        self._initial_slots = slots
        self._routing.free_share = FREE_SHARE / routers

    def change(self, names: frozenset[str]) -> None:
        """Serve counts these as running."""
        gone, new = self.running - names, names - self.running
        self.running = names  # first: what a channel tells while it retires must find its replica gone
        for replica_id in gone:
            self._tell(replica_id)  # drains: what runs there finishes
            if replica_id in self._channels:
                self._channels[replica_id].retire()
        for replica_id in new:
            self._slots.setdefault(replica_id, self._initial_slots)
            if replica_id in self._channels:
                self._channels[replica_id].restore()
            self.health.came(replica_id)
            self._tell(replica_id)
        for replica_id in gone:
            self.health.gone(replica_id)
        for replica_id in filter(self.health.on_trial, names):
            self._tell(replica_id)  # it may be the only one now, or no longer
        self.forget_gone()

    def forget_gone(self) -> None:
        """Drop what is known of replicas that have left and on which nothing of ours runs any more."""
        for replica_id in [name for name in self._slots if name not in self.running]:
            channel = self._channels.get(replica_id)
            if channel is None or not channel.busy:
                self._channels.pop(replica_id, None)
                del self._slots[replica_id]
                self._routing.drop(replica_id)
                self._queue.replica_gone(replica_id)

    def use(self) -> dict[str, ReplicaUse]:
        """Of each replica that runs: its slots, and those that this router's requests hold."""
        return {name: ReplicaUse(self._slots[name], self._routing.load(name)) for name in sorted(self.running)}

    def usable(self, replica_id: str) -> bool:
        """Whether a replica takes new requests like any other."""
        return replica_id in self.running and self.health.well(replica_id)

    def any(self) -> str | None:
        """One after the other of those that take new requests, or of all if none does; None: none runs."""
        names = sorted(filter(self.health.well, self.running)) or sorted(self.running)
        if not names:
            return None
        self._turn += 1
        return names[self._turn % len(names)]

    def aim(self, key: Key | None, slots: int, avoid: str | None = None) -> Aim | None:
        """Where a request of so many slots should run; None: that is the queue's to say.

        Args:
            avoid: the replica that it was lost on.
        """
        probe = self.health.wanting()
        if probe is not None and probe != avoid:
            return Aim(probe, Why.PROBE)
        if key is None and avoid is None:
            return None
        if avoid is not None:
            self._routing.set_open(avoid, False)
        choice = self._routing.choose(None if key is None else key.text, self._draw, slots)
        if avoid is not None:
            self._routing.set_open(avoid, self.usable(avoid))
        if choice is None:
            return None
        return Aim(choice.replica_id, Why.MOST_FREE if key is None else key.why, choice.route)

    def begin(self, request_id: str, replica_id: str, slots: int) -> None:
        """A request occupies so many slots of a replica."""
        self._routing.add_load(replica_id, slots)
        self.health.begin(request_id, replica_id)
        if self.health.on_trial(replica_id):
            self._tell(replica_id)  # it takes no other

    def end(self, request_id: str, replica_id: str, slots: int) -> None:
        """It occupies them no more. To be told before the queue learns of it: a replica on probation must not have its
        free slots granted meanwhile."""
        self._routing.add_load(replica_id, -slots)
        self.health.end(request_id, replica_id)
        if self.health.on_trial(replica_id):
            self._tell(replica_id)

    def sent(self, replica_id: str) -> Sent:
        """A request goes to a replica now; what is returned wants to hear how it ends."""
        return self.health.sent(replica_id)

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
                lambda slots: self._slots_changed(replica_id, slots),
                self._unread,
            )
        return channel

    def _slots_changed(self, replica_id: str, slots: int) -> None:
        if replica_id not in self._slots:
            return  # forgotten: what its channel still has to say is of no interest
        self._slots[replica_id] = slots
        if replica_id in self.running:
            self._tell(replica_id)

    def _tell(self, replica_id: str) -> None:
        """Whether a replica takes a request now, to the queue and to the choice among replicas."""
        slots = self._slots[replica_id]
        self._routing.set_slots(replica_id, slots)
        self._routing.set_open(replica_id, self.usable(replica_id))
        usable = slots > 0 and replica_id in self.running and self.health.usable(replica_id)
        self._queue.replica(replica_id, usable, usable and self.health.takes_one(replica_id))
