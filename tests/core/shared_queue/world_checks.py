"""What must be so at any moment of a `World`: no credit that the actor lacks, each grant covered by its account."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from serve_app.core.quota import Quota
from serve_app.core.shared_queue.messages import Arrive, Began, Done, KvTokenRequest, TokenProgress

if TYPE_CHECKING:
    from serve_app.core.memory import EngineReport
    from serve_app.core.queue import Arrival, Preempt
    from serve_app.core.shared_queue.messages import Amount, RouterMessage
    from serve_app.types import RequestClass
    from tests.core.shared_queue.world import Router


@dataclass
class Req:
    """A request as its caller sees it."""

    number: int
    request_class: RequestClass
    slots: int
    tokens: int
    arrived_s: float
    state: str = "waits"  # runs, done, refused, cancelled
    engine: str = ""
    granted_s: float = -1.0
    here: bool = False  # granted from credit
    place: Amount | None = None  # what it has of the place of its session
    arrival: Arrival | None = None
    stops: int = 0  # how often it was told to stop
    stopped_as: set[str] = field(default_factory=set)  # its tickets when it was told


class WorldChecks:
    """The checks, for `World` to have."""

    now: float
    quota: Quota
    routers: dict[str, Router]
    reports: dict[str, EngineReport]
    short: set[str]
    reported_of: dict[tuple[str, int], tuple[dict[str, int], dict[str, int]]]  # first events of tickets, by router

    def check_stop(self, router: str, stop: Preempt, req: Req) -> None:
        """A router hears that a request has to stop."""
        assert req.state == "runs", "it does not run"
        assert req.arrival is not None
        assert req.arrival.preemptible
        ticket = self.routers[router].queue.in_flight.running[stop.request_id].ticket
        assert ticket not in req.stopped_as, "it was told to stop already"
        req.stopped_as.add(ticket)
        assert stop.replica_id == req.engine or not req.engine
        req.stops = req.arrival.preempted + 1  # told again in another incarnation, it stops once

    def check_grants(self) -> None:
        """An account has at least what its owner's granted requests hold, be it the opener of sessions. Those of ended
        incarnations are in the account as far as their router has reported them again."""
        actor_queue = self.quota.queue
        granted: dict[tuple[str, str], list[int]] = {}
        for request in actor_queue.requests.by_ticket.values():
            if request.engine and request.is_known:
                sums = granted.setdefault((request.router, request.lease or request.engine), [0, 0])
                sums[0] += request.arrival.slots
                sums[1] += request.arrival.cost
        for (owner, engine), sums in granted.items():
            had = actor_queue.accounts.account(owner, engine)
            if owner in self.short:
                continue  # others were granted a part of it while the router was silent
            assert all(one <= held for one, held in zip(sums, had, strict=True)), f"{owner} was granted more"

    def check_order(self, message: RouterMessage) -> None:
        """What a router says of a ticket comes after what makes it known, whichever message arrives first."""
        known, used = self.reported_of.setdefault((message.router, message.incarnation), ({}, {}))
        for number, event in enumerate(message.events, message.seq):
            if isinstance(event, Arrive | Began):
                arrival = event.arrival if isinstance(event, Arrive) else event.run.arrival
                known[arrival.request_id] = number
            elif isinstance(event, Done | TokenProgress | KvTokenRequest):
                used.setdefault(event.ticket, number)
        early = [ticket for ticket, number in used.items() if number <= known.get(ticket, -1)]
        assert not early, f"{message.router} says something of {early} before they are known"

    def check_known(self) -> None:
        """With nothing on its way, the actor knows what runs, and where."""
        known = self.quota.queue.requests.by_ticket
        for router in self.routers.values():
            for ticket, run in router.queue.in_flight.by_ticket.items():
                place = run.place
                holds = run.slots if place is None else self.quota.ledger.pool(place.engine)
                if holds and run.engine in self.reports:
                    assert known[ticket].engine == run.engine, f"{run.arrival.request_id} is not known where it runs"

    def check_books(self) -> None:
        """The queues know exactly the requests that are known by ticket, and engines have what these hold."""
        assert self.quota.queue.requests.agree()

    def check_accounts(self) -> None:
        """A router whose word still counts never goes by more than the actor has for it."""
        self.check_grants()
        actor_queue = self.quota.queue
        quota = self.quota
        for engine, admission in [
            (one, each.admission) for each in actor_queue.models.by_name.values() for one in each.engines
        ]:
            replica = admission.capacity.replicas.get(engine)
            promised = (0, 0) if replica is None else (max(0, replica.slots_left), max(0.0, replica.kv_left))
            assert all(one <= free for one, free in zip(promised, actor_queue.accounts.free(engine), strict=True)), (
                engine
            )
        for name, router in self.routers.items():
            router_queue = router.queue
            peer = actor_queue.router_sessions.by_router.get(name)
            if peer is None or (router_queue.router_session.epoch, router_queue.router_session.incarnation) != (
                quota.epoch,
                peer.incarnation,
            ):
                continue
            if not router_queue.router_session.is_booked or self.now >= router_queue.credit_valid_until:
                continue
            for engine in self.reports:
                credit = router_queue.accounts.credit(engine)
                _, *held = router_queue.in_flight.held(engine)
                account = actor_queue.accounts.account(name, engine)
                if name in actor_queue.models.unreconciled_routers(engine):
                    continue
                for amount, used, booked in zip(credit, held, account, strict=True):
                    assert amount <= 0 or amount + used <= booked, f"{name} goes by more of {engine} than it has"

    def accounted(self) -> None:
        """With nothing on its way, both ends count the same, and the pools have just that."""
        actor_queue = self.quota.queue
        for name, router in self.routers.items():
            for engine in self.reports:
                credit = router.queue.accounts.credit(engine)
                _, *held = router.queue.in_flight.held(engine)
                total = (credit[0] + held[0], credit[1] + held[1])
                assert total == actor_queue.accounts.account(name, engine), f"{name} on {engine}: {credit} {held}"
                runs = [req for req in router.running.values() if req.engine == engine]
                outside = [req for req in runs if req.place is None]
                assert held == [sum(req.slots for req in outside), sum(req.tokens for req in outside)]
        for lease in self.quota.ledger.leases():
            assert 0 <= lease.held <= max(lease.capacity, 0) or not lease.held
