"""The engine replicas of one model as one router sees them: which run, their channels, and which take requests.

Invariant: the queue always knows whether a replica takes requests: none after it has left, drains or was ejected, one
at a time on probation. A replica that has left is dropped as soon as it runs none of this router's requests.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from types import MappingProxyType

from serve_app.core.queue import ReplicaUse
from serve_app.core.routing import FREE_SHARE, AffinityKey, BoundedRing, RoutingTarget, TargetReason
from serve_app.errors import EngineUnreachable
from serve_app.ray_adapter import Handle
from serve_app.router.health import Health, ResultReporter
from serve_app.router.model_queue import ModelQueue
from serve_app.transport import Channel, UnreadBytes


class ReplicaSet:
    """The replicas, their load and their channels.

    Args:
        handle: the engine deployment.
        router_id: this router's name.
        queue: of the model; receives which replicas take requests.
        slots: assumed slots of a replica until it reports its own.
        routers: how many router replicas share the engines.
        unread: counts unread bytes of all requests of this router.
    """

    def __init__(
        self, handle: Handle, router_id: str, queue: ModelQueue, slots: int, routers: int, unread: UnreadBytes
    ) -> None:
        self._handle = handle
        self._router_id = router_id
        self._queue = queue
        self._unread = unread
        self.running: frozenset[str] = frozenset()  # replicas that Serve counts as running
        self._slots: dict[str, int] = {}  # of the whole replica; 0: it drains
        self.health = Health(self._update_availability)
        self._routing = BoundedRing()
        self.configure(slots, routers)
        self._random = random.Random()
        self._channels: dict[str, Channel] = {}
        self.channels: Mapping[str, Channel] = MappingProxyType(self._channels)  # a live view
        self._next_index = 0
        self._request_numbers = itertools.count(1)  # one series for all channels: a replica may leave and return

    def configure(self, slots: int, routers: int) -> None:
        """Apply changed settings."""
        self._initial_slots = slots
        self._routing.free_share = FREE_SHARE / routers

    def set_running(self, names: frozenset[str]) -> None:
        """Replace the set of replicas that Serve counts as running."""
        gone, new = self.running - names, names - self.running
        self.running = names  # first: a retiring channel's callbacks must find its replica gone
        for replica_id in gone:
            self._update_availability(replica_id)  # drains: requests that run there finish
            if replica_id in self._channels:
                self._channels[replica_id].retire()
        for replica_id in new:
            self._slots.setdefault(replica_id, self._initial_slots)
            if replica_id in self._channels:
                self._channels[replica_id].restore()
            self.health.add(replica_id)
            self._update_availability(replica_id)
        for replica_id in gone:
            self.health.remove(replica_id)
        for replica_id in filter(self.health.is_on_probation, names):
            self._update_availability(replica_id)  # it may have become the only replica, or no longer be
        self.drop_gone()

    def drop_gone(self) -> None:
        """Drop the state of replicas that have left and run none of this router's requests."""
        for replica_id in [name for name in self._slots if name not in self.running]:
            channel = self._channels.get(replica_id)
            if channel is None or not channel.is_busy:
                self._channels.pop(replica_id, None)
                del self._slots[replica_id]
                self._routing.drop_replica(replica_id)
                self._queue.remove_replica(replica_id)

    def slot_use(self) -> dict[str, ReplicaUse]:
        """For each running replica: its slots, and those that this router's requests use."""
        return {name: ReplicaUse(self._slots[name], self._routing.load(name)) for name in sorted(self.running)}

    def is_usable(self, replica_id: str) -> bool:
        """Whether a replica runs and is neither ejected nor on probation."""
        return replica_id in self.running and self.health.is_healthy(replica_id)

    def next_replica(self) -> str | None:
        """The next usable replica in round-robin order, or of all if none is usable; None: none runs."""
        names = sorted(filter(self.health.is_healthy, self.running)) or sorted(self.running)
        if not names:
            return None
        self._next_index += 1
        return names[self._next_index % len(names)]

    def choose_target(self, key: AffinityKey | None, slots: int, avoid: str | None = None) -> RoutingTarget | None:
        """The replica on which a request of so many slots should run; None: the queue chooses.

        Args:
            avoid: the replica on which the request was lost.
        """
        probe = self.health.replica_to_probe()
        if probe is not None and probe != avoid:
            return RoutingTarget(probe, TargetReason.PROBE)
        if key is None and avoid is None:
            return None
        if avoid is not None:
            self._routing.set_open(avoid, False)
        choice = self._routing.choose(None if key is None else key.text, self._random, slots)
        if avoid is not None:
            self._routing.set_open(avoid, self.is_usable(avoid))
        if choice is None:
            return None
        return RoutingTarget(choice.replica_id, TargetReason.MOST_FREE if key is None else key.reason, choice.route)

    def on_granted(self, request_id: str, replica_id: str, slots: int) -> None:
        """Count a granted request that uses so many slots of a replica."""
        self._routing.add_load(replica_id, slots)
        self.health.on_granted(request_id, replica_id)
        if self.health.is_on_probation(replica_id):
            self._update_availability(replica_id)  # it takes no second request

    def on_released(self, request_id: str, replica_id: str, slots: int) -> None:
        """Release the slots of a request. Call this before `ModelQueue.release`, so that the queue does not grant the
        free slots of a replica on probation in between."""
        self._routing.add_load(replica_id, -slots)
        self.health.on_released(request_id, replica_id)
        if self.health.is_on_probation(replica_id):
            self._update_availability(replica_id)

    def track_result(self, replica_id: str) -> ResultReporter:
        """Begin to track a request that is sent to a replica now; its result goes to the returned reporter."""
        return self.health.track_result(replica_id)

    def channel(self, replica_id: str) -> Channel:
        """The channel to a replica.

        Raises:
            EngineUnreachable: the replica has left since the grant and takes no new calls.
        """
        if replica_id not in self.running:
            raise EngineUnreachable(f"engine replica {replica_id} has left")
        channel = self._channels.get(replica_id)
        if channel is None:
            channel = self._channels[replica_id] = Channel(
                self._handle,
                self._router_id,
                replica_id,
                self._request_numbers,
                lambda slots: self._slots_changed(replica_id, slots),
                self._unread,
            )
        return channel

    def _slots_changed(self, replica_id: str, slots: int) -> None:
        if replica_id not in self._slots:
            return  # a dropped replica: ignore the last messages of its channel
        self._slots[replica_id] = slots
        if replica_id in self.running:
            self._update_availability(replica_id)

    def _update_availability(self, replica_id: str) -> None:
        """Pass on to the queue and to the replica choice whether a replica takes a request now."""
        slots = self._slots[replica_id]
        self._routing.set_slots(replica_id, slots)
        self._routing.set_open(replica_id, self.is_usable(replica_id))
        usable = slots > 0 and replica_id in self.running and self.health.is_usable(replica_id)
        self._queue.set_replica(replica_id, usable, usable and self.health.takes_one_request(replica_id))
