"""Admission written a second time, as plainly as possible: lists, full scans, everything computed anew at every step.

It shares no code with `serve_app.core` beyond the event and policy values. Slow on purpose; the property tests compare
against it. Only what history decides is kept: the tenants' counters, what the minimum shares owe, who waited last.
"""

from __future__ import annotations

import math

from serve_app.core.queue import Arrival, QueuePolicy
from tests.core.queue.reference_history import History
from tests.core.queue.reference_request import Request, beyond, lacks

CLASSES = 4


class Reference:
    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self.now = 0.0
        self.requests: dict[str, Request] = {}
        self.slots: dict[str, int] = {}
        self.tokens: dict[str, float] = {}
        self.reserved: dict[str, int] = {}
        self.debts: dict[str, int] = {}
        self.last_grant: dict[str, int] = {}
        self.counter = 0
        self.empty_since = -math.inf
        self.history = History()
        self.grants: list[tuple[str, str, float]] = []
        self.refusals: list[tuple[str, str]] = []
        self.served: dict[tuple[int, str], float] = {}  # virtual token counters, by level and tenant
        self.since: dict[tuple[int, str], int] = {}
        self.last_tenant: dict[int, str] = {}
        self.credit = [0.0] * CLASSES
        self.earned = [0.0] * CLASSES  # per unit of weight
        self.got_something = [-math.inf] * CLASSES  # when each level was granted something, or earned
        self.paid_up: dict[tuple[int, str], float] = {}  # of these, by tenants who wait
        self.blocked: dict[int, Request] = {}  # what was owed and found no room last, by level

    # What can be asked.

    def waiting(self, level: int | None = None) -> list[Request]:
        """Everyone who waits, or those of one level, in order."""
        found = [r for r in self.requests.values() if r.status == "waiting" and level in (None, r.level)]
        return sorted(found, key=self.rank)

    def rank(self, request: Request) -> tuple[float, ...]:
        of = request.level, request.tenant
        return (
            -request.level,
            not self.owed(request.tenant),
            self.served[of],
            self.since[of],
            request.arrived,
            request.number,
        )

    def running(self) -> list[Request]:
        return [r for r in self.requests.values() if r.replica]

    def owed(self, tenant: str) -> bool:
        known = self.policy.tenants.get(tenant)
        if known is None or not known.share:
            return False
        of_tenant = [r for r in self.running() if r.tenant == tenant]
        kv = sum(self.tokens[replica] for replica, slots in self.slots.items() if slots)
        enough = sum(r.slots for r in of_tenant) >= known.share * sum(self.slots.values())
        return not enough and (math.isinf(kv) or sum(r.cost for r in of_tenant) < known.share * kv)

    def used(self, replica: str) -> int:
        return sum(r.slots for r in self.requests.values() if r.replica == replica)

    def free(self, replica: str) -> int:
        return max(0, self.slots[replica] - self.used(replica))

    def free_tokens(self, replica: str) -> float:
        used = sum(r.cost for r in self.requests.values() if r.replica == replica)
        return max(0.0, self.tokens[replica] - used - self.reserved[replica])

    def fits(self, request: Request, replica: str) -> bool:
        room = self.free(replica) >= request.slots and self.free_tokens(replica) >= request.cost
        return room and request.may_use(replica) and self.debts.get(replica, -1) < request.level

    def large_enough(self, request: Request, replica: str, sessions: bool = True) -> bool:
        tokens = self.tokens[replica] - (self.reserved[replica] if sessions else 0)
        return self.slots[replica] >= request.slots and tokens >= request.cost

    def holds(self, request: Request, replica: str) -> bool:
        return request.may_use(replica) and self.large_enough(request, replica)

    def possible(self, request: Request) -> bool:
        return any(self.holds(request, replica) for replica in self.slots)

    def too_large(self, request: Request) -> bool:
        only = request.arrival.only_replica
        some = [replica for replica, slots in self.slots.items() if slots and only in (None, replica)]
        return bool(some or only is None) and not any(self.large_enough(request, one, sessions=False) for one in some)

    def why_not_served(self, request: Request) -> str:
        if self.empty():
            return "no_replica"
        if self.possible(request):
            return "timeout"
        if self.too_large(request):
            return "too_large"
        has_room = any(request.may_use(one) and slots >= request.slots for one, slots in self.slots.items())
        return "sessions" if has_room else "no_replica"

    def empty(self) -> bool:
        return not any(self.slots.values())

    def wait_ends(self, request: Request) -> float:
        end = request.wait_from + self.policy.longest_wait_s(has_begun=request.arrival.has_begun)
        if self.empty():
            end = min(end, max(request.wait_from, self.empty_since) + self.policy.no_replica_wait_s)
        return end

    def next_due(self) -> float | None:
        dues = []
        for request in self.waiting():
            dues.append(self.wait_ends(request))
            if request.arrival.deadline is not None:
                dues.append(request.arrival.deadline)
        return min(dues, default=None)

    # What can happen.

    def pass_time(self, now: float) -> None:
        busy = sum(r.slots for r in self.running())
        self.history.segments.append((self.now, now, busy, sum(self.slots.values())))
        self.now = now
        for request in sorted(self.waiting(), key=lambda r: (r.arrival.deadline or 0.0, r.number)):
            if request.arrival.deadline is not None and request.arrival.deadline <= now:
                self.refuse(request, "deadline")
        for request in sorted(self.waiting(), key=lambda r: (r.arrived, r.number)):
            may_go_on = request.arrival.has_begun and self.possible(request) and not self.empty()
            if self.wait_ends(request) <= now and may_go_on:
                request.wait_from = max(request.wait_from, self.got_something[request.level])
            if self.wait_ends(request) <= now:
                self.refuse(request, self.why_not_served(request))
        self.decide()

    def arrive(self, arrival: Arrival, waited_s: float = 0.0) -> None:
        number = self.tick()
        arrived = self.now - waited_s
        wait_from = self.now if arrival.has_begun else arrived
        request = Request(arrival, arrived, number, int(arrival.request_class), number, wait_from, "new")
        self.requests[arrival.request_id] = request
        if arrival.deadline is not None and arrival.deadline <= self.now:
            return self.refuse(request, "deadline")
        if not self.empty() and self.too_large(request):
            return self.refuse(request, "too_large")
        self.enter(request)
        self.decide()
        if request.status != "waiting" or arrival.accepted:
            return None
        others = [r for r in self.waiting() if r is not request and r.level >= request.level]
        wait = self.history.wait_behind(self, request) if others else None
        if wait is not None and arrival.deadline is not None and self.now + wait > arrival.deadline:
            return self.refuse(request, "deadline")
        if wait is not None and self.now + wait > request.arrived + self.policy.max_wait_s:
            return self.refuse(request, "timeout")
        return self.bound(request)

    def end(self, request_id: str, cancel: bool, prompt: int | None = None, output: int | None = None) -> None:
        request = self.requests.get(request_id)
        if request is not None and request.replica:
            expected = max(0, request.cost - max(1, request.arrival.prompt_tokens) - request.arrival.produced_tokens)
            if cancel:
                output = request.produced
            elif output is None:
                output = max(request.produced, expected)
            self.stop(request, request.prompt if prompt is None else max(1, prompt), output)
            self.history.releases.append((self.now, request.slots))
        elif request is not None and request.status == "waiting" and cancel:
            self.leave(request, "cancelled")
        self.decide()

    def progress(self, request_id: str, tokens: int) -> None:
        request = self.requests.get(request_id)
        if request is not None and request.replica:
            request.produced += tokens
            self.charge(request, 2 * tokens)

    def replica(self, replica: str, slots: int | None, tokens: int | None = None, reserved: int = 0) -> None:
        """Another size; no slots: gone."""
        was_empty = self.empty()
        if slots is None:
            self.slots.pop(replica, None)
            self.last_grant.pop(replica, None)
            self.debts.pop(replica, None)
            for request in self.running():
                if request.replica == replica:
                    self.stop(request, request.prompt, request.produced)
        else:
            self.slots[replica] = slots
            self.tokens[replica] = math.inf if tokens is None else tokens
            self.reserved[replica] = reserved
        if self.empty() and not was_empty:
            self.empty_since = self.now
        self.decide()

    def kv_debt(self, replica: str, level: int | None) -> None:
        self.debts.pop(replica, None)
        if level is not None and replica in self.slots:
            self.debts[replica] = level
        self.decide()

    # Coming and going.

    def tick(self) -> int:
        self.counter += 1
        return self.counter

    def enter(self, request: Request) -> None:
        level = request.level
        of = level, request.tenant
        others = self.waiting(level)
        if not others:
            self.credit[level] = self.earned[level] = 0.0
            self.blocked.pop(level, None)
        if not any(r.tenant == request.tenant for r in others):
            self.served[of] = max(self.served.get(of, 0.0), self.floor(level))
            self.since[of] = request.number
            self.paid_up[of] = self.earned[level]
        request.status = "waiting"

    def needed(self, level: int) -> float:
        """What the next request of a level by its minimum share costs, be it owed or not."""
        waits = sorted(self.waiting(level), key=lambda r: (-r.arrived, -r.number))
        begun = {r.tenant: r for r in waits if r.arrival.has_begun}
        firsts = begun or {r.tenant: r for r in waits}
        paid = {tenant: self.paid_up[level, tenant] for tenant in firsts}
        eligible = {
            tenant: self.will_have_earned(firsts[tenant])
            for tenant in paid
            if begun or paid[tenant] <= self.earned[level]
        }
        return min(
            ((at, tenant, firsts[tenant].unpaid) for tenant, at in (eligible or paid).items()), default=(0, "", 0)
        )[2]

    def floor(self, level: int) -> float:
        """What a tenant begins with that comes, or comes back, to a level."""
        lowest = {(self.served[level, r.tenant], self.since[level, r.tenant], r.tenant) for r in self.waiting(level)}
        tenant = min(lowest)[2] if lowest else self.last_tenant.get(level)
        expected = sum(r.unconfirmed for r in self.running() if (r.level, r.tenant) == (level, tenant))
        return 0.0 if tenant is None else self.served[level, tenant] - expected / self.policy.weight(tenant)

    def busy(self, level: int) -> bool:
        return bool(self.waiting(level)) or any(r.level == level for r in self.running())

    def leave(self, request: Request, status: str) -> None:
        request.status = status
        if not any(r.tenant == request.tenant for r in self.waiting(request.level)):
            self.last_tenant[request.level] = request.tenant
            saved = self.earned[request.level] - self.paid_up.pop((request.level, request.tenant))
            lost = max(0.0, saved) * self.policy.weight(request.tenant)
            credit = self.credit[request.level]
            self.credit[request.level] = max(min(credit, self.needed(request.level)), credit - lost)
        self.rest(request.level)

    def rest(self, level: int) -> None:
        """Nobody of a level waits or runs: all counters start over."""
        if not self.busy(level):
            self.last_tenant.pop(level, None)
            self.served = {of: tokens for of, tokens in self.served.items() if of[0] != level}
            self.since = {of: number for of, number in self.since.items() if of[0] != level}

    def refuse(self, request: Request, reason: str) -> None:
        if request.status == "waiting":
            self.leave(request, "refused")
        request.status = "refused"
        self.refusals.append((request.arrival.request_id, reason))

    def charge(self, request: Request, tokens: float) -> None:
        self.served[request.level, request.tenant] += tokens / self.policy.weight(request.tenant)

    def stop(self, request: Request, prompt: int, output: int) -> None:
        self.charge(request, prompt - request.prompt + 2 * (output - request.produced))
        request.replica = ""
        self.rest(request.level)

    # Who goes when the line is full.

    def bound(self, new: Request) -> None:
        level = new.level
        policy = self.policy
        bound = policy.classes.get(new.arrival.request_class)
        everybody = self.waiting()
        same = [r for r in everybody if r.arrival.request_class == level]
        own = (0, 0) if bound is None else beyond(same, bound.max_queued, bound.max_queued_tokens, new)
        rest = beyond(everybody, policy.max_queued, policy.max_queued_tokens, new)
        if rest == own == (0, 0):
            return None
        lower = [r for r in everybody if r.level < level and not r.arrival.accepted]
        own = (max(own[0], rest[0] - len(lower)), max(own[1], rest[1] - sum(r.cost for r in lower)))
        gone: list[Request] = []
        if max(own) > 0:
            fresh = [r for r in same if not r.arrival.accepted]
            giver = self.heaviest(fresh, own)
            if giver == new.tenant or not self.can_give(fresh, giver, own, new.tenant):
                return self.refuse(new, "queue_full")
            of_giver = sorted((r for r in fresh if r.tenant == giver), key=lambda r: r.number)
            while lacks(own, gone):
                gone.append(of_giver.pop())
        while lower and lacks(rest, gone):
            lowest = [r for r in lower if r.level == lower[-1].level]
            left = (rest[0] - len(gone), rest[1] - sum(r.cost for r in gone))
            giver = self.heaviest(lowest, left)
            gone.append(max((r for r in lowest if r.tenant == giver), key=lambda r: r.number))
            lower.remove(gone[-1])
        for request in gone:
            self.refuse(request, "shed")
        return self.decide()

    def heaviest(self, requests: list[Request], short: tuple[int, int]) -> str:
        def load(tenant: str) -> tuple[float, str]:
            of_tenant = [r for r in requests if r.tenant == tenant]
            amount = len(of_tenant) if short[0] > 0 else sum(r.cost for r in of_tenant)
            return -amount / self.policy.weight(tenant), tenant

        return min({r.tenant for r in requests}, key=load)

    def can_give(self, fresh: list[Request], giver: str, own: tuple[int, int], new: str) -> bool:
        def left(tenant: str) -> tuple[float, float]:
            of_tenant = [r for r in fresh if r.tenant == tenant]
            requests = len(of_tenant)
            tokens = sum(r.cost for r in of_tenant)
            if tenant == giver:
                requests -= own[0]
                tokens -= own[1]
            return requests / self.policy.weight(tenant), tokens / self.policy.weight(tenant)

        gives = left(giver)
        has = left(new)
        return all(gives[kind] >= has[kind] for kind in (0, 1) if own[kind] > 0)

    # Who runs.

    def decide(self) -> None:
        while (found := self.next_one()) is not None:
            self.give(*found)

    def best(self, candidates: set[str], tokens_first: bool = False) -> str:
        def key(replica: str) -> tuple[float, float, int, str]:
            free = -self.free(replica), -self.free_tokens(replica)
            return (*(free[::-1] if tokens_first else free), self.last_grant.get(replica, 0), replica)

        return min(candidates, key=key)

    def kept_for(self, request: Request, opened: set[str]) -> set[str]:
        """The replica it keeps, if any."""
        some = {one for one in opened if request.may_use(one) and self.debts.get(one, -1) < request.level}
        if not some:
            return set()
        short = max(self.free_tokens(replica) for replica in some) < request.cost
        first = self.best(some, tokens_first=short)
        if self.holds(request, first):
            return {first}
        able = {replica for replica in some if self.holds(request, replica)}
        return {self.best(able)} if able else set()

    def firsts(self, level: int) -> list[Request]:
        """Of each size the first one, in order."""
        found: dict[tuple[object, ...], Request] = {}
        for request in self.waiting(level):
            found.setdefault(request.size, request)
        return list(found.values())

    def next_one(self) -> tuple[Request, str, bool] | None:
        opened = {replica for replica in self.slots if self.free(replica) and self.free_tokens(replica)}
        if not opened:
            return None
        heads = {
            level: next((r for r in self.firsts(level) if self.possible(r)), None) for level in reversed(range(CLASSES))
        }
        order = [level for level, head in heads.items() if head is not None]
        keeping = set()
        for level in order[1:]:
            if (owed := self.due(level)) is None:
                continue
            if found := self.place(owed, opened):
                return owed, found, True
            self.blocked[level] = owed
            opened -= self.kept_for(owed, opened)
            keeping.add(level)
        for level in order:
            head = heads[level]
            assert head is not None
            if found := self.place(head, opened):
                return head, found, False
            if level not in keeping:
                opened -= self.kept_for(head, opened)
            for request in self.firsts(level):
                if found := self.place(request, opened):
                    return request, found, False
        return None

    def due(self, level: int) -> Request | None:
        """Of what has begun, or else of the tenants who had no more than they earned, the request that will first be
        earned, if the class has earned it, or the tenant."""
        waits = self.waiting(level)
        begun = [r for r in waits if r.arrival.has_begun]
        eligible = [r for r in waits if self.paid_up[level, r.tenant] <= self.earned[level]]
        head = self.first_earned(begun) or self.first_earned(eligible)
        if head is None:
            return None
        enough = self.credit[level] >= head.unpaid or self.earned[level] >= self.will_have_earned(head)
        return head if enough else None

    def first_earned(self, requests: list[Request]) -> Request | None:
        found = []
        for tenant in {r.tenant for r in requests}:
            of_tenant = sorted((r for r in requests if r.tenant == tenant), key=lambda r: (r.arrived, r.number))
            if able := [r for r in of_tenant if self.possible(r)]:
                found.append((self.will_have_earned(of_tenant[0]), tenant, able[0]))
        return min(found, key=lambda entry: entry[:2])[2] if found else None

    def will_have_earned(self, head: Request) -> float:
        return self.paid_up[head.level, head.tenant] + head.unpaid / self.policy.weight(head.tenant)

    def place(self, request: Request, opened: set[str]) -> str:
        fits = {replica for replica in opened if self.fits(request, replica)}
        wish = request.arrival.affinity
        return wish if wish is not None and wish in fits else self.best(fits, tokens_first=True) if fits else ""

    def give(self, request: Request, replica: str, owed: bool) -> None:
        level = request.level
        of = (request.level, request.tenant)
        paid = self.will_have_earned(request)
        self.paid_up[of] = paid if owed else max(self.paid_up[of], min(paid, self.earned[level]))
        self.credit[level] = max(0.0, self.credit[level] - request.unpaid)
        request.replica = replica
        request.prompt = max(1, request.arrival.prompt_tokens)
        if not request.arrival.has_begun:
            self.charge(request, request.prompt)
        self.got_something[level] = self.now
        self.leave(request, "granted")
        self.last_grant[replica] = self.tick()
        self.history.grants.append((self.now, request.level, request.slots))
        self.grants.append((request.arrival.request_id, replica, self.now - request.arrived))
        for level in range(CLASSES) if self.policy.min_share else ():
            tenants = {r.tenant for r in self.waiting(level)}
            if not tenants:
                continue
            self.got_something[level] = self.now
            if (owed := self.blocked.pop(level, None)) is not None and owed.tenant in tenants:
                of = (level, owed.tenant)
                most = owed.unpaid / self.policy.weight(owed.tenant)
                self.credit[level] = min(self.credit[level], owed.unpaid)
                self.paid_up[of] = max(self.paid_up[of], self.earned[level] - most)
            self.credit[level] += self.policy.min_share * request.unpaid
            weights = sum(self.policy.weight(tenant) for tenant in tenants)
            self.earned[level] += self.policy.min_share * request.unpaid / weights
            self.earned[level] = max(self.earned[level], min(self.paid_up[level, tenant] for tenant in tenants))
