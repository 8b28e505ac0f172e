"""Which deployments a deploy waits for, and until when, by Serve's answers before and after it was declared."""

from __future__ import annotations

from typing import Any

from autoscaling.rollout import progress as rollout
from autoscaling.rollout.progress import Rollout, RolloutState
from serve_app.names import APPLICATION, ROUTER
from serve_app.settings import application, parse

A = "engine-a"
B = "engine-b"
OLD = "0.1.0"
SCALED = {"min_replicas": 1, "max_replicas": 4}


def entry(a: dict[str, Any] | None = None, b: dict[str, Any] | None = None) -> dict[str, Any]:
    models = [{"name": "a", **(a or {})}, {"name": "b", **(b or {})}]
    return application(parse({"models": models}))


def deployment(name: str, *replicas: str, status: str = "HEALTHY", **more: Any) -> dict[str, Any]:
    """Serve's details of a deployment. Replicas: `r1` runs, `r1 STARTING` is in this state."""
    parts = [one.partition(" ") for one in replicas]
    made = [{"replica_id": replica, "state": state or "RUNNING"} for replica, _, state in parts]
    given = {"status_trigger": "CONFIG_UPDATE_STARTED", "target_num_replicas": len(made), "scaling": None} | more
    config = {"autoscaling_config": given.pop("scaling")}
    return {"name": name, "status": status, "replicas": made, "deployment_config": config, **given}


ROUTERS = deployment(ROUTER, "router", scaling={"min_replicas": 1, "max_replicas": 1})


def details(*deployments: dict[str, Any], declared: dict[str, Any] | None = None, proxy: str = "HEALTHY") -> Any:
    found = {one["name"]: one for one in (*deployments, ROUTERS)}
    application = {"deployments": found, "deployed_app_config": declared}
    return {"applications": {APPLICATION: application}, "proxies": {"n": {"status": proxy}}}


def begun(before: Any, after: dict[str, Any]) -> Rollout:
    return rollout.begun(after, before, on_cpu=True)


BEFORE = details(deployment(A, "a1", "a2"), deployment(B, "b1"), declared=entry())
RESTART_A = entry(a={"generation": 1})


def test_the_replicas_of_a_restarted_deployment_are_waited_for_until_they_have_ended() -> None:
    rolling = begun(BEFORE, RESTART_A)
    assert rolling == Rollout(frozenset(), {A: frozenset({"a1", "a2"})})
    b = deployment(B, "b1")

    def waits(*replicas: str, status: str, **more: Any) -> dict[str, str]:
        return dict(rollout.state_of(rolling, details(deployment(A, *replicas, status=status, **more), b)).waits)

    assert waits("a1", "a2", "a3 STARTING", status="UPDATING") == {A: "updating"}
    assert waits("a3", "a2", status="UPSCALING", status_trigger="AUTOSCALING") == {A: "upscaling"}
    assert waits("a3", "a4", "a2 STOPPING", status="UPDATING") == {A: "updating"}
    assert waits("a3", "a4", status="HEALTHY") == {}


def test_a_replica_that_only_the_load_wants_is_not_waited_for() -> None:
    """Under a load without end, and without room for it, Serve never calls the deployment updated."""
    rolling = begun(BEFORE, RESTART_A)
    found = deployment(A, "a3", "a4 STARTING", status="UPDATING", scaling=SCALED)
    assert rollout.state_of(rolling, details(found, deployment(B, "b1"))) == RolloutState({}, {A: "1 of 2"})


def test_the_least_number_of_replicas_is_waited_for() -> None:
    rolling = begun(BEFORE, RESTART_A)

    def waits(scaling: dict[str, Any] | None, *replicas: str, status: str = "UPDATING") -> dict[str, str]:
        found = deployment(A, *replicas, status=status, scaling=scaling)
        return dict(rollout.state_of(rolling, details(found, deployment(B, "b1"))).waits)

    assert waits(SCALED | {"min_replicas": 2}, "a3", "a4 STARTING", "a5 STARTING") == {A: "updating"}
    assert waits(SCALED | {"initial_replicas": 2}, "a3", "a4 STARTING", "a5 STARTING") == {A: "updating"}
    assert waits(SCALED | {"min_replicas": 0}, "a3 STARTING", "a4 STARTING") == {A: "updating"}, "one must have started"
    assert waits(None, "a3", "a4 STARTING") == {A: "updating"}, "a fixed number"
    assert waits(SCALED, "a3", status="UPDATING") == {A: "updating"}, "Serve has not taken over all settings"
    assert waits(SCALED, "a3", "a4 STARTING", status="DEPLOY_FAILED") == {A: "deploy_failed"}


def test_a_deployment_that_fails_ends_the_wait() -> None:
    rolling = begun(BEFORE, RESTART_A)
    seen = rollout.state_of(rolling, details(deployment(A, "a1", "a2", status="DEPLOY_FAILED"), deployment(B, "b1")))
    assert seen.failed
    assert not rollout.state_of(rolling, BEFORE).failed


def test_what_was_not_ready_and_does_not_change_is_not_waited_for() -> None:
    before = details(deployment(A, "a1"), deployment(B, "b1 STARTING", status="UPDATING"), declared=entry())
    rolling = begun(before, RESTART_A)
    assert rolling.others == {B}
    done = details(deployment(A, "a2"), deployment(B, "b1 STARTING", status="UPDATING"))
    assert rollout.state_of(rolling, done) == RolloutState({}, {})
    nothing = begun(before, entry())
    assert rollout.state_of(nothing, before).waits == {B: "updating"}, "a deploy that changes nothing waits for all"


def test_a_change_without_a_restart_replaces_no_replica() -> None:
    rolling = begun(BEFORE, entry(a={"drain_s": 5}))
    assert rolling.outdated == {}
    waiting = details(deployment(A, "a1", "a2 UPDATING", status="UPDATING"), deployment(B, "b1"))
    assert rollout.state_of(rolling, waiting).waits == {A: "updating"}


def test_another_release_replaces_every_replica_and_the_endpoint_is_waited_for() -> None:
    other = entry()
    other["args"]["release"] = OLD
    rolling = begun(details(deployment(A, "a1"), deployment(B, "b1"), declared=other), entry())
    assert rolling.outdated == {A: {"a1"}, B: {"b1"}, ROUTER: {"router"}}
    later = details(deployment(A, "a2"), deployment(B, "b2"), proxy="STARTING")
    assert rollout.state_of(rolling, later).waits == {ROUTER: "healthy", "endpoint": "starting"}


def test_the_first_deploy_waits_for_all() -> None:
    nothing: Any = {"applications": {}, "proxies": {}}
    rolling = begun(nothing, entry())
    assert rolling == Rollout(frozenset(), {})
    starting = details(deployment(A, "a1 STARTING", status="UPDATING"), deployment(B, "b1"))
    assert rollout.state_of(rolling, starting).waits == {A: "updating"}
