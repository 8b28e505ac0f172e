"""Who else is in the cluster: Serve's other applications, and whoever holds CPUs and GPUs."""

from __future__ import annotations

from typing import Any

from ray.core.generated.gcs_pb2 import ActorTableData  # type: ignore[attr-defined]

from autoscaling.operations.holders import other_applications, usage


def group(name: str, *bundles: dict[str, float], state: str = "CREATED") -> dict[str, Any]:
    return {"placement_group_id": "p1", "name": name, "bundles": dict(enumerate(bundles)), "state": state}


def actor(name: str, class_name: str = "Trainer", **resources: float) -> ActorTableData:
    job = bytes.fromhex("0a000000")
    found = {"name": name, "class_name": class_name, "ray_namespace": "theirs", "job_id": job}
    return ActorTableData(**found, required_resources=resources)


def owners(found: dict[str, Any]) -> list[tuple[str, str, float, float]]:
    return [(one["kind"], one["owner"], one["CPU"], one["GPU"]) for one in found["holders"]]


def test_whoever_holds_is_named_and_those_with_gpus_come_first() -> None:
    found = usage(
        [actor("", GPU=1.0, CPU=1.0), actor("SERVE_REPLICA::their-app#Worker#a1b2", CPU=0.5)],
        [
            group("SERVE_REPLICA::serve_app#engine-m#x1", {"CPU": 1.0, "GPU": 2.0}),
            group("SERVE_REPLICA::serve_app#engine-m#x2", {"CPU": 1.0}, {"CPU": 1.0}),
            group("", {"CPU": 2.0}),
        ],
        {"CPU": 8.0, "GPU": 4.0},
        {"CPU": 0.5, "GPU": 1.0},
    )
    assert found["resources"] == {"CPU": {"used": 7.5, "total": 8.0}, "GPU": {"used": 3.0, "total": 4.0}}
    assert owners(found) == [
        ("ours", "engine-m", 3.0, 2.0),
        ("actor", "Trainer (job 0a000000, namespace theirs)", 1.0, 1.0),
        ("placement group", "p1", 2.0, 0.0),
        ("tasks", "tasks", 1.0, 0.0),
        ("other application", "their-app, Worker", 0.5, 0.0),
    ]


def test_a_group_that_waits_or_has_ended_and_an_actor_without_cpus_hold_nothing() -> None:
    waiting = group("a", {"CPU": 1.0}, state="PENDING")
    gone = group("b", {"CPU": 1.0}, state="REMOVED")
    found = usage([actor("c", memory=5.0)], [waiting, gone], {"CPU": 2.0}, {"CPU": 2.0})
    assert found == {"resources": {"CPU": {"used": 0, "total": 2.0}, "GPU": {"used": 0, "total": 0}}, "holders": []}


def test_serves_other_applications_are_listed_and_ours_is_not() -> None:
    details = {
        "applications": {
            "serve_app": {"status": "RUNNING", "route_prefix": "/"},
            "theirs": {"status": "DEPLOYING", "route_prefix": None},
        }
    }
    assert other_applications(details) == [{"name": "theirs", "state": "deploying", "route": ""}]
