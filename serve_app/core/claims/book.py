"""The claims of all keys, at the quota actor.

A key is claimed by its first request. While the claim stands, a repeat joins the run, gets the kept answer or is
refused; a claim ends when its run ends without an answer, or `KEPT_S` after its answer. Routers hold the answers and
report what they have; a new actor knows nothing, and decides about an unknown key once all routers have reported.

Invariant: of one key at most one run is at a known router. A claim whose routers are all gone runs anew at the next
request, `MAX_RESTARTS` times. A tenant's claims are at most `TENANT_CLAIMS`: beyond, its own oldest ended one goes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from serve_app.core.claims.messages import (
    KEPT_S,
    Claim,
    ClaimReply,
    ClaimReport,
    ClaimRequest,
    ClaimState,
    ClaimVerdict,
    Generation,
)
from serve_app.core.times import CLAIM_RECOVERY_S

# A request that ends its routers must not end them for ever. Not one: of 20 minutes in which a router was killed every
# half minute, eight of 700 keyed requests had two routers die.
MAX_RESTARTS = 4
TENANT_CLAIMS = 16_384  # as many answers as a router keeps of a tenant; about 10 MB
ALL_CLAIMS = 500_000  # of all tenants, about 300 MB; beyond, a tenant's new claim costs its own oldest

Knows = Callable[[str], bool]  # whether a router is alive


@dataclass(slots=True)
class _TenantClaims:
    """By key. `expiring`: answered, or lost with their router; the oldest change first."""

    running: dict[bytes, Claim] = field(default_factory=dict)
    expiring: OrderedDict[bytes, tuple[Claim, float]] = field(default_factory=OrderedDict)

    def find(self, key: bytes) -> Claim | None:
        return self.running.get(key) or self.expiring.get(key, (None, 0.0))[0]

    def __len__(self) -> int:
        return len(self.running) + len(self.expiring)


class ClaimBook:
    """See the module. Every call is O(1) in the number of claims, except for what it ends.

    Args:
        epoch: of the actor.
        routers: those that may have claims from before.
        now: seconds of the host's monotonic clock.
    """

    def __init__(self, epoch: int, routers: Iterable[str], now: float) -> None:
        self.epoch = epoch
        self._unreported = set(routers)
        self._recovers_until = now + CLAIM_RECOVERY_S
        self.tenants: dict[str, _TenantClaims] = {}
        self.running: dict[str, dict[str, tuple[str, bytes]]] = {}  # by router and run
        self._unlisted: dict[str, frozenset[str]] = {}  # by router: runs that its last report did not list
        self._generations: dict[str, Generation] = {}  # by router that is alive
        self._made = 0  # generations
        self.count = 0

    def on_claim(self, asked: ClaimRequest, now: float, knows: Knows) -> ClaimReply:
        """Decide about one request; `knows` tells the routers that are alive."""
        if not knows(asked.router):
            return ClaimReply(ClaimVerdict.WAIT)
        claim = self._find(asked.tenant, asked.key)
        if claim is not None and claim.fingerprint != asked.fingerprint:
            return ClaimReply(ClaimVerdict.REUSED)
        if claim is not None and asked.gone is not None and asked.gone[1] == claim.run:
            claim = self._without(claim, asked.gone[0])
        if claim is None:
            if self._is_recovering(now):
                return ClaimReply(ClaimVerdict.WAIT)
            return self._begin(asked, 0)
        if claim.state is ClaimState.NOT_KEPT:
            return ClaimReply(ClaimVerdict.NOT_KEPT)
        alive = tuple(router for router in claim.routers if knows(router))
        if alive:
            verdict = ClaimVerdict.KEPT
            if claim.state is ClaimState.RUNNING:
                verdict = ClaimVerdict.RUN if claim.run == asked.run else ClaimVerdict.JOIN
            return ClaimReply(verdict, claim.run, alive, claim.restarts)
        if claim.restarts >= MAX_RESTARTS:
            return ClaimReply(ClaimVerdict.LOST)
        if not asked.may_run:
            return ClaimReply(ClaimVerdict.UNKNOWN)
        self._remove(claim)
        return self._begin(asked, claim.restarts + 1)

    def on_report(self, report: ClaimReport, now: float, knows: Knows) -> Generation | None:
        """Take over what a router has; returns what its next report has to name. None: the router is not known yet, and
        nothing was taken over."""
        if not knows(report.router):
            return None
        generation = self._generations.get(report.router)
        if generation is None:
            self._made += 1
            generation = self._generations[report.router] = (self.epoch, self._made)
        for claim, age_s in report.claims:
            self._merge(claim, now - age_s)
        if report.running is not None:
            unlisted = self.running.get(report.router, {}).keys() - report.running
            # twice, since a claim may overtake a report that was made before it
            for run in unlisted & self._unlisted.get(report.router, frozenset()):
                ended = self._find(*self.running[report.router][run])
                if ended is not None:
                    self._remove(ended)
            self._unlisted[report.router] = frozenset(unlisted)
        if report.is_whole and report.generation == generation:
            self._unreported.discard(report.router)
        return generation

    def on_router_gone(self, router: str, now: float) -> None:
        """A router has died: what ran there expires, unless a repeat runs it anew."""
        self._unreported.discard(router)
        self._unlisted.pop(router, None)
        self._generations.pop(router, None)
        for tenant, key in list(self.running.get(router, {}).values()):
            claim = self._find(tenant, key)
            if claim is not None:
                self._remove(claim)
                self._put(claim, now, expires=True)

    def on_tick(self, now: float) -> None:
        """Forget what has expired."""
        for tenant in list(self.tenants.values()):
            while tenant.expiring:
                claim, changed_at = next(iter(tenant.expiring.values()))
                if changed_at > now - KEPT_S:
                    break
                self._remove(claim)

    def extend(self, seconds: float) -> None:
        """The actor stood still for so long: routers have as much longer to report."""
        self._recovers_until += seconds

    def _is_recovering(self, now: float) -> bool:
        if now >= self._recovers_until:
            self._unreported.clear()
        return bool(self._unreported)

    def _begin(self, asked: ClaimRequest, restarts: int) -> ClaimReply:
        if not asked.may_run:
            return ClaimReply(ClaimVerdict.UNKNOWN)
        if not self._has_place(asked.tenant):
            return ClaimReply(ClaimVerdict.FULL)
        claim = Claim(
            asked.tenant, asked.key, asked.fingerprint, asked.run, ClaimState.RUNNING, (asked.router,), restarts
        )
        self._put(claim, 0.0)
        return ClaimReply(ClaimVerdict.RUN, asked.run, claim.routers, restarts)

    def _has_place(self, name: str) -> bool:
        """Whether the tenant may have another claim; its own oldest expiring one may go for that."""
        tenant = self.tenants.get(name, _TenantClaims())
        if len(tenant) < TENANT_CLAIMS and self.count < ALL_CLAIMS:
            return True
        if not tenant.expiring:
            return False
        self._remove(next(iter(tenant.expiring.values()))[0])
        return True

    def _merge(self, reported: Claim, changed_at: float) -> None:
        known = self._find(reported.tenant, reported.key)
        if known is None:
            if self._has_place(reported.tenant):
                self._put(reported, changed_at)
        elif known.run == reported.run:
            if reported.state < known.state:
                return  # overtaken by a later report
            routers = reported.routers
            if reported.state is known.state is ClaimState.KEPT:
                routers = tuple(dict.fromkeys((*known.routers, *reported.routers)))
            self._remove(known)
            self._put(replace(reported, routers=routers), changed_at)
        elif _rank(reported) > _rank(known):  # two runs of one key: a router was taken for dead and was not
            self._remove(known)
            self._put(reported, changed_at)

    def _without(self, claim: Claim, router: str) -> Claim | None:
        """The claim if this router does not have it; None: it has ended."""
        if router not in claim.routers or claim.state is ClaimState.NOT_KEPT:
            return claim
        left = tuple(one for one in claim.routers if one != router)
        if not left:
            self._remove(claim)
            return None
        changed_at = self.tenants[claim.tenant].expiring[claim.key][1]
        self._remove(claim)
        claim = replace(claim, routers=left)
        self._put(claim, changed_at)
        return claim

    def _find(self, tenant: str, key: bytes) -> Claim | None:
        found = self.tenants.get(tenant)
        return None if found is None else found.find(key)

    def _put(self, claim: Claim, changed_at: float, *, expires: bool = False) -> None:
        tenant = self.tenants.setdefault(claim.tenant, _TenantClaims())
        self.count += 1
        if claim.state is ClaimState.RUNNING and not expires:
            tenant.running[claim.key] = claim
            self.running.setdefault(claim.routers[0], {})[claim.run] = (claim.tenant, claim.key)
            return
        tenant.expiring[claim.key] = (claim, changed_at)

    def _remove(self, claim: Claim) -> None:
        tenant = self.tenants[claim.tenant]
        self.count -= 1
        if tenant.running.pop(claim.key, None) is None:
            del tenant.expiring[claim.key]
        else:
            runs = self.running[claim.routers[0]]
            del runs[claim.run]
            if not runs:
                del self.running[claim.routers[0]]
        if not len(tenant):
            del self.tenants[claim.tenant]


def _rank(claim: Claim) -> tuple[ClaimState, int]:
    return claim.state, claim.restarts
