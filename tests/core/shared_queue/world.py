"""Routers, the quota actor and what is on its way between them; the clock is a number and the network a list."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, field, replace

from serve_app.core.memory import CheckpointKey, Device, EngineReport, LeaseKind, Rank, SessionRequest
from serve_app.core.queue import Action, Arrival, Grant, Preempt
from serve_app.core.queue.admission import QueuePolicy
from serve_app.core.quota import Quota
from serve_app.core.shared_queue.messages import ActorReply, Booked, RouterMessage
from serve_app.core.shared_queue.router_queue import RouterQueue
from serve_app.core.times import ACTOR_TICK_S, FENCE_S
from serve_app.errors import ServeAppError
from serve_app.types import RequestClass
from tests.core.shared_queue.world_checks import Req, WorldChecks

MODEL = "m"


@dataclass
class Router:
    """A router and what it runs."""

    name: str
    queue: RouterQueue
    last_reply: int = -1  # the latest of the actor's replies that it took
    alive: bool = True
    requests: dict[str, Req] = field(default_factory=dict)
    running: dict[str, Req] = field(default_factory=dict)


@dataclass(frozen=True)
class Message:
    """On its way, in one direction or the other."""

    router: str
    sent_at: float
    content: RouterMessage | None
    reply: ActorReply | None = None
    watch: bool = False
    stamp: int = -1  # of the actor's replies


class World(WorldChecks):
    """Everything, and the rules a shell follows. Engines: slots and KV tokens by name."""

    def __init__(self, engines: dict[str, tuple[int, int]], routers: int, policy: QueuePolicy | None = None) -> None:
        self.now = 100.0
        self.faulty = False  # errors are put into the code itself
        self.preemptible = False  # whether the requests that arrive can be stopped
        self.policy = policy or QueuePolicy(max_queued=1000, max_wait_s=60.0)
        self.ids = itertools.count(1)
        self.stamps = itertools.count(1)
        self.stored: dict[CheckpointKey, object] = {}
        self.size: dict[str, tuple[int, int]] = {}
        self.reports: dict[str, EngineReport] = {}
        self.in_transit: list[Message] = []
        self.waits_since: dict[str, tuple[RequestClass, int]] = {}  # in the actor's line: ticket -> class, stamp
        self.reported_of = {}
        self.short: set[str] = set()  # routers of whose accounts not all could be booked
        self.excused: set[str] = set()  # routers silent for too long: what they run may be on another's tokens
        self.incarnations = itertools.count(10, 10)
        self.quota = Quota(1, {}, self.now)
        self.come_up()
        for name, (slots, tokens) in engines.items():
            self.start_engine(name, slots, tokens)
        self.routers = {f"r{number}": self.start_router(f"r{number}") for number in range(routers)}

    # What there is

    def come_up(self) -> None:
        self.quota.on_devices([Device("n", number, 1000, 0) for number in range(8)], self.now)
        self.store()

    def start_engine(self, name: str, slots: int, tokens: int) -> None:
        self.size[name] = (slots, tokens)
        self.reports[name] = EngineReport(name, MODEL, (Rank("n"),), 1000, 1000, slots=slots)
        for _ in range(2):
            self.engine_speaks(name)

    def engine_speaks(self, name: str) -> None:
        """It loads as soon as it may, and runs at once."""
        reply = self.quota.on_engine(self.reports[name], self.now)
        self.store()
        if reply.holds:
            tokens = self.size[name][1]
            self.reports[name] = replace(self.reports[name], holds=reply.holds, kv_tokens=tokens, kv_bytes=1000)

    def end_engine(self, name: str) -> None:
        """An engine dies, and with it what runs there; the routers have yet to notice."""
        self.quota.on_engine(replace(self.reports.pop(name), gone=True), self.now)
        self.store()
        for router in self.routers.values():
            for req in router.running.values():
                req.engine = "" if req.engine == name else req.engine

    def notice(self, name: str) -> None:
        """A router sees which engines there are."""
        router = self.routers[name]
        for engine in [one for one in router.queue.accounts.by_engine if one not in self.reports]:
            self.perform(router, router.queue.set_reachability(MODEL, engine, False, self.now))
            router.queue.in_flight.drop_engine(engine)
            for request_id in [one for one, req in router.running.items() if req.engine in ("", engine)]:
                if request_id not in router.queue.in_flight.running:
                    router.running.pop(request_id).state = "done"
        for engine in self.reports:
            if engine not in router.queue.accounts.by_engine:
                self.perform(router, router.queue.set_reachability(MODEL, engine, True, self.now))

    def restart_router(self, name: str) -> None:
        self.excused.discard(name)
        self.routers[name] = self.start_router(name)
        self.in_transit = [
            message for message in self.in_transit if message.router != name or message.content is not None
        ]

    def start_router(self, name: str) -> Router:
        router = Router(name, RouterQueue(name, next(self.incarnations)))
        router.queue.serve(MODEL, self.policy)
        for engine in self.reports:
            router.queue.set_reachability(MODEL, engine, True, self.now)
        return router

    def store(self) -> None:
        changes = self.quota.changes()
        self.quota.checkpoint.stored(changes)
        for key, (keep, value) in changes.items():
            if keep:
                self.stored[key] = value
            else:
                self.stored.pop(key, None)

    def crash(self) -> None:
        """The actor dies; another one starts from what was stored."""
        self.quota = Quota(self.quota.epoch + 1, dict(self.stored), self.now)
        self.waits_since.clear()
        self.come_up()

    # Requests

    def arrive(
        self,
        name: str,
        request_class: RequestClass,
        slots: int = 1,
        tokens: int = 10,
        deadline_s: float | None = None,
        tenant: str | None = None,
        session: str | None = None,
    ) -> Req:
        number = next(self.ids)
        router = self.routers[name]
        request_id = f"q{number}"
        req = router.requests[request_id] = Req(number, request_class, slots, tokens, self.now)
        deadline = None if deadline_s is None else self.now + deadline_s
        tenant = tenant or f"t{number % 3}"
        arrival = req.arrival = Arrival(
            request_id, request_class, tenant, slots, tokens, deadline, session=session, preemptible=self.preemptible
        )
        self.perform(router, router.queue.on_arrive(MODEL, arrival, self.now))
        return req

    def arrive_in_order(self, name: str, level: RequestClass, slots: int, tokens: int, left_s: float | None) -> None:
        """An arrival that does not pass one of a higher class of which its router has heard, however indirectly."""
        router = self.routers[name]
        alone = router.queue.alone
        received = router.last_reply
        req = self.arrive(name, level, slots, tokens, left_s)
        if req.here and not alone:
            for request_class, stamp in self.waits_since.values():
                assert request_class <= level or stamp > received, "it passes one that its router has heard of"

    def give_up(self, name: str) -> None:
        """A router thinks that an answer does not come any more."""
        router = self.routers[name]
        self.perform(router, router.queue.on_lost(self.now))

    def cancel(self, name: str, request_id: str) -> None:
        router = self.routers[name]
        router.requests[request_id].state = "cancelled"
        router.running.pop(request_id, None)
        self.perform(router, router.queue.on_cancel(request_id, self.now))

    def finish(self, name: str, request_id: str) -> None:
        router = self.routers[name]
        router.running.pop(request_id).state = "done"
        self.perform(router, router.queue.on_done(request_id, self.now, 5, 5))
        if not router.running:
            self.excused.discard(name)

    def obey(self, name: str, request_id: str) -> None:
        """A request that was told to stop has stopped, and arrives again."""
        router = self.routers[name]
        req = router.running.pop(request_id)
        assert req.arrival is not None
        assert req.stops > req.arrival.preempted
        self.perform(router, router.queue.on_done(request_id, self.now, 5, 5))
        age_s = self.now - req.arrived_s
        req.arrival = replace(req.arrival, preempted=req.stops, accepted=True, age_s=age_s, session=None, deadline=None)
        req.state = "waits"
        req.here = False
        req.place = None
        self.perform(router, router.queue.on_arrive(MODEL, req.arrival, self.now))

    def perform(self, router: Router, actions: list[Action]) -> None:
        for action in actions:
            req = router.requests[action.request_id]
            if isinstance(action, Preempt):
                self.check_stop(router.name, action, req)
                continue
            assert req.state == "waits", f"{req} was ended already: {action}"
            if not isinstance(action, Grant):
                req.state = "refused"
                continue
            req.state = "runs"
            req.engine = action.replica_id
            req.granted_s = self.now
            router.running[action.request_id] = req
            run = router.queue.in_flight.running.get(action.request_id)
            req.here = run is not None and not run.is_known
            req.place = None if run is None else run.place
            if router.name not in self.excused:
                self.check_room(action.replica_id)

    def check_room(self, engine: str) -> None:
        """What runs fits, requests of routers apart that were silent for too long, or whose engine has ended."""
        received = [one for one in self.routers.values() if one.name not in self.excused]
        runs = [req for one in received for req in one.running.values() if req.engine == engine]
        if engine not in self.reports:
            return
        slots, tokens = self.size[engine]
        sessions = [one for one in self.quota.sessions.all() if one.engine == engine]
        leases = {(name := one.request.session_id): self.quota.sessions.by_session_id.get(name) for one in sessions}
        present = {one.lease for one in leases.values() if one is not None}
        used = sum(req.tokens for req in runs if req.place is None or req.place.engine not in present)
        assert sum(req.slots for req in runs if req.place is None) <= slots, f"more sequences on {engine} than it has"
        assert used + sum(one.request.tokens for one in sessions) <= tokens, f"more tokens on {engine} than it has"
        for lease in leases.values():
            places = [req.place for req in runs if lease is not None and req.place and req.place.engine == lease.lease]
            assert len(places) <= 1, "two requests have the one place of a session"
            assert lease is None or all(place.tokens <= lease.request.tokens for place in places), (
                "a session is overdrawn"
            )

    # Sessions

    def open_session(self, name: str, tokens: int, wait_s: float | None = None, ttl_s: float = 60.0) -> None:
        """Somebody asks for a session; whatever comes of it."""
        wait_until = None if wait_s is None else self.now + wait_s
        ask = SessionRequest(f"t0 {name}", MODEL, tokens, ttl_s, wait_until, per_engine=2)
        with contextlib.suppress(ServeAppError):
            self.quota.on_open_session(ask, self.now)
        self.store()

    def close_session(self, name: str) -> None:
        with contextlib.suppress(ServeAppError):
            self.quota.queue.close_session(f"t0 {name}", self.now)
        self.store()

    # The network

    def speak(self, name: str, *, beat: bool = False) -> None:
        router = self.routers[name]
        if beat:
            alive = {one: req.state == "runs" for one, req in router.requests.items() if req.state in ("waits", "runs")}
            actions, lost = router.queue.reconcile(alive, self.now)
            assert self.faulty or (actions, lost) == ([], []), "both sides knew the same"
            self.perform(router, actions)
        reported = router.queue.next_message(self.now, beat=beat)
        if reported is not None:
            self.in_transit.append(Message(name, self.now, reported))

    def watch(self, name: str) -> None:
        self.in_transit.append(
            Message(name, self.now, self.routers[name].queue.router_session.watch_message(), watch=True)
        )

    def deliver(self, message: Message) -> Message | None:
        """A message arrives. Returns the actor's answer, not yet on its way."""
        if message.reply is not None:
            self.hear(message)
            return None
        assert message.content is not None
        self.check_order(message.content)
        if message.watch:
            reply = self.quota.on_watch(message.content, self.now, timed_out=True)
        else:
            reply = self.quota.on_exchange(message.content, self.now)
        self.store()
        assert reply is not None
        for action in reply.actions:
            if isinstance(action, Booked):
                (self.short.add if action.shortfall else self.short.discard)(message.router)
        stamp = next(self.stamps)
        self.look_at_queues(stamp)
        return Message(message.router, message.sent_at, None, reply, stamp=stamp)

    def look_at_queues(self, stamp: int) -> None:
        """Remember since which of the actor's replies each request waits in its line."""
        known = self.quota.queue.requests.by_ticket
        waits = {ticket: request.arrival for ticket, request in known.items() if not request.engine}
        for ticket in self.waits_since.keys() - waits.keys():
            del self.waits_since[ticket]
        for ticket, arrival in waits.items():
            self.waits_since.setdefault(ticket, (arrival.request_class, stamp))

    def hear(self, message: Message) -> None:
        router = self.routers[message.router]
        assert message.reply is not None
        router_queue = router.queue
        reply = message.reply
        session = router_queue.router_session
        same = (reply.epoch, reply.incarnation) == (session.epoch, session.incarnation)
        current = same and not reply.is_stale
        self.perform(router, router_queue.on_reply(message.reply, message.sent_at, self.now))
        if current and self.now < message.sent_at + FENCE_S:
            router.last_reply = max(router.last_reply, message.stamp)
        else:
            router.last_reply = router.last_reply if current else -1

    def settle_one(self, name: str) -> None:
        """One router speaks and hears, and nobody else."""
        self.speak(name, beat=True)
        self.watch(name)
        while self.in_transit:
            answer = self.deliver(self.in_transit.pop(0))
            if answer is not None:
                self.deliver(answer)
                self.speak(name)
        self.now += 0.1

    def _opened_sessions(self) -> set[str]:
        """The leases of the sessions that are open at the actor."""
        return {session.lease for session in self.quota.sessions.by_session_id.values()}

    def settle(self, rounds: int = 12) -> None:
        """Deliver everything, again and again, with every router speaking; time passes a little."""
        for _ in range(rounds):
            for name, router in self.routers.items():
                if router.alive:
                    self.speak(name, beat=True)
                    self.watch(name)
            while self.in_transit:
                answer = self.deliver(self.in_transit.pop(0))
                if answer is not None:
                    self.deliver(answer)
                    self.speak(answer.router)
                for name in self.quota.queue.router_sessions.take_woken():
                    self.watch(name)
            self.wait(0.15)

    # Time

    def wait(self, span_s: float, *, engines_speak: bool = True) -> None:
        """Time with ticks in it."""
        until = self.now + span_s
        while self.now < until:
            self.now = min(until, self.now + ACTOR_TICK_S)
            for name in self.reports if engines_speak else ():
                self.engine_speaks(name)
            self.quota.on_tick(self.now)
            self.store()
            for router in self.routers.values():
                self.perform(router, router.queue.on_tick(self.now))
        self.look_at_queues(next(self.stamps))
        for router in self.routers.values():
            if router.running and not self.quota.ledger.knows(router.name):
                self.excused.add(router.name)

    def bring_to_rest(self) -> None:
        """The network is well again and everybody speaks: all who wait are served in turn, and all is accounted for."""
        for name, router in self.routers.items():
            self.perform(router, router.queue.on_lost(self.now))  # whatever was lost, its call ends some time
            self.notice(name)
            for engine in self.reports:
                self.perform(
                    self.routers[name], self.routers[name].queue.set_reachability(MODEL, engine, True, self.now)
                )
        self.wait(0.6)
        self.quota.queue.session_admission.take_outcomes()
        self.settle(4)
        self.check_known()
        for session in self.quota.sessions.all():
            self.quota.sessions.renew(session.request.session_id, self.now)
        self.settle(2)
        known = [{lease.lease for lease in router.queue.sessions.values()} for router in self.routers.values()]
        opened = self._opened_sessions()
        if any(leases != opened for leases in known):  # one ended in the last round: its news come with the next
            self.settle(1)
            assert self._opened_sessions() == opened, "a session ended at rest"
        for router in self.routers.values():
            assert {one.lease for one in router.queue.sessions.values()} == opened, "a router knows other sessions"
        for core in [
            *self.quota.queue.session_admission.waiting(),
            *(one.request for one in self.quota.sessions.by_session_id.values()),
        ]:
            self.quota.queue.close_session(core.session_id, self.now)
        for _ in range(200):
            self.settle(2)
            for name, router in self.routers.items():
                for request_id in list(router.running):
                    self.finish(name, request_id)
            if not any(req.state == "waits" for one in self.routers.values() for req in one.requests.values()):
                break
        self.settle(4)
        assert list(self.quota.ledger.leases(LeaseKind.SESSION)) == []
        assert not any(router.queue.sessions for router in self.routers.values())
        notes = self.quota.queue.take_notes()
        assert not notes, f"{notes}: accounts were always what the routers went by"
        states = {req.state for one in self.routers.values() for req in one.requests.values()}
        assert states <= {"done", "refused", "cancelled"}
        self.accounted()
        assert self.quota.queue.requests.by_ticket == {}
        assert not any(router.queue.in_flight.running for router in self.routers.values())
