"""Replicas without a place in Ray: they are counted while they start, and ended once Serve stops them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID, ReplicaState
from ray.serve._private.deployment_state import DeploymentState, DeploymentTargetState, ReplicaStateContainer
from ray.serve.schema import ReplicaDetails

from autoscaling.policies.ongoing_requests import PLACE_S
from autoscaling.ray_policy import ScalingPolicy
from autoscaling.unplaced import ReplicaCounts, UnplacedReplicas, controllers_deployments
from tests.autoscaling.fake_serve import ENGINE, FakeServe

STARTING = ReplicaState.STARTING
STOPPING = ReplicaState.STOPPING


class Replicas:
    """Serve's state of the deployments `engine` of two applications; `replicas`: (state, node) by actor name. Those of
    ours whose name begins with `old` are of a former version."""

    def __init__(self) -> None:
        self.states: dict[str, tuple[ReplicaState, str | None]] = {}
        self.ended: list[str] = []
        self.unplaced = UnplacedReplicas(lambda: self, self.ended.append)
        self._deployment_states = {
            DeploymentID("engine", "ours"): deployment(lambda: self.states),
            DeploymentID("engine", "another"): deployment(lambda: {"other": (STARTING, None)}),
        }

    def counts(self, **replicas: tuple[ReplicaState, str | None]) -> Mapping[str, ReplicaCounts]:
        self.states = replicas
        return self.unplaced.tick({"ours"})

    def tick(self, **replicas: tuple[ReplicaState, str | None]) -> int:
        """How many are unplaced."""
        (engine,) = self.counts(**replicas).values()
        return engine.unplaced


def deployment(replicas: Callable[[], dict[str, tuple[ReplicaState, str | None]]]) -> Any:
    """What is read of Serve's state of a deployment."""

    def count(exclude_version: str, states: list[ReplicaState]) -> int:
        assert exclude_version == "present"
        return sum(name.startswith("old") and state in states for name, (state, _) in replicas().items())

    return SimpleNamespace(
        list_replica_details=lambda: details(replicas()),
        target_num_replicas=2,
        _replicas=SimpleNamespace(count=count),
        _target_state=SimpleNamespace(version="present"),
    )


def details(replicas: dict[str, tuple[ReplicaState, str | None]]) -> list[Any]:
    return [
        SimpleNamespace(actor_name=name, replica_id=f"id-{name}", state=state, node_id=node)
        for name, (state, node) in replicas.items()
    ]


def test_starting_replicas_without_a_place_are_counted() -> None:
    replicas = Replicas()
    found = replicas.tick(a=(STARTING, None), b=(STARTING, "n"), c=(ReplicaState.RECOVERING, None))
    assert found == 1
    assert replicas.ended == []


def test_replicas_that_start_with_a_place_are_named() -> None:
    found = Replicas().counts(
        a=(STARTING, None), b=(STARTING, "n"), c=(ReplicaState.RUNNING, "n"), d=(STOPPING, "n"), e=(STARTING, "n")
    )
    (engine,) = found.values()
    assert engine.starting == {"id-b", "id-e"}


def test_one_that_serve_stops_is_ended_until_it_is_gone() -> None:
    replicas = Replicas()
    replicas.tick(a=(STARTING, None), b=(STARTING, None))
    assert replicas.tick(a=(STOPPING, None), b=(STARTING, None)) == 1
    replicas.tick(a=(STOPPING, None))
    replicas.tick()
    replicas.tick(a=(STOPPING, None))
    assert replicas.ended == ["a", "a"]


def test_running_replicas_that_have_to_be_replaced_and_ending_ones_are_counted() -> None:
    running = (ReplicaState.RUNNING, "n")
    stopping = (STOPPING, "n")
    found = Replicas().counts(old1=running, old2=running, old3=stopping, new=running, newer=(STARTING, None))
    ids = frozenset({"id-old1", "id-old2", "id-new"})
    assert found == {"engine": ReplicaCounts(unplaced=1, outdated=2, stopping=1, running=ids, target=2)}


def test_a_replica_that_is_given_other_settings_runs() -> None:
    states = {one.name.lower(): (one, "n") for one in ReplicaState}
    (engine,) = Replicas().counts(**states).values()
    assert engine.running == {"id-running", "id-updating", "id-pending_migration"}


def test_without_room_the_policy_lets_a_change_of_settings_come_before_more_replicas() -> None:
    counts = {ENGINE: ReplicaCounts(unplaced=1, outdated=1)}
    found: Any = SimpleNamespace(tick=lambda applications: counts)
    serve = FakeServe(target=2)
    serve.router_tells("r1", waiting=0, granted=20)
    policy = ScalingPolicy(serve.clock, unplaced=found)
    assert policy(serve.contexts())[0][ENGINE] == 2
    serve.now += PLACE_S
    serve.router_tells("r1", waiting=0, granted=20)
    assert policy(serve.contexts())[0][ENGINE] == 1
    counts[ENGINE] = ReplicaCounts()
    assert policy(serve.contexts())[0][ENGINE] == 2


def test_serves_own_state_is_read_as_expected() -> None:
    """Private in Ray: the names that are read, in the installed Serve."""
    source = inspect.getsource(DeploymentState)
    assert "self._replicas: ReplicaStateContainer" in source
    assert "self._target_state" in source
    assert {"exclude_version", "states"} <= inspect.signature(ReplicaStateContainer.count).parameters.keys()
    assert "version" in DeploymentTargetState.__annotations__
    assert list(inspect.signature(DeploymentState.list_replica_details).parameters) == ["self"]
    assert isinstance(inspect.getattr_static(DeploymentState, "target_num_replicas"), property)
    assert {"replica_id", "state", "actor_name", "node_id"} <= ReplicaDetails.model_fields.keys()


def test_no_replica_is_ended_that_may_have_requests() -> None:
    """After a restart of the controller Serve does not know the nodes of replicas that run."""
    replicas = Replicas()
    replicas.tick(a=(ReplicaState.RECOVERING, None), b=(STARTING, None), c=(STARTING, None))
    replicas.tick(a=(STOPPING, None), b=(STOPPING, "n"), c=(ReplicaState.RUNNING, "n"))
    replicas.tick(c=(STOPPING, None))
    assert replicas.ended == []


def test_a_serve_that_is_not_as_expected_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    strange = UnplacedReplicas(lambda: SimpleNamespace())
    with caplog.at_level(logging.ERROR, "ray.serve"):
        assert [strange.tick({"ours"}), strange.tick({"ours"})] == [{}, {}]
    assert len(caplog.records) == 1


def test_outside_the_controller_there_is_nothing_to_count() -> None:
    assert controllers_deployments() is None
    assert UnplacedReplicas().tick({"ours"}) == {}
