"""Our question before Serve's scheduler starts a replica.

The scheduler is a fake of the parts we use, in one test it is Serve's own; the ledger is one that answers at once, and
the thread that asks it is real: waits are bounded by SOON_S.
"""

from __future__ import annotations

import inspect
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.deployment_scheduler import (
    AvailableNodeResources,
    DeploymentScheduler,
    ReplicaSchedulingRequest,
    RequestedResources,
)

from autoscaling import placement_hook as module
from autoscaling.placement_hook import NODE_LABEL, PARAMETERS, StartPlacer, install_hook
from autoscaling.policies import ScaleUpLimit
from serve_app.core.memory import StartsReply, StartsRequest

APP = "serve_app"
M = "engine-m"
DEPLOYMENT = DeploymentID(M, APP)
SOON_S = 10.0  # for an answer of a fake, on a loaded machine


class Scheduler:
    """The parts of Serve's scheduler that we use, on two nodes."""

    def __init__(self) -> None:
        self.rooms = {node: AvailableNodeResources({"GPU": 1.0, "CPU": 4.0}) for node in ("a", "b")}
        self._pending_replicas: dict[Any, dict[Any, Any]] = {}
        self._launching_replicas: dict[Any, dict[Any, Any]] = {}
        self._deployments: dict[Any, Any] = {}
        self.calls: list[dict[str, Any]] = []

    def _get_available_resources_per_node(self) -> dict[str, AvailableNodeResources]:
        return self.rooms

    def _schedule_replica(
        self,
        scheduling_request: Any,
        default_scheduling_strategy: str,
        target_node_id: str | None = None,
        target_labels: Any = None,
    ) -> bool:
        request = scheduling_request
        self.calls.append(
            {
                "selector": request.placement_group_bundle_label_selector,
                "pinned": request.target_node_id,
                "target": target_node_id,
            }
        )
        self._launching_replicas.setdefault(DEPLOYMENT, {})[request.replica_id] = None
        return True


class Actor:
    """The quota actor's answers."""

    def __init__(self) -> None:
        self.reply = StartsReply({"r": "b"}, reserved_replicas=1, why="full")
        self.fails = False
        self.asked = threading.Event()

    def __call__(self, asks: tuple[StartsRequest, ...]) -> tuple[StartsReply, ...]:
        self.asked.set()
        if self.fails:
            raise ConnectionError("away")
        return tuple(self.reply for _ in asks)


def request(gpus: float = 0.25, bundles: bool = True, replica: str = "r") -> ReplicaSchedulingRequest:
    asked = {"GPU": gpus, "CPU": 1.0}
    return ReplicaSchedulingRequest(
        replica_id=ReplicaID(replica, DEPLOYMENT),
        actor_def=None,  # type: ignore[arg-type]
        actor_resources=asked,
        actor_options={"name": replica},
        actor_init_args=(),
        on_scheduled=lambda *args, **kwargs: None,
        placement_group_bundles=[asked] if bundles else None,
        placement_group_strategy="STRICT_PACK" if bundles else None,
    )


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


@pytest.fixture
def actor() -> Actor:
    return Actor()


@pytest.fixture
def placing(scheduler: Scheduler, actor: Actor, monkeypatch: pytest.MonkeyPatch) -> StartPlacer:
    monkeypatch.setattr(module, "START_ASK_S", 0.01)
    monkeypatch.setattr(module, "controllers_scheduler", lambda: scheduler)
    monkeypatch.setattr(module, "give_up_bundles", lambda replica: None)
    made = StartPlacer(APP, {M: ("m", 60)}, actor)
    made.tick()
    return made


def start(scheduler: Scheduler, wanted: ReplicaSchedulingRequest) -> None:
    """Hand a request over again and again, as Serve's loop does, until it is placed."""
    scheduler._pending_replicas.setdefault(DEPLOYMENT, {})[wanted.replica_id] = wanted
    turn = threading.Event()
    for _ in range(int(SOON_S / 0.01)):
        if scheduler._schedule_replica(wanted, "SPREAD"):
            return
        turn.wait(0.01)
    raise AssertionError("not placed")


def test_a_share_is_tied_to_the_node_that_the_ledger_says(scheduler: Scheduler, placing: StartPlacer) -> None:
    wanted = request()
    assert not scheduler._schedule_replica(wanted, "SPREAD"), "the loop does not wait for the answer"
    assert scheduler.calls == []
    start(scheduler, wanted)
    assert scheduler.calls == [{"selector": [{NODE_LABEL: "b"}], "pinned": None, "target": "b"}]
    assert wanted.placement_group_bundle_label_selector is None, "the request is as it was"


def test_a_replica_without_bundles_is_tied_by_affinity(scheduler: Scheduler, placing: StartPlacer) -> None:
    wanted = request(gpus=0, bundles=False)
    start(scheduler, wanted)
    assert scheduler.calls == [{"selector": None, "pinned": "b", "target": "b"}]
    assert wanted.target_node_id is None


def test_whole_gpus_are_placed_by_ray_at_once(scheduler: Scheduler, placing: StartPlacer, actor: Actor) -> None:
    assert scheduler._schedule_replica(request(gpus=1.0), "SPREAD")
    assert scheduler.calls == [{"selector": None, "pinned": None, "target": None}]
    assert not actor.asked.is_set()


def test_another_application_is_left_alone(scheduler: Scheduler, placing: StartPlacer) -> None:
    wanted = request()
    wanted.replica_id = ReplicaID("r", DeploymentID(M, "other"))
    assert scheduler._schedule_replica(wanted, "SPREAD")


def test_while_the_actor_is_away_ray_places_in_the_end(
    scheduler: Scheduler, actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "START_ASK_S", 0.01)
    monkeypatch.setattr(module, "controllers_scheduler", lambda: scheduler)
    actor.fails = True
    now = [0.0]
    placing = StartPlacer(APP, {M: ("m", 60)}, actor, clock=lambda: now[0])
    placing.tick()
    assert not scheduler._schedule_replica(request(), "SPREAD")
    assert actor.asked.wait(SOON_S)
    now[0] = 11.0
    assert scheduler._schedule_replica(request(), "SPREAD")
    assert scheduler.calls[0]["selector"] is None


def test_a_newer_policy_of_the_application_takes_the_place_of_the_older(
    scheduler: Scheduler, placing: StartPlacer, actor: Actor
) -> None:
    newer = StartPlacer(APP, {}, actor)
    newer.tick()
    assert scheduler._schedule_replica(request(), "SPREAD"), "it manages nothing"
    assert len(scheduler.calls) == 1, "and there is one question, not two"


def test_the_policy_is_given_what_is_kept_beyond_its_target(
    scheduler: Scheduler, placing: StartPlacer, actor: Actor
) -> None:
    class Info:
        required_resources = RequestedResources({"GPU": 0.25, "CPU": 1.0})

    scheduler._deployments[DEPLOYMENT] = Info
    placing.tick()
    room = placing.scale_up_limit(DEPLOYMENT, 1, 2)
    turn = threading.Event()
    for _ in range(int(SOON_S / 0.01)):
        if room is not None and room.replicas:
            break
        turn.wait(0.01)
        placing.tick()
        room = placing.scale_up_limit(DEPLOYMENT, 1, 2)
    assert room == ScaleUpLimit(1, "full")
    assert placing.scale_up_limit(DeploymentID("Router", APP), 1, 2) is None
    scheduler.rooms.clear()
    assert placing.scale_up_limit(DEPLOYMENT, 1, 2) is None, "Ray's pending bundle asks for a node"


def deployed(gpus: float, bundles: int = 1, strategy: str = "STRICT_PACK") -> Any:
    """What Serve's scheduler knows of a deployment."""
    each = {"GPU": gpus, "CPU": 1.0}
    return SimpleNamespace(
        required_resources=RequestedResources(each),
        placement_group_bundles=[each] * bundles,
        placement_group_strategy=strategy,
    )


def test_room_is_what_fits_into_the_free_resources_of_ray(scheduler: Scheduler, placing: StartPlacer) -> None:
    assert placing.room(DEPLOYMENT, 1) is None, "Serve does not know it yet"
    scheduler._deployments[DEPLOYMENT] = deployed(1.0)
    assert placing.room(DEPLOYMENT, 1) == 2
    scheduler._deployments[DEPLOYMENT] = deployed(2.0)
    assert placing.room(DEPLOYMENT, 1) == 0
    scheduler._deployments[DEPLOYMENT] = deployed(1.0, bundles=2, strategy="PACK")
    assert placing.room(DEPLOYMENT, 1) is None, "over several nodes Ray alone knows"


def test_room_in_a_shared_gpu_is_the_ledgers_last_answer_and_asks_nobody(
    scheduler: Scheduler, placing: StartPlacer, actor: Actor
) -> None:
    scheduler._deployments[DEPLOYMENT] = deployed(0.25)
    assert placing.room(DEPLOYMENT, 1) is None
    placing.tick()
    assert not actor.asked.is_set()
    turn = threading.Event()
    for _ in range(int(SOON_S / 0.01)):
        placing.scale_up_limit(DEPLOYMENT, 1, 2)
        placing.tick()
        if placing.room(DEPLOYMENT, 1) is not None:
            break
        turn.wait(0.01)
    assert placing.room(DEPLOYMENT, 1) == 1
    assert placing.room(DEPLOYMENT, 2) is None, "of another target"


def test_room_that_serve_does_not_show_is_not_known_and_stops_nothing(
    scheduler: Scheduler, placing: StartPlacer, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler._deployments[DEPLOYMENT] = object()
    assert placing.room(DEPLOYMENT, 1) is None
    assert placing.room(DEPLOYMENT, 1) is None
    assert len([record for record in caplog.records if "what is free is not shown" in record.getMessage()]) == 1


def test_a_scheduler_that_is_not_as_expected_is_left_as_it_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, actor: Actor
) -> None:
    class Changed:
        _pending_replicas: dict[Any, Any] = {}
        _launching_replicas: dict[Any, Any] = {}

        def _schedule_replica(self, request: Any) -> bool:
            return True

    changed = Changed()
    monkeypatch.setattr(module, "controllers_scheduler", lambda: changed)
    placing = StartPlacer(APP, {M: ("m", 60)}, actor)
    for _ in range(3):
        placing.tick()
    assert "_schedule_replica" not in vars(changed)
    assert [record.message for record in caplog.records] == [
        f"Serve has an unknown scheduler; Ray alone places {APP}. Install a supported version of Ray"
    ]
    assert placing.scale_up_limit(DEPLOYMENT, 1, 1) is None


def test_serves_own_scheduler_is_as_expected(placing: StartPlacer) -> None:
    assert tuple(inspect.signature(DeploymentScheduler._schedule_replica).parameters)[1:] == PARAMETERS

    class Cache:
        def get_available_resources_per_node(self) -> dict[str, Any]:
            return {"a": {"GPU": 1.0}}

        get_total_resources_per_node = get_available_resources_per_node

        def get_active_node_ids(self) -> set[str]:
            return {"a"}

    real = DeploymentScheduler(Cache(), "head", lambda asked: None)  # type: ignore[arg-type]
    assert module.starting_replicas(real, APP) == set()
    assert module.nodes_with_capacity(real, RequestedResources({"GPU": 0.5})) == ["a"]
    assert module.nodes_with_capacity(real, RequestedResources({"GPU": 2.0})) == []
    install_hook(real, APP, placing)
    assert real._deployments == {}


def test_this_process_is_no_controller() -> None:
    assert module.controllers_scheduler() is None
