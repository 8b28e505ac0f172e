"""What operators ask and change: with their keys only, bounded in time, and the same by any router."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from autoscaling.operations import application
from autoscaling.operations.draining import DrainLook
from serve_app.core.times import MOVE_S
from serve_app.errors import BadRequest, Forbidden, MethodNotAllowed, NotFound, Unavailable
from serve_app.http.api import operator_routes, routes
from serve_app.http.api.operator_routes import ClusterCalls, OperatorRoutes
from serve_app.http.cluster_calls import RayCalls
from serve_app.http.shared_answer import SharedAnswer
from serve_app.store import AuditEntry
from serve_app.system import LogFilter, LogPart
from serve_app.types import Identity, RequestClass
from tests.fakes.cluster_calls import NoCluster, ScriptedCluster, SilentCluster
from tests.fakes.router import SOON_S
from tests.fakes.stores import FakeStore

FIGURES = {"free_bytes": 7}
PLAN = {"waits": {"owner": "a"}, "steps": [{"owner": "b"}]}
ASKS = [
    ("GET", "/admin/status"),
    ("GET", "/admin/quota"),
    ("GET", "/admin/defrag"),
    ("POST", "/admin/defrag"),
    ("POST", "/admin/drains"),
    ("GET", "/admin/drains/x7k2"),
    ("GET", "/admin/logs"),
]


def identity_of(*, admin: bool) -> Identity:
    return Identity("platform", RequestClass.CRITICAL, RequestClass.NORMAL, admin=admin, key_id="ops")


def no_store() -> FakeStore:
    raise AssertionError("nothing was changed")


@pytest.fixture
def store(tmp_path: Path) -> FakeStore:
    return FakeStore(tmp_path)


def recorded(store: FakeStore) -> list[AuditEntry]:
    return asyncio.run(store.audit(0.0, 0, 9))


def row(left_s: float = 30.0, *, ended: bool = False) -> dict[str, Any]:
    return {"replica": "x7k2", "left_s": left_s, "ended": ended}


def asked(
    cluster: ClusterCalls,
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    query: str = "",
    admin: bool = True,
    store: FakeStore | None = None,
) -> Any:
    async def read() -> tuple[Mapping[str, Any], bytes]:
        assert admin, "the body of a key that may not ask is not read"
        return body or {"name": "x7k"}, b""

    route = routes.resolve(method, path)
    status, _, answer = asyncio.run(
        OperatorRoutes(cluster, lambda: store or no_store(), lambda: 5.0).answer(
            route, identity_of(admin=admin), query.encode(), read
        )
    )
    assert status == 200
    return json.loads(answer)


@pytest.mark.parametrize(("method", "path"), ASKS)
def test_another_key_than_an_operator_s_asks_nothing_whatever_its_class(method: str, path: str) -> None:
    cluster = ScriptedCluster()
    with pytest.raises(Forbidden, match=r"auth\.keys") as refused:
        asked(cluster, method, path, admin=False)
    assert (refused.value.status, refused.value.code) == (403, "not_admin")
    assert cluster.asked == []


@pytest.mark.parametrize(("method", "path"), ASKS)
@pytest.mark.parametrize("kind", [NoCluster, SilentCluster])
def test_while_the_cluster_is_away_it_says_so_in_time(
    kind: type[NoCluster], method: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bound in ("ANSWER_TIMEOUT_S", "STATE_TIMEOUT_S", "LOGS_TIMEOUT_S"):
        monkeypatch.setattr(operator_routes, bound, 0.05)
    with pytest.raises(Unavailable) as refused:
        asked(kind(), method, path)
    assert (refused.value.status, refused.value.code) in ((503, "no_quota"), (503, "no_controller"))


def test_an_operator_sees_the_state_and_the_ledger_with_the_addresses_of_nodes() -> None:
    cluster = ScriptedCluster(answers={"figures": FIGURES})
    assert asked(cluster, "GET", "/admin/status")["state"] == "running"
    assert asked(cluster, "GET", "/admin/quota") == FIGURES | {"addresses": {"n1": "10.0.0.1"}}


def test_the_ledger_is_there_without_the_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nameless(ScriptedCluster):
        async def addresses(self) -> dict[str, str]:
            raise TimeoutError

    assert asked(Nameless(answers={"figures": FIGURES}), "GET", "/admin/quota") == FIGURES | {"addresses": {}}


@pytest.mark.parametrize(
    ("method", "plan", "begun"), [("GET", PLAN, False), ("POST", PLAN, True), ("POST", None, False)]
)
def test_only_a_post_begins_a_defragmentation(method: str, plan: Any, begun: bool, store: FakeStore) -> None:
    cluster = ScriptedCluster(answers={"defrag": plan})
    found = asked(cluster, method, "/admin/defrag", store=store)
    assert (found["plan"], found["begun"]) == (plan, begun)
    assert cluster.asked == [("defrag", method == "POST")]
    restarts = [(one.action, one.author.key_id, one.target, one.details) for one in recorded(store)]
    assert restarts == ([("defrag", "ops", "a", {"restarts": ["b"]})] if begun else [])


def test_a_replica_is_drained_by_the_beginning_of_its_id(store: FakeStore) -> None:
    cluster = ScriptedCluster()
    found = asked(cluster, "POST", "/admin/drains", {"name": "x7k", "within_s": 30}, store=store)
    assert found == {"object": "drain", "id": "x7k2", "is_node": False, "limit_s": None, "unrecorded": ""}
    assert [call for call in cluster.asked if call[0] != "look"] == [("drain_replica", "x7k2", 30.0)]
    (entry,) = recorded(store)
    assert (entry.action, entry.target, entry.at) == ("drain", "x7k2", 5.0)
    assert (entry.author.key_id, entry.author.tenant) == ("ops", "platform")
    assert entry.details == {"is_node": False, "within_s": 30.0}


def test_a_node_is_drained_and_says_until_when(store: FakeStore) -> None:
    cluster = ScriptedCluster()
    found = asked(cluster, "POST", "/admin/drains", {"name": "n1", "within_s": 60}, store=store)
    assert found == {"object": "drain", "id": "n1", "is_node": True, "limit_s": 60 + MOVE_S, "unrecorded": ""}
    assert cluster.asked == [("drain_node", "n1", 60.0)]
    assert [(one.target, one.details["is_node"]) for one in recorded(store)] == [("n1", True)]


@pytest.mark.parametrize(
    ("within_s", "before", "after", "is_recorded"),
    [
        (30, DrainLook([], engines={"x7k2": "RUNNING"}), [row(30.0)], True),
        (30, DrainLook([row(0.0, ended=True)], engines={"x7k2": "RUNNING"}), [row(30.0)], True),
        (30, DrainLook([row(30.0)], engines={"x7k2": "STOPPING"}), [row(29.0)], False),  # the client follows it
        (5, DrainLook([row(30.0)], engines={"x7k2": "STOPPING"}), [row(5.0)], True),
        (None, DrainLook([row(600.0)], engines={"x7k2": "RUNNING"}), [row(60.0)], True),
        (None, DrainLook([row(60.0)], engines={"x7k2": "RUNNING"}), [row(60.0)], False),
        (None, DrainLook([], engines={"x7k2": "STOPPING"}), [row(60.0)], False),  # of a node that drains
    ],
)
def test_a_drain_that_is_asked_for_again_is_recorded_only_where_it_ends_earlier(
    within_s: float | None, before: DrainLook, after: list[dict[str, Any]], is_recorded: bool, store: FakeStore
) -> None:
    cluster = ScriptedCluster(looks=[before], answers={"figures": {"drains": after}})
    asked(cluster, "POST", "/admin/drains", {"name": "x7k2", "within_s": within_s}, store=store)
    assert ("drain_replica", "x7k2", within_s) in cluster.asked
    assert len(recorded(store)) == is_recorded


def test_a_drain_that_the_quota_actor_may_have_taken_is_recorded(store: FakeStore) -> None:
    class Lost(ScriptedCluster):
        async def drain_replica(self, replica: str, within_s: float | None) -> None:
            raise TimeoutError

    with pytest.raises(Unavailable, match="quota actor"):
        asked(Lost(), "POST", "/admin/drains", {"name": "x7k2"}, store=store)
    assert [one.target for one in recorded(store)] == ["x7k2"]
    with pytest.raises(Unavailable, match="quota actor"):
        asked(Lost(looks=[DrainLook(None)]), "POST", "/admin/drains", {"name": "x7k2"}, store=store)
    assert len(recorded(store)) == 1, "an actor that answers nothing was not asked"


@pytest.mark.parametrize(("path", "body"), [("/admin/drains", {"name": "n1"}), ("/admin/defrag", None)])
def test_while_the_store_is_away_a_change_is_made_and_the_answer_says_that_the_record_lacks_it(
    path: str, body: Mapping[str, Any] | None, store: FakeStore
) -> None:
    store.away = True
    cluster = ScriptedCluster(answers={"defrag": PLAN})
    found = asked(cluster, "POST", path, body, store=store)
    assert len(cluster.asked) == 1
    assert "the audit record lacks this" in found["unrecorded"]


def test_a_change_is_recorded_also_if_its_client_leaves(store: FakeStore) -> None:
    gate = asyncio.Event()

    class Slow(ScriptedCluster):
        async def drain_node(self, node_id: str, within_s: float | None) -> float:
            await gate.wait()
            return await super().drain_node(node_id, within_s)

    async def scenario() -> None:
        async def read() -> tuple[Mapping[str, Any], bytes]:
            return {"name": "n1"}, b""

        answers = OperatorRoutes(Slow(), lambda: store)
        drains = routes.resolve("POST", "/admin/drains")
        asking = asyncio.create_task(answers.answer(drains, identity_of(admin=True), b"", read))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        gate.set()
        while not await store.audit(0.0, 0, 9):  # noqa: ASYNC110 - bound: the test's own time
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(scenario(), SOON_S))
    assert [one.target for one in recorded(store)] == ["n1"]


def test_how_far_a_drain_is_can_be_asked_of_a_replica_and_of_a_node() -> None:
    look = DrainLook([{"replica": "x7k2"}], False, {"x7k2": "STOPPING"}, ["engine-m"], True)
    cluster = ScriptedCluster(looks=[look])
    for target, is_node in (("x7k2", False), ("n1", True)):
        found = asked(cluster, "GET", f"/admin/drains/{target}")
        assert (found["id"], found["is_node"]) == (target, is_node)
        assert DrainLook(**{name: found[name] for name in DrainLook.__slots__}) == look


def test_log_lines_of_all_nodes_stand_in_order_of_time_in_utc() -> None:
    parts = [
        LogPart("router", "r1", "/a", ("INFO two", "INFO four"), (2.0, 4.5)),
        LogPart("engine-org--m", "x1", "/b", ("boom", "INFO three"), (None, 3.0)),
    ]
    cluster = ScriptedCluster(logs=parts)
    query = "source=org/m&replica=x&request=cmpl-5d0c6f0e9c7b&level=warning&since=1970-01-01T00:00:01Z&lines=3"
    found = asked(cluster, "GET", "/admin/logs", query=query)["data"]
    assert [one["line"] for one in found] == ["INFO two", "INFO three", "INFO four"]
    assert found[2] == {
        "time": "1970-01-01T00:00:04.500+00:00",
        "source": "router",
        "replica": "r1",
        "path": "/a",
        "line": "INFO four",
    }
    assert cluster.asked == [("logs", LogFilter("engine-org--m", "x", "5d0c6f0e9c7b", "WARNING", 1.0), 3)]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("level=loud", "level"),
        ("since=2027-01-31T00:00:00", "since"),
        ("since=soon", "since"),
        ("lines=0", "lines"),
        ("lines=10001", "lines"),
        ("request=cmpl-1", "request"),
        ("tenant=a", "tenant"),
    ],
)
def test_a_wrong_parameter_of_logs_is_named(query: str, field: str) -> None:
    with pytest.raises(BadRequest) as refused:
        asked(ScriptedCluster(), "GET", "/admin/logs", query=query)
    assert refused.value.param == field


def test_what_nobody_knows_cannot_be_drained() -> None:
    with pytest.raises(NotFound, match="no replica or node"):
        asked(ScriptedCluster(), "POST", "/admin/drains", {"name": "zz"})
    with pytest.raises(NotFound) as refused:
        asked(ScriptedCluster(known=False), "POST", "/admin/drains", {"name": "x7k2"})
    assert refused.value.code == "replica_not_found"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"name": ""}, "name"),
        ({"within_s": 1}, "name"),
        ({"name": "x", "within_s": -1}, "within_s"),
        ({"name": "x", "within_s": 1e9}, "within_s"),
        ({"name": "x", "force": True}, "force"),
    ],
)
def test_a_wrong_field_is_named(body: dict[str, Any], field: str) -> None:
    cluster = ScriptedCluster()
    with pytest.raises(BadRequest) as refused:
        asked(cluster, "POST", "/admin/drains", body)
    assert (refused.value.param, cluster.asked) == (field, [])


@pytest.mark.parametrize(("method", "path"), ASKS)
def test_a_head_is_answered_where_a_get_is_and_nothing_else(method: str, path: str) -> None:
    if method == "GET":
        assert routes.resolve("HEAD", path) == routes.resolve("GET", path)
    with pytest.raises(MethodNotAllowed):
        routes.resolve("PUT", path)


def test_however_many_ask_at_once_the_cluster_is_asked_once_a_moment() -> None:
    began = 0
    gate = asyncio.Event()

    async def question() -> int:
        nonlocal began
        began += 1
        await gate.wait()
        if began == 2:
            raise TimeoutError
        return began

    async def scenario() -> None:
        shared = SharedAnswer(question, 0.01)
        asking = [asyncio.create_task(shared.get()) for _ in range(5)]
        await asyncio.sleep(0)
        asking.pop().cancel()  # whoever leaves takes nothing from the others
        gate.set()
        assert await asyncio.gather(*asking) == [1] * 4
        assert await shared.get() == 1
        await asyncio.sleep(0.02)  # bound: `fresh_s`
        with pytest.raises(TimeoutError):
            await shared.get()
        assert await shared.get() == 3, "a failure is nobody's answer but theirs who waited"

    asyncio.run(scenario())


def test_the_state_is_asked_of_serve_in_a_thread_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def state(models: Any, within_s: float) -> dict[str, Any]:
        given.append((models, within_s))
        return {"state": "running"}

    monkeypatch.setattr(application, "application_status", state)

    async def call_quota(method: str, *arguments: Any) -> Any:
        raise AssertionError(method)

    assert asyncio.run(RayCalls(call_quota).state()) == {"state": "running"}
    assert given == [((), application.ANSWER_S)]
