"""Deployments by HTTP: who may, what is asked of the cluster, and what becomes of one whose client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from autoscaling.rollout import DeployOrder
from serve_app.errors import BadRequest, ConfigError, DeployConflict, Forbidden, NotFound, Unavailable
from serve_app.http.api import routes
from serve_app.http.api.deploy_routes import DeployCalls, DeployRoutes
from serve_app.types import Identity, RequestClass
from tests.fakes.cluster_calls import NoCluster, ScriptedCluster
from tests.fakes.router import SOON_S

GIVEN = {"models": [{"name": "a"}]}
BODY = {"configuration": GIVEN}


def identity(*, deploy: bool = True, admin: bool = False, metrics: bool = False) -> Identity:
    normal = RequestClass.NORMAL
    models = frozenset[str]() if metrics and not admin else None
    return Identity("ci", normal, normal, admin=admin, metrics=metrics, key_id="key_1", models=models, deploy=deploy)


async def answer(
    cluster: DeployCalls,
    method: str = "POST",
    path: str = "/admin/deploys",
    body: Mapping[str, Any] = BODY,
    by: Identity | None = None,
) -> tuple[int, Any]:
    by = by or identity()

    async def read() -> tuple[Mapping[str, Any], bytes]:
        assert by.deploy, "the body of a key that may not deploy is not read"
        return body, b""

    route = routes.permitted(routes.resolve(method, path), by)
    status, _, found = await DeployRoutes(cluster).answer(route, by, read)
    return status, json.loads(found)


def asked(*arguments: Any, **named: Any) -> tuple[int, Any]:
    return asyncio.run(answer(*arguments, **named))


@pytest.mark.parametrize("by", [identity(deploy=False), identity(deploy=False, admin=True)])
def test_a_key_without_the_right_deploys_nothing_an_operator_s_neither(by: Identity) -> None:
    cluster = ScriptedCluster()
    for body in (BODY, BODY | {"plan_only": True}):
        with pytest.raises(Forbidden, match=r"auth\.keys") as refused:
            asked(cluster, body=body, by=by)
        assert refused.value.code == "no_deploy_right"
    assert cluster.asked == []


def test_an_operator_looks_and_others_do_not() -> None:
    cluster = ScriptedCluster(deployment={"id": "deploy_1", "state": "waiting"})
    operator = identity(deploy=False, admin=True)
    assert asked(cluster, "GET", "/admin/deploys", by=operator)[1]["data"] == [cluster.deployment]
    for path in ("/admin/deploys", "/admin/deploys/deploy_1"):
        with pytest.raises(Forbidden):
            asked(cluster, "GET", path, by=identity(deploy=False))


def test_a_scraper_s_key_that_may_deploy_does() -> None:
    assert asked(ScriptedCluster(), by=identity(metrics=True))[0] == 202


def test_a_deployment_is_begun_as_the_key_s_and_looked_at() -> None:
    cluster = ScriptedCluster()
    status, begun = asked(cluster, body=BODY | {"roll_back": False, "timeout_s": 60.0})
    assert (status, begun["state"]) == (202, "declaring")
    ((_, order),) = cluster.asked
    assert order == DeployOrder(begun["id"], GIVEN, "key_1", "ci", roll_back=False, timeout_s=60.0)
    assert asked(cluster, "GET", f"/admin/deploys/{begun['id']}") == (200, begun)
    assert asked(cluster, "GET", "/admin/deploys")[1]["data"] == [begun]


def test_a_plan_begins_nothing() -> None:
    cluster = ScriptedCluster()
    status, plan = asked(cluster, body=BODY | {"plan_only": True})
    assert (status, plan["object"], plan["changes"]) == (200, "deployment_plan", [])
    assert cluster.asked == [("plan", GIVEN, "ci")]


def test_another_deployment_or_none_is_not_found() -> None:
    for cluster in (ScriptedCluster(), ScriptedCluster(deployment={"id": "deploy_2"})):
        with pytest.raises(NotFound, match="deploy_1"):
            asked(cluster, "GET", "/admin/deploys/deploy_1")
    assert asked(ScriptedCluster(), "GET", "/admin/deploys")[1]["data"] == []


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "configuration"),
        ({"configuration": "models: []"}, "configuration"),
        (BODY | {"wait": True}, "wait"),
        (BODY | {"timeout_s": 1e9}, "timeout_s"),
        (BODY | {"plan_only": "yes"}, "plan_only"),
        (BODY | {"import_path": "os:system"}, "import_path"),
    ],
)
def test_a_wrong_field_is_named(body: dict[str, Any], field: str) -> None:
    cluster = ScriptedCluster()
    with pytest.raises(BadRequest) as refused:
        asked(cluster, body=body)
    assert refused.value.param == field
    assert cluster.asked == []


def test_a_wrong_configuration_is_the_client_s_error_and_a_conflict_is_one() -> None:
    class Refusing(ScriptedCluster):
        error: Exception = ConfigError("models.0.path: wrong", param="models.0.path")

        async def begin_deploy(self, order: DeployOrder) -> dict[str, Any]:
            raise self.error

    with pytest.raises(BadRequest, match=r"models\.0\.path") as refused:
        asked(Refusing())
    assert (refused.value.status, refused.value.param) == (400, "models.0.path")
    busy = Refusing()
    busy.error = DeployConflict("another deployment is under way", retry_after_s=10.0)
    with pytest.raises(DeployConflict) as conflict:
        asked(busy)
    assert conflict.value.status == 409


def test_while_the_cluster_is_away_it_says_so() -> None:
    for method, body in (("POST", BODY), ("POST", BODY | {"plan_only": True}), ("GET", BODY)):
        with pytest.raises(Unavailable) as refused:
            asked(NoCluster(), method, body=body)
        assert (refused.value.status, refused.value.code) == (503, "no_controller")


def test_a_deployment_whose_client_leaves_begins_all_the_same() -> None:
    async def leave() -> ScriptedCluster:
        cluster = ScriptedCluster()
        cluster.may_begin.clear()
        client = asyncio.create_task(answer(cluster))
        await asyncio.sleep(0)
        client.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client
        assert cluster.asked == []
        cluster.may_begin.set()
        async with asyncio.timeout(SOON_S):
            await cluster.began.wait()
        return cluster

    cluster = asyncio.run(leave())
    assert [one[0] for one in cluster.asked] == ["deploy"]
