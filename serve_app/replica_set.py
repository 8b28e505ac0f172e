"""The engine replicas of one model as one router sees them: who runs, with how many slots for us, over which channel.

Invariant: who hears of slots knows them at every moment: 0 from when a replica leaves or is ejected, one more than our
requests hold while it waits for its probe, else what it has. A replica that has left is forgotten as soon as nothing of
ours runs there.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from types import MappingProxyType

from serve_app.aim import Aim, Key, Why
from serve_app.channel import Channel, Unread
from serve_app.core.routing import Routing
from serve_app.core.waiting.events import ReplicaUse
from serve_app.errors import EngineUnreachable
from serve_app.health import Health, Sent
from serve_app.serve_adapter import Handle


class ReplicaSet:
    """Replicas, what runs on them, and channels.

    Args:
        handle: the engine deployment.
        router_id: this router's name.
        initial_slots: what a replica is taken to have for us until it says so itself.
        on_slots: called with a replica, the slots it has for us from now on; whether it takes one more at all,
            however many of the engine's are another's; and whether that is the only one, its probe.
        on_forgotten: called with a replica that has left and on which nothing of ours runs any more.
        unread: what all requests of this router have not read.
    """

    def __init__(
        self,
        handle: Handle,
        router_id: str,
        initial_slots: int,
        on_slots: Callable[[str, int, bool, bool], None],
        on_forgotten: Callable[[str], None],
        unread: Unread | None = None,
    ) -> None:
        self._handle = handle
        self._router_id = router_id
        self.initial_slots = initial_slots
        self._on_slots = on_slots
        self._on_forgotten = on_forgotten
        self._unread = Unread() if unread is None else unread
        self.running: frozenset[str] = frozenset()  # what Serve counts as running
        self.probe_slots = 1  # what one sequence may take: a probe is no more, and has to find room
        self._slots: dict[str, int] = {}
        self.health = Health(self._tell)
        self._routing = Routing()
        self._draw = random.Random()
        self._held: dict[str, tuple[str, int]] = {}  # request -> replica and slots
        self.held: Mapping[str, tuple[str, int]] = MappingProxyType(self._held)  # always the present ones
        self._channels: dict[str, Channel] = {}
        self.channels: Mapping[str, Channel] = MappingProxyType(self._channels)  # always the present ones
        self._turn = 0
        self._numbers = itertools.count(1)  # of the requests handed in; one series, for a replica may leave and return

    def change(self, names: frozenset[str]) -> None:
        """Serve counts these as running."""
        gone, new = self.running - names, names - self.running
        self.running = names  # first: what a channel tells while it retires must find its replica gone
        for replica_id in gone:
            self._tell(replica_id)  # drains: what runs there finishes
            if replica_id in self._channels:
                self._channels[replica_id].retire()
        for replica_id in new:
            self._slots.setdefault(replica_id, self.initial_slots)
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
                self._on_forgotten(replica_id)

    def use(self) -> dict[str, ReplicaUse]:
        """Of each replica that runs: its slots for this router, and those that this router's requests hold."""
        return {name: ReplicaUse(self._slots[name], self._routing.load(name)) for name in sorted(self.running)}

    @property
    def largest(self) -> int:
        """The slots of the replica that has most of them for this router."""
        return max((self._slots[name] for name in self.running), default=self.initial_slots)

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
        """Where a request of so many slots should run; None: that is the line's to say.

        Args:
            avoid: the replica that it was lost on.
        """
        probe = self.health.wanting() if slots <= self.probe_slots else None
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

    def took(self, request_id: str, replica_id: str, slots: int) -> None:
        """A request of so many slots has its place."""
        self._held[request_id] = (replica_id, slots)
        self._routing.add_load(replica_id, slots)
        self.health.took(request_id, replica_id)
        if self.health.on_trial(replica_id):
            self._tell(replica_id)  # it takes no other; and what a heavier probe would have taken is nobody's

    def gave(self, request_id: str) -> None:
        """It has given it back; again changes nothing. To be told before the line hears of it: a replica on probation
        must not have its free slots granted meanwhile."""
        replica_id, slots = self._held.pop(request_id, ("", 0))
        self._routing.add_load(replica_id, -slots)
        self.health.gave(request_id, replica_id)
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
                lambda slots: self._share_changed(replica_id, slots),
                self._unread,
            )
        return channel

    def _share_changed(self, replica_id: str, slots: int | None) -> None:
        """Without a channel nobody tells our share, so no more than the cautious first guess is granted."""
        if replica_id not in self._slots:
            return  # forgotten: what its channel still has to say is of no interest
        self._slots[replica_id] = self.initial_slots if slots is None else slots
        if replica_id in self.running:
            self._tell(replica_id)

    def _tell(self, replica_id: str) -> None:
        """What a replica has for us now, to who grants and to who chooses."""
        slots = self._slots[replica_id]
        self._routing.set_slots(replica_id, slots)
        self._routing.set_open(replica_id, self.usable(replica_id))
        allowed = self.health.allowed(replica_id, slots, self._routing.load(replica_id), self.probe_slots)
        if replica_id not in self.running:
            allowed = 0
        # one on probation is allowed what runs there, and its probe, unless it is the only one; else our share of the
        # engine says nothing of whether it takes one more
        on_probation = self.health.on_trial(replica_id) and len(self.running) > 1
        usable = allowed > (self._routing.load(replica_id) if on_probation else 0)
        self._on_slots(replica_id, allowed, usable, usable and on_probation)
