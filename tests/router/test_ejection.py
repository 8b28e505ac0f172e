"""A replica that fails gets nothing for a while, costs few requests, and never are all of them out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from serve_app.core.routing import AffinityKey, FailureKind, OutlierVerdict
from serve_app.core.routing import TargetReason as Placed
from serve_app.core.routing.outliers import MAX_CONSECUTIVE_FAILURES
from serve_app.core.routing.retry_budget import LEAST_PER_S, SHARE
from serve_app.errors import EngineFailed, EngineUnreachable, Overloaded, RequestFailed, ServeAppError
from serve_app.router.replicas import ResultReporter
from serve_app.router.request_grant import RequestGrant
from serve_app.transport import Frame, TokenUsage
from serve_app.types import Outcome
from tests.fakes.asgi_client import Client, ask
from tests.fakes.engines import FakeCluster, model, run, turns, until
from tests.fakes.failing_engines import NEVER, Broken, ejected, takes
from tests.fakes.router import SOON_S, Router, freeze, thaw


def test_a_replica_that_fails_every_call_costs_three_tries_and_no_request() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await Router(cluster).start()
        broken = Broken(cluster, "r1")
        for _ in range(12):
            await router.ask()
        await asyncio.gather(*(router.ask() for _ in range(12)))
        assert broken.calls == MAX_CONSECUTIVE_FAILURES
        assert set(router.places.values()) == {"r2"}
        replicas = router.model.replica_set
        assert (replicas.ejected_count, replicas.ejections[FailureKind.CONSECUTIVE]) == (1, 1)
        assert takes(router) == {"r1": "none", "r2": "all"}
        await router.settled()

    run(scenario, waits=NEVER)


def test_where_everything_fails_half_of_the_replicas_stay_in_use() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2", "r3", "r4")
        router = await Router(cluster).start()
        broken = Broken(cluster, *cluster.running)
        for _ in range(6):
            reported = await asyncio.gather(*(router.ask() for _ in range(4)), return_exceptions=True)
            assert {type(error) for error in reported} == {EngineFailed}
            assert router.model.replica_set.ejected_count <= 2
            assert list(takes(router).values()).count("all") >= 2
        assert router.model.replica_set.ejected_count == 2
        assert broken.calls <= 6 * 4 * 3
        await router.settled()

    run(scenario, waits=NEVER)


def test_a_request_that_failed_at_home_runs_elsewhere() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2", "r3")
        router = await Router(cluster).start()
        key = AffinityKey("tenant\0session\0one", Placed.SESSION)
        await router.ask(key=key)
        broken = Broken(cluster, router.places["1"])
        await router.ask(key=key)
        assert broken.calls == 1
        assert router.places["2"] != router.places["1"]
        assert not router.model.replica_set.ejected_count
        await router.settled()

    run(scenario, waits=NEVER)


class ReceivedReports:
    """What is told of a request; its replica is on no trial."""

    def __init__(self) -> None:
        self.verdicts: list[OutlierVerdict] = []

    def is_on_probation(self, replica_id: str) -> bool:
        return False

    def record_result(self, replica_id: str, verdict: OutlierVerdict, sent_at: float) -> None:
        self.verdicts.append(verdict)


@pytest.mark.parametrize(
    ("status", "error", "lost", "verdict"),
    [
        (200, None, False, OutlierVerdict.OK),
        (400, None, False, OutlierVerdict.CLIENT),
        (500, None, False, OutlierVerdict.CLIENT),
        (None, RequestFailed("x"), False, OutlierVerdict.CLIENT),
        (200, RequestFailed("x"), False, OutlierVerdict.OK),
        (None, None, False, OutlierVerdict.CLIENT),
        (None, EngineFailed("x"), False, OutlierVerdict.FAILED),
        (None, EngineFailed("x"), True, OutlierVerdict.LOST),
        (None, EngineUnreachable("x"), False, OutlierVerdict.LOST),
        (200, EngineFailed("x"), False, OutlierVerdict.FAILED),
        (200, EngineFailed("x", code="slow_client"), False, OutlierVerdict.OK),
        (None, Overloaded("x"), False, OutlierVerdict.CLIENT),
    ],
)
def test_a_request_has_one_result_and_it_is_the_last_thing_known(
    status: int | None, error: ServeAppError | None, lost: bool, verdict: OutlierVerdict
) -> None:
    received = ReceivedReports()
    sent = ResultReporter(received, "r1", 0.0)  # type: ignore[arg-type]
    if status is not None:
        sent.on_first_frame(status)
    if error is not None:
        sent.on_error(error, connection_lost=lost)
    sent.report()
    sent.report()
    assert received.verdicts == [verdict]


def test_a_broken_channel_is_a_lost_connection_once_however_many_it_carried() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await Router(cluster).start()
        freeze(cluster, "r1", "r2")
        requests = [router.asking() for _ in range(8)]
        await until(lambda: cluster["r1"].work == 4, SOON_S, "four on each")
        cluster.break_channels("r1")
        thaw(cluster, "r1", "r2")
        await asyncio.gather(*requests)
        assert {why: n for why, n in router.model.replica_set.ejections.items() if n} == {FailureKind.LOST: 1}
        await router.settled()

    run(scenario, waits=NEVER)


def test_what_clients_do_says_nothing_of_a_replica() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        client = await Client(cluster).start()
        for _ in range(20):
            reply = await client.post(ask("p", -1))
            assert reply.status == 400
        freeze(cluster, "r1", "r2")
        for _ in range(5):
            leaving = [client.posting(ask("p", 5)) for _ in range(8)]
            await until(lambda: cluster["r1"].work + cluster["r2"].work == 8, SOON_S, "all run")
            for task in leaving:
                task.cancel()
            await asyncio.wait(leaving)
            await until(lambda: not cluster["r1"].work + cluster["r2"].work, SOON_S, "all gone")
        thaw(cluster, "r1", "r2")
        assert client.outcomes == {Outcome.BAD_REQUEST: 20, Outcome.CANCELLED_RUNNING: 40}
        assert set(client.model.replica_set.ejections.values()) == {0}
        assert client.model.replica_set.ejected_count == 0

    run(scenario)


def test_a_replica_that_breaks_every_answer_in_the_middle_is_ejected() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await Router(cluster).start()

        async def breaking(submit: Any) -> AsyncIterator[Frame]:
            yield Frame(submit.number, b"data: ", 200, "sse", events=1)
            raise EngineFailed("it broke")

        cluster["r1"].engine.backend.run = breaking  # type: ignore[method-assign, assignment]
        failed = 0
        for _ in range(20):
            try:
                await router.ask()
            except EngineFailed:
                failed += 1
        assert (failed, router.model.replica_set.ejections[FailureKind.CONSECUTIVE]) == (MAX_CONSECUTIVE_FAILURES, 1)
        await router.settled()

    run(scenario, waits=NEVER)


def test_a_failure_is_counted_before_the_slot_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the slots of a replica that is ejected by it would be granted once more."""
    order: list[str] = []
    report = ResultReporter.report
    release = RequestGrant.release

    def reporting(self: ResultReporter) -> None:
        order.append("counted")
        report(self)

    def releasing(self: RequestGrant, usage: TokenUsage | None = None) -> None:
        order.append("released")
        release(self, usage)

    monkeypatch.setattr(ResultReporter, "report", reporting)
    monkeypatch.setattr(RequestGrant, "release", releasing)

    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster, max_wait_s=0.05).start()
        Broken(cluster, "r1")
        with pytest.raises(EngineFailed):
            await router.ask()
        assert order[:2] == ["counted", "released"]
        await router.settled()

    run(scenario, waits=NEVER)


def test_where_no_more_may_be_out_a_lost_request_pauses_before_it_tries_again() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await Router(cluster, max_wait_s=0.4).start()
        for name in ("r1", "r2"):
            await cluster[name].engine.server.close()  # no connection comes about
        request = router.asking()
        await until(lambda: router.model.waiting == 1 and not router.waiting, SOON_S, "it pauses, and counts")
        with pytest.raises(EngineUnreachable):
            await request
        assert router.model.replica_set.ejected_count == 1
        assert 3 <= len(router.handle.calls) <= 8
        await router.settled()

    run(scenario, waits=NEVER)


def test_requests_beyond_the_retry_budget_wait_for_their_turn_and_answers_earn_it() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()
        budget = router.model.retry_budget
        broken = Broken(cluster, "r1")
        budget.left, begun = -0.3 * LEAST_PER_S, time.monotonic()
        request = router.asking()
        await until(lambda: broken.calls == 1, SOON_S, "it has failed once")
        broken.mend()
        await request
        assert time.monotonic() - begun >= 0.3, "it would have paused for a tenth of that"
        earned = budget.left
        await router.ask()
        assert budget.left == pytest.approx(earned + SHARE)
        await router.settled()

    run(scenario, waits=NEVER)


def test_an_ejected_replica_that_leaves_is_no_longer_counted_and_is_as_new_when_it_returns() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await Router(cluster).start()
        broken = Broken(cluster, "r1")
        await ejected(router, "r1")
        broken.mend()
        cluster.remove("r1")
        await turns(5)
        assert router.model.replica_set.ejected_count == 0
        assert takes(router) == {"r2": "all"}
        await cluster.add("r1")
        await turns(5)
        assert takes(router) == {"r1": "all", "r2": "all"}
        await router.settled()

    run(scenario, model(slots=4), waits=NEVER)
