"""How a drain is followed: by the quota actor's figures and Serve's details, which are scripts here."""

from __future__ import annotations

from typing import Any

import pytest

from autoscaling.operations import draining, ray_drains
from serve_app.core.memory import DrainRequest
from serve_app.errors import LeaseNotFound, Unavailable
from serve_app.names import APPLICATION

NODE = "n1"
DRAINS = ray_drains.RayDrains()


def row(**changes: Any) -> dict[str, Any]:
    known = {"replica": "r1", "ended": False, "final": False, "left_s": 0.0}
    return known | {"running": 1, "finished": 0, "moved": 0} | changes


def details(*replicas: tuple[str, str], proxy: bool = False) -> dict[str, Any]:
    listed = [{"replica_id": one, "state": state, "node_id": NODE} for one, state in replicas]
    engine = {"name": "engine-m", "replicas": listed, "deployment_config": {"graceful_shutdown_timeout_s": 65.0}}
    return {
        "applications": {APPLICATION: {"deployments": {"engine-m": engine}}},
        "proxies": {NODE: {}} if proxy else {},
    }


class Driver:
    """Says these figures and details, one after the other, and the last ones for ever; an exception is raised."""

    ANSWER_S = 5.0

    def __init__(self, rows: list[Any], seen: list[Any], orders: list[Exception] | None = None) -> None:
        self.rows = rows
        self.seen = seen
        self.orders = orders or []
        self.recovering = False
        self.asked: list[DrainRequest] = []
        self.announced: list[tuple[str, float]] = []

    def ask_quota(self, method: str, *args: Any) -> Any:
        if method == "exchange":
            self.asked.append(args[0])
            if self.orders:
                raise self.orders.pop(0)
            return None
        return {"drains": self._next(self.rows), "recovering": self.recovering}

    def details(self, within_s: float) -> Any:
        return self._next(self.seen)

    @staticmethod
    def _next(script: list[Any]) -> Any:
        found = script.pop(0) if len(script) > 1 else script[0]
        if isinstance(found, Exception):
            raise found
        return found

    def announce_end(self, node_id: str, within_s: float) -> None:
        self.announced.append((node_id, within_s))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "POLL_S", 0.001)
    monkeypatch.setattr(draining, "END_S", 0.1)
    monkeypatch.setattr(draining, "MOVE_S", 0.1)
    monkeypatch.setattr(ray_drains, "MOVE_S", 0.1)


def use(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> list[list[dict[str, Any]]]:
    monkeypatch.setattr(ray_drains, "application", driver)
    return []


def test_a_replica_is_followed_until_serve_has_seen_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    end = row(ended=True, running=0, moved=1)
    away = Unavailable("the actor restarts")
    driver = Driver([[row()], away, [row()], [end]], [details(("r1", "RUNNING")), details(("r2", "STARTING"))])
    reported = use(monkeypatch, driver)
    assert draining.follow_replica(DRAINS, "r1", 30.0, reported.append) == [end]
    assert reported == [[row()], [end]], "each once"
    assert [one.replica for one in driver.asked] == ["r1"]
    assert 29.0 < (driver.asked[0].within_s or 0.0) <= 30.0
    assert len(driver.seen) == 1


def test_a_replica_that_does_not_end_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = use(monkeypatch, Driver([[row()]], [details(("r1", "RUNNING"))]))
    with pytest.raises(Unavailable, match="has not ended in time"):
        draining.follow_replica(DRAINS, "r1", 0.0, reported.append)


def test_a_replica_that_ends_while_the_actor_starts_anew_is_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver([[row()], Unavailable("the actor restarts"), []], [details(("r1", "RUNNING")), details()])
    reported = use(monkeypatch, driver)
    assert draining.follow_replica(DRAINS, "r1", 30.0, reported.append) == [row(ended=True)]


def test_an_actor_that_ended_before_the_engine_knew_is_reported_again(monkeypatch: pytest.MonkeyPatch) -> None:
    end = row(ended=True, running=0, finished=1)
    running_details = details(("r1", "RUNNING"))
    driver = Driver(
        [[], Unavailable("the actor restarts"), [], [row()], [end]],
        [running_details, running_details, running_details, details()],
    )
    reported = use(monkeypatch, driver)
    assert draining.follow_replica(DRAINS, "r1", 30.0, reported.append) == [end]
    first, again = (one.within_s or 0.0 for one in driver.asked)
    assert 0 < again < first <= 30.0


def test_a_replica_that_the_actor_does_not_know_is_not_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = use(monkeypatch, Driver([[]], [details()], [LeaseNotFound("there is no engine")]))
    with pytest.raises(LeaseNotFound):
        draining.follow_replica(DRAINS, "r1", None, reported.append)


def test_an_order_that_an_actor_did_not_take_is_given_to_the_next_one_once_it_knows_its_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end = row(ended=True, final=True, running=0)
    orders: list[Exception] = [Unavailable("the actor ends"), LeaseNotFound("there is no engine yet")]
    running_details = details(("r1", "RUNNING"))
    driver = Driver([[], [], [], [end]], [running_details, running_details, details()], orders)
    driver.recovering = True
    reported = use(monkeypatch, driver)
    assert draining.follow_replica(DRAINS, "r1", 30.0, reported.append) == [end]
    assert len(driver.asked) == 3


def test_an_earlier_deadline_reaches_a_replica_that_drains_already(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver([[row(left_s=600.0)], [row(ended=True)]], [details()])
    reported = use(monkeypatch, driver)
    draining.follow_replica(DRAINS, "r1", 5.0, reported.append)
    assert len(driver.asked) == 1


def test_a_controller_that_stands_still_is_no_reason_to_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver([[row(ended=True)]], [Unavailable("the controller does not answer")])
    reported = use(monkeypatch, driver)
    with pytest.raises(Unavailable, match="has ended, and Serve has not seen it"):
        draining.follow_replica(DRAINS, "r1", 0.0, reported.append)
    assert len(driver.asked) == 1


def test_what_was_known_outlives_the_actor_that_knew_it(monkeypatch: pytest.MonkeyPatch) -> None:
    anew = row(ended=True, running=0)
    seen = [details(("r1", "RUNNING")), details()]
    driver = Driver([[row(finished=4, moved=1)], [anew]], seen)
    reported = use(monkeypatch, driver)
    assert draining.follow_replica(DRAINS, "r1", 30.0, reported.append) == [
        row(ended=True, running=0, finished=4, moved=1)
    ]


def test_a_node_is_followed_until_nothing_runs_there_and_what_serve_stops_says_its_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = [
        details(("r1", "RUNNING"), proxy=True),
        details(("r1", "RUNNING"), proxy=True),
        details(("r1", "STOPPING"), proxy=True),
        details(("r1", "STOPPING"), proxy=True),
        details(proxy=True),
        details(),
    ]
    end = row(ended=True, running=0, finished=1)
    driver = Driver([[], [], [row()], [end]], seen)
    reported = use(monkeypatch, driver)
    assert draining.follow_node(DRAINS, NODE, None, reported.append) == [end]
    assert driver.announced == [(NODE, ray_drains.REPLACE_S + 65.0)]
    assert driver.asked == [DrainRequest("r1")], "once, when Serve stops it"
    assert reported == [[row()], [end]]


def test_a_node_has_until_its_deadline_and_its_engines_some_seconds_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = use(monkeypatch, Driver([[]], [details(("r1", "RUNNING"))]))
    with pytest.raises(Unavailable, match="1 replicas are left there: engine-m"):
        draining.follow_node(DRAINS, NODE, 0.2, reported.append)


def test_a_node_is_drained_at_its_deadline_though_its_haproxy_runs_for_its_minimum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stopping = details(("r1", "STOPPING"), proxy=True)
    seen: list[Any] = [stopping, stopping, Unavailable("the controller"), details(proxy=True)]
    end = row(ended=True, final=True, running=0)
    driver = Driver([[end]], seen)
    reported = use(monkeypatch, driver)
    assert draining.follow_node(DRAINS, NODE, 0.0, reported.append) == [end]
    assert driver.announced == [(NODE, ray_drains.MOVE_S)]
