"""The claims of keys at the quota actor: one run of a key, whoever asks, dies or starts anew."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from serve_app.core.claims import (
    KEPT_S,
    MAX_RESTARTS,
    Claim,
    ClaimBook,
    ClaimReply,
    ClaimReport,
    ClaimRequest,
    ClaimState,
    ClaimVerdict,
    Generation,
    book,
)
from serve_app.core.times import CLAIM_RECOVERY_S

KEY = b"k"
BODY = b"body"
V = ClaimVerdict


@dataclass
class Cluster:
    """A book and the routers that the actor takes for alive."""

    alive: set[str] = field(default_factory=lambda: {"a", "b", "c"})
    now: float = 0.0

    def __post_init__(self) -> None:
        self.book = ClaimBook(1, (), self.now)

    def claim(
        self, router: str, run: str, *, tenant: str = "t", key: bytes = KEY, body: bytes = BODY, **more: object
    ) -> ClaimReply:
        asked = ClaimRequest(router, tenant, key, body, run, **more)  # type: ignore[arg-type]
        return self.book.on_claim(asked, self.now, self.knows)

    def knows(self, router: str) -> bool:
        return router in self.alive

    def report(self, router: str, *claims: Claim, generation: Generation | None = None, **more: object) -> object:
        reported = ClaimReport(router, generation, tuple((claim, 0.0) for claim in claims), **more)  # type: ignore[arg-type]
        return self.book.on_report(reported, self.now, self.knows)

    def kept(self, run: str, *routers: str, tenant: str = "t", key: bytes = KEY) -> None:
        """The answer of a run is complete, and these routers have it."""
        self.report(routers[0], Claim(tenant, key, BODY, run, ClaimState.KEPT, routers))

    def die(self, router: str) -> None:
        self.alive.discard(router)
        self.book.on_router_gone(router, self.now)


def test_the_first_request_runs_and_every_repeat_joins_it_wherever_it_arrives() -> None:
    cluster = Cluster()
    assert cluster.claim("a", "1") == ClaimReply(V.RUN, "1", ("a",))
    assert cluster.claim("a", "1").verdict is V.RUN  # its reply was lost
    for router in ("a", "b"):
        assert cluster.claim(router, "2") == ClaimReply(V.JOIN, "1", ("a",))


def test_a_repeat_gets_the_kept_answer_from_the_routers_that_have_it_and_live() -> None:
    cluster = Cluster()
    cluster.claim("a", "1")
    cluster.kept("1", "a", "b")
    assert cluster.claim("c", "2") == ClaimReply(V.KEPT, "1", ("a", "b"))
    cluster.die("a")
    assert cluster.claim("c", "2") == ClaimReply(V.KEPT, "1", ("b",))


def test_another_body_under_the_key_is_refused_in_every_state_of_the_claim() -> None:
    cluster = Cluster()
    cluster.claim("a", "1")
    assert cluster.claim("b", "2", body=b"other").verdict is V.REUSED
    cluster.kept("1", "a", "b")
    assert cluster.claim("b", "2", body=b"other").verdict is V.REUSED
    cluster.die("a")
    cluster.die("b")
    assert cluster.claim("c", "2", body=b"other").verdict is V.REUSED


def test_a_report_that_comes_late_takes_back_nothing() -> None:
    cluster = Cluster()
    cluster.claim("a", "1")
    cluster.kept("1", "a", "b")
    cluster.report("a", Claim("t", KEY, BODY, "1", ClaimState.RUNNING, ("a",)))
    cluster.kept("1", "a")
    assert cluster.claim("c", "2") == ClaimReply(V.KEPT, "1", ("a", "b"))


def test_a_key_of_another_tenant_is_another_key() -> None:
    cluster = Cluster()
    cluster.claim("a", "1")
    assert cluster.claim("a", "2", tenant="other", body=b"other") == ClaimReply(V.RUN, "2", ("a",))


def test_a_run_whose_router_died_starts_anew_four_times_and_is_refused_once_the_fifth_has_died() -> None:
    routers = [f"r{number}" for number in range(MAX_RESTARTS + 1)]
    cluster = Cluster(alive={*routers, "other"})
    for restarts, router in enumerate(routers):
        run = str(restarts)
        assert cluster.claim(router, run) == ClaimReply(V.RUN, run, (router,), restarts)
        assert cluster.claim("other", "repeat") == ClaimReply(V.JOIN, run, (router,), restarts)
        cluster.die(router)
    assert cluster.claim("other", "5").verdict is V.LOST
    assert cluster.claim("other", "6").verdict is V.LOST


def test_an_answer_whose_routers_have_all_died_starts_anew_once() -> None:
    cluster = Cluster()
    cluster.claim("a", "1")
    cluster.kept("1", "a", "b")
    cluster.die("a")
    cluster.die("b")
    assert cluster.claim("c", "2") == ClaimReply(V.RUN, "2", ("c",), restarts=1)


def test_a_run_that_its_router_does_not_have_is_over() -> None:
    cluster = Cluster()
    cluster.claim("a", "1")
    assert cluster.claim("b", "2", gone=("a", "0")).verdict is V.JOIN  # of an earlier run
    assert cluster.claim("b", "2", gone=("c", "1")).verdict is V.JOIN  # it never was there
    assert cluster.claim("b", "2", gone=("a", "1")) == ClaimReply(V.RUN, "2", ("b",))


def test_an_answer_that_one_router_has_evicted_is_had_from_the_other() -> None:
    cluster = Cluster()
    cluster.claim("a", "1")
    cluster.kept("1", "a", "b")
    assert cluster.claim("c", "2", gone=("a", "1")) == ClaimReply(V.KEPT, "1", ("b",))
    assert cluster.claim("c", "2", gone=("b", "1")).verdict is V.RUN


def test_who_only_looks_begins_nothing() -> None:
    cluster = Cluster()
    assert cluster.claim("a", "1", may_run=False).verdict is V.UNKNOWN
    cluster.claim("a", "1")
    cluster.die("a")
    assert cluster.claim("b", "2", may_run=False).verdict is V.UNKNOWN
    assert cluster.claim("b", "3").verdict is V.RUN


def test_a_run_that_two_reports_do_not_list_is_over_and_one_report_says_nothing() -> None:
    cluster = Cluster()
    cluster.claim("a", "1")
    cluster.report("a", running=frozenset())  # made before the claim, perhaps
    assert cluster.claim("b", "2").verdict is V.JOIN
    cluster.report("a", running=frozenset({"1"}))
    cluster.report("a", running=frozenset())
    assert cluster.claim("b", "2").verdict is V.JOIN
    cluster.report("a", running=frozenset())
    assert cluster.claim("b", "2").verdict is V.RUN


def test_a_claim_ends_some_time_after_its_answer_or_its_router_s_death_and_not_while_it_runs() -> None:
    cluster = Cluster()
    cluster.claim("a", "1")
    cluster.now = 10 * KEPT_S
    cluster.book.on_tick(cluster.now)
    assert cluster.claim("b", "2").verdict is V.JOIN
    cluster.kept("1", "a")
    cluster.claim("b", "3", key=b"lost")
    cluster.die("b")
    cluster.now += KEPT_S
    cluster.book.on_tick(cluster.now)
    assert cluster.book.count == 0


def test_a_new_actor_decides_about_unknown_keys_once_all_routers_have_reported() -> None:
    cluster = Cluster()
    cluster.book = ClaimBook(2, ["a", "b"], 0.0)
    assert cluster.claim("c", "2").verdict is V.WAIT
    running = Claim("t", KEY, BODY, "1", ClaimState.RUNNING, ("a",))
    for router, claims in (("a", (running,)), ("b", ())):
        generation = cluster.report(router)
        assert isinstance(generation, tuple)
        cluster.report(router, *claims, generation=generation, is_whole=True)
    assert cluster.claim("c", "2") == ClaimReply(V.JOIN, "1", ("a",))
    assert cluster.claim("c", "3", key=b"new").verdict is V.RUN


def test_a_report_begun_under_an_earlier_actor_is_not_whole_for_this_one() -> None:
    cluster = Cluster()
    cluster.book = ClaimBook(2, ["a"], 0.0)
    cluster.report("a", generation=(1, 1), is_whole=True)
    assert cluster.claim("c", "2").verdict is V.WAIT


@pytest.mark.parametrize("dies", [False, True])
def test_a_router_that_does_not_report_to_a_new_actor_keeps_nobody_waiting(dies: bool) -> None:
    cluster = Cluster()
    cluster.book = ClaimBook(2, ["a"], 0.0)
    if dies:
        cluster.die("a")
    else:
        cluster.now = CLAIM_RECOVERY_S - 0.1
        assert cluster.claim("c", "2").verdict is V.WAIT
        cluster.now = CLAIM_RECOVERY_S
    assert cluster.claim("c", "2").verdict is V.RUN


def test_a_router_that_was_taken_for_dead_has_to_report_everything_again() -> None:
    cluster = Cluster()
    first = cluster.report("a")
    assert cluster.report("a") == first
    cluster.die("a")
    assert cluster.report("a") is None
    cluster.alive.add("a")
    assert cluster.report("a") not in (None, first)


def test_a_tenant_with_a_million_keys_keeps_its_newest_and_costs_no_other_tenant_a_claim(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(book, "TENANT_CLAIMS", 100)
    cluster = Cluster()
    cluster.claim("a", "light", tenant="light")
    cluster.kept("light", "a", tenant="light")
    for number in range(10_000):
        key = b"%d" % number
        assert cluster.claim("a", f"{number}", key=key).verdict is V.RUN
        cluster.kept(f"{number}", "a", key=key)
        assert cluster.book.count <= 101
    assert cluster.claim("b", "x", tenant="light").verdict is V.KEPT
    assert cluster.claim("b", "x", key=b"9999").verdict is V.KEPT
    assert cluster.claim("b", "x", key=b"0").verdict is V.RUN


def test_runs_in_progress_are_not_evicted_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "TENANT_CLAIMS", 2)
    cluster = Cluster()
    for number in range(2):
        assert cluster.claim("a", f"{number}", key=b"%d" % number).verdict is V.RUN
    assert cluster.claim("a", "2", key=b"2").verdict is V.FULL
    assert cluster.claim("a", "3", tenant="other").verdict is V.RUN


def test_a_full_book_costs_the_tenant_that_asks_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "ALL_CLAIMS", 2)
    cluster = Cluster()
    for number in range(2):
        cluster.claim("a", f"{number}", key=b"%d" % number)
        cluster.kept(f"{number}", "a", key=b"%d" % number)
    assert cluster.claim("a", "2", tenant="other").verdict is V.FULL
    assert cluster.claim("a", "2", key=b"2").verdict is V.RUN
    assert cluster.claim("a", "x", key=b"1").verdict is V.KEPT
