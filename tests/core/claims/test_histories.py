"""Random histories of claims: routers with what they have, an actor, and messages that get lost, come twice and come
late. Of one key at most one run is anywhere, and no answer that a router has is made again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serve_app.core.claims import Claim, ClaimBook, ClaimReport, ClaimRequest, ClaimState, Generation, book
from serve_app.core.claims import ClaimVerdict as V
from tests.effort import examples

ROUTERS = ("a", "b", "c")
KEYS = (b"k1", b"k2")
TENANTS = ("t", "u")
BODIES = (b"x", b"y")
routers, keys, tenants, bodies = map(st.sampled_from, (ROUTERS, KEYS, TENANTS, BODIES))


class Histories(RuleBasedStateMachine):
    """What the routers do is what `http.keyed_runs` does, in the smallest form."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.epoch = 1
        self.made = 0
        self.book = ClaimBook(1, (), 0.0)
        self.alive = {name: f"{name}0" for name in ROUTERS}  # a router that starts again has another id
        self.has: dict[str, dict[str, Claim]] = {self.alive[name]: {} for name in ROUTERS}
        self.generations: dict[str, Generation | None] = {}
        self.late: list[Callable[[], object]] = []  # messages still on their way
        self.beats: dict[str, ClaimReport] = {}  # reports still on their way, by router
        self.asked: dict[tuple[str, bytes], set[bytes]] = {}  # bodies, by tenant and key

    def knows(self, router: str) -> bool:
        return router in self.has

    @rule(router=routers, tenant=tenants, key=keys, body=bodies, lost=st.booleans(), twice=st.booleans())
    def claim(self, router: str, tenant: str, key: bytes, body: bytes, lost: bool, twice: bool) -> None:
        """A request; the reply may get lost, after which its router gives up, or come twice."""
        self.made += 1
        me = self.alive[router]
        run = f"run{self.made}"
        asked = ClaimRequest(me, tenant, key, body, run)
        self.asked.setdefault((tenant, key), set()).add(body)
        for _ in range(6):
            replies = [self.book.on_claim(asked, self.now, self.knows) for _ in range(1 + twice)]
            assert replies[0] == replies[-1]
            reply = replies[0]
            if lost:
                return
            if reply.verdict is V.RUN:
                assert reply.run == run
                self._begins(me, asked, reply.restarts)
            elif reply.verdict in (V.JOIN, V.KEPT):
                home = next(iter(reply.routers))
                found = self.has[home].get(reply.run)
                if found is None:  # evicted, or never begun there
                    asked = replace(asked, gone=(home, reply.run))
                    continue
                assert (found.tenant, found.key, found.fingerprint) == (tenant, key, body)
            elif reply.verdict is V.REUSED:
                assert self.asked[tenant, key] - {body}, "nobody has asked for another body"
            return
        raise AssertionError(f"no end: {reply}")

    def _begins(self, me: str, asked: ClaimRequest, restarts: int) -> None:
        owner = (asked.tenant, asked.key)
        running = [one for has in self.has.values() for one in has.values() if (one.tenant, one.key) == owner]
        assert not any(one.state is ClaimState.RUNNING for one in running), "two runs of a key"
        assert not any(one.state is ClaimState.KEPT and one.fingerprint == asked.fingerprint for one in running), (
            "its answer is there"
        )
        claim = Claim(asked.tenant, asked.key, asked.fingerprint, asked.run, ClaimState.RUNNING, (me,), restarts)
        self.has[me][asked.run] = claim
        assert restarts <= book.MAX_RESTARTS

    @rule(router=routers, other=routers, fails=st.booleans(), reported=st.booleans(), data=st.data())
    def finish(self, router: str, other: str, fails: bool, reported: bool, data: st.DataObject) -> None:
        """A run ends; the report of its answer may come late."""
        me = self.alive[router]
        second = self.alive[other]
        running = [one for one in self.has[me].values() if one.state is ClaimState.RUNNING]
        if not running:
            return
        claim = data.draw(st.sampled_from(sorted(running, key=lambda claimed: claimed.run)))
        if fails:
            del self.has[me][claim.run]
            return
        done = replace(claim, state=ClaimState.KEPT, routers=tuple(dict.fromkeys((me, second))))
        self.has[me][claim.run] = self.has[second][claim.run] = done
        generation = self.generations.get(me)

        def tell() -> None:
            if me in self.has:
                self.book.on_report(ClaimReport(me, generation, ((done, 0.0),)), self.now, self.knows)

        if reported:
            tell()
        self.late.append(tell)  # comes again, and late

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        """A message that was on its way arrives."""
        self.late.pop(data.draw(st.integers(0, len(self.late) - 1)))()

    @rule(router=routers)
    def beat(self, router: str) -> None:
        self._beats(self.alive[router])

    @rule(router=routers)
    def beat_late(self, router: str) -> None:
        """A report that stays on its way: the next one is not sent before it has arrived."""
        me = self.alive[router]
        self._deliver_beat(me)
        claims = tuple((one, 0.0) for one in self.has[me].values())
        running = frozenset(one.run for one in self.has[me].values() if one.state is ClaimState.RUNNING)
        self.beats[me] = ClaimReport(me, self.generations.get(me), claims, running, is_whole=True)

    @rule(router=routers)
    def beat_arrives(self, router: str) -> None:
        self._deliver_beat(self.alive[router])

    def _deliver_beat(self, me: str) -> None:
        if (report := self.beats.pop(me, None)) is not None and me in self.has:
            self.generations[me] = self.book.on_report(report, self.now, self.knows)

    def _beats(self, me: str) -> None:
        """A router reports all it has."""
        self._deliver_beat(me)
        for _ in range(2):
            claims = tuple((one, 0.0) for one in self.has[me].values())
            running = frozenset(one.run for one in self.has[me].values() if one.state is ClaimState.RUNNING)
            report = ClaimReport(me, self.generations.get(me), claims, running, is_whole=True)
            self.generations[me] = self.book.on_report(report, self.now, self.knows)

    @rule(router=routers)
    def die(self, router: str) -> None:
        """A router dies, the actor learns of it, later than the next beat of the others, and another one starts."""
        for other in self.has.keys() - {self.alive[router]}:
            self._beats(other)
        me = self.alive[router]
        del self.has[me]
        self.book.on_router_gone(me, self.now)
        self.made += 1
        self.alive[router] = f"{router}{self.made}"
        self.has[self.alive[router]] = {}

    @rule()
    def restart(self) -> None:
        """Another actor; late messages were for the one before, and routers that beat again are known to it."""
        self.epoch += 1
        self.book = ClaimBook(self.epoch, list(self.has), self.now)
        self.late.clear()
        self.beats.clear()

    @rule(router=routers, data=st.data())
    def evict(self, router: str, data: st.DataObject) -> None:
        """A router has no room for an answer any more."""
        me = self.alive[router]
        for other in self.has:
            self._beats(other)
        kept = sorted(run for run, one in self.has[me].items() if one.state is ClaimState.KEPT)
        if kept:
            del self.has[me][data.draw(st.sampled_from(kept))]

    @rule()
    def all_report(self) -> None:
        for me in self.has:
            self._beats(me)

    @invariant()
    def counted(self) -> None:
        assert self.book.count == sum(len(tenant) for tenant in self.book.tenants.values())
        assert self.book.count <= len(TENANTS) * len(KEYS)
        found = {run for runs in self.book.running.values() for run in runs}
        running = [one for tenant in self.book.tenants.values() for one in tenant.running.values()]
        assert found == {one.run for one in running}


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
