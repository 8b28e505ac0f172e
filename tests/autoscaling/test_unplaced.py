"""Replicas without a place in Ray: they are counted while they start, and ended once Serve stops them."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID, ReplicaState

from autoscaling.unplaced import UnplacedReplicas, controllers_deployments

STARTING, STOPPING = ReplicaState.STARTING, ReplicaState.STOPPING


class Replicas:
    """Serve's state of the deployments `engine` of two applications; `replicas`: (state, node) by actor name."""

    def __init__(self) -> None:
        self.mine: dict[str, tuple[ReplicaState, str | None]] = {}
        self.ended: list[str] = []
        self.unplaced = UnplacedReplicas(lambda: self, self.ended.append)
        others = {"other": (STARTING, None)}
        self._deployment_states = {
            DeploymentID("engine", "ours"): SimpleNamespace(list_replica_details=lambda: details(self.mine)),
            DeploymentID("engine", "another"): SimpleNamespace(list_replica_details=lambda: details(others)),
        }

    def tick(self, **replicas: tuple[ReplicaState, str | None]) -> dict[str, int]:
        self.mine = replicas
        return dict(self.unplaced.tick({"ours"}))


def details(replicas: dict[str, tuple[ReplicaState, str | None]]) -> list[Any]:
    return [SimpleNamespace(actor_name=name, state=state, node_id=node) for name, (state, node) in replicas.items()]


def test_starting_replicas_without_a_place_are_counted() -> None:
    replicas = Replicas()
    found = replicas.tick(a=(STARTING, None), b=(STARTING, "n"), c=(ReplicaState.RECOVERING, None))
    assert found == {"engine": 1}
    assert replicas.ended == []


def test_one_that_serve_stops_is_ended_until_it_is_gone() -> None:
    replicas = Replicas()
    replicas.tick(a=(STARTING, None), b=(STARTING, None))
    assert replicas.tick(a=(STOPPING, None), b=(STARTING, None)) == {"engine": 1}
    replicas.tick(a=(STOPPING, None))
    replicas.tick()
    replicas.tick(a=(STOPPING, None))
    assert replicas.ended == ["a", "a"]


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
