"""The quota actor's end of `core.shared_queue.delivery`: a session for each router, and what it has yet to hear.

Invariant: an action said to an incarnation is heard by that one alone, and by no later one of the same router.
Invariant: an incarnation that is over is over: a late copy of its first message does not begin it again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from serve_app.core.shared_queue.delivery import Exchange, Figures, Queued, Receiving, Reply, Sending, Word
from serve_app.core.shared_queue.messages import Action, Amount, Event

OVER = 1024  # routers of which it is kept: more than a cluster starts while a message is on its way
DEAF_S = 1.0  # a router acknowledges within a round trip, since it watches; this is a machine that is very busy


@dataclass(slots=True)
class Peer:
    """A router's session."""

    name: str
    incarnation: int
    sending: Sending[Action] = field(default_factory=Sending)
    receiving: Receiving[Event] = field(default_factory=Receiving)
    word_told: int = -1  # versions
    figures_told: int = -1
    taken: int = 0  # the last action acknowledged when this was last looked at
    waits_since: float | None = None  # since when nothing of what it is to hear was acknowledged; None: nothing waits


class Peers:
    """Routers that speak to this actor, and the word that all of them hear. O(1) per message and item."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._peers: dict[str, Peer] = {}
        self._over: dict[str, int] = {}  # routers that have no incarnation now: their last, who left last behind
        self._woken: set[str] = set()
        self.word = Word(0, frozenset(), frozenset())
        self._figures: dict[str, Figures] = {}  # by model, those looked at last behind the others
        self._figures_version = 0

    def __contains__(self, router: str) -> bool:
        return router in self._peers

    def __len__(self) -> int:
        return len(self._peers)

    def stale(self, told: Exchange) -> bool:
        """Whether a message is of no session here, and begins none."""
        peer = self._peers.get(told.router)
        if told.epoch != self._epoch:
            return True
        if peer is None or told.incarnation > peer.incarnation:
            over = told.incarnation <= self._over.get(told.router, -1)
            return over or told.seq != 1 or told.taken != 0 or not told.events
        return told.incarnation < peer.incarnation or told.taken > peer.receiving.last

    def stale_reply(self, told: Exchange) -> Reply:
        """The router has to begin anew."""
        return Reply(self._epoch, told.incarnation, 0, 1, (), None, stale=True)

    def get(self, router: str) -> Peer | None:
        return self._peers.get(router)

    def begin(self, told: Exchange) -> Peer:
        """A new incarnation of a router; what the last one had yet to hear is void."""
        peer = self._peers[told.router] = Peer(told.router, told.incarnation)
        self._over.pop(told.router, None)
        return peer

    def leave(self, router: str) -> None:
        """A router is gone, or has to begin anew: it is told so when it speaks."""
        peer = self._peers.pop(router, None)
        if peer is not None:
            self._over[router] = peer.incarnation
            if len(self._over) > OVER:
                del self._over[next(iter(self._over))]
        self._woken.discard(router)

    def names(self) -> list[str]:
        """Every router that speaks to this actor."""
        return list(self._peers)

    def leave_all(self) -> None:
        """Nothing is known of any router any more; who watches is told to begin anew."""
        watching = list(self._peers)
        for router in watching:
            self.leave(router)
        self._woken.update(watching)

    def say(self, router: str, action: Action) -> None:
        """A router is to hear this."""
        peer = self._peers.get(router)
        if peer is not None:
            peer.sending.put(action)
            self._woken.add(router)

    def say_all(self, action: Action) -> None:
        """All routers are to hear this."""
        for router in self._peers:
            self.say(router, action)

    def heard(self) -> Callable[[], bool]:
        """Tells whether all that has been said until now was taken by every router that is still the same."""
        marks = [(peer, peer.sending.last) for peer in self._peers.values()]
        return lambda: all(self._peers.get(peer.name) is not peer or peer.sending.taken >= last for peer, last in marks)

    def take(self, peer: Peer, told: Exchange) -> Sequence[Event]:
        """The events of a message that count now."""
        peer.sending.acked(told.ack)
        if told.again:
            peer.sending.again()
            peer.word_told = peer.figures_told = -1
        return peer.receiving.accept(told.seq, told.events)

    def reply(self, peer: Peer, booked: tuple[Amount, ...] | None = None) -> Reply:
        """What a router is to hear now."""
        seq, actions = peer.sending.batch()
        new = itertools.takewhile(lambda one: one.version > peer.figures_told, reversed(self._figures.values()))
        figures = tuple(new)
        peer.word_told, peer.figures_told = self.word.version, self._figures_version
        more = peer.sending.unsent > 0
        last = peer.receiving.last
        return Reply(self._epoch, peer.incarnation, last, seq, actions, self.word, figures, more=more, booked=booked)

    def has_news(self, peer: Peer) -> bool:
        """Whether a router should hear something without having asked."""
        return peer.sending.unsent > 0 or peer.word_told < self.word.version

    def deaf(self, now: float) -> list[str]:
        """Routers that have acknowledged nothing for `DEAF_S` of what they are to hear. O(routers)."""
        found = []
        for peer in self._peers.values():
            if not len(peer.sending):
                peer.waits_since = None
            elif peer.waits_since is None or peer.taken != peer.sending.taken:
                peer.waits_since, peer.taken = now, peer.sending.taken
            elif now - peer.waits_since >= DEAF_S:
                found.append(peer.name)
        return found

    def excuse(self) -> None:
        """We stood still, and what they have said meanwhile has yet to be read."""
        for peer in self._peers.values():
            peer.waits_since = None

    def figures(self, model: str, classes: tuple[Queued, ...]) -> None:
        """How the line of a model is now; told to whoever speaks next."""
        self._figures_version += 1
        self._figures.pop(model, None)
        self._figures[model] = Figures(self._figures_version, model, classes)

    def blocked(self, models: tuple[tuple[str, int], ...]) -> None:
        """What routers hear of engines that wait for memory; told to all of them at once, if it is new."""
        if models != self.word.blocked:
            self.word = self.word._replace(version=self.word.version + 1, blocked=models)
            self._woken.update(self._peers)

    def change(self, contended: frozenset[str], recovering: frozenset[str]) -> None:
        """What all routers go by; told to all of them at once, if it is new."""
        if (contended, recovering) != (self.word.contended, self.word.recovering):
            self.word = Word(self.word.version + 1, contended, recovering, self.word.blocked)
            for model in [name for name in self._figures if name not in contended]:
                del self._figures[model]
            self._woken.update(self._peers)

    def take_woken(self) -> list[str]:
        """Routers for which there is something new since this was last asked."""
        woken, self._woken = sorted(self._woken), set()
        return woken
