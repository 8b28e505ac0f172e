"""What Serve's controller sees of replicas and targets becomes events, each once, and a snapshot where it changes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoscaling.operations import EventFilter
from autoscaling.operations.node_records import NodeRecords
from autoscaling.ray_policy import ScalingPolicy
from autoscaling.scaling_events import SNAPSHOT_S, ScalingEvents
from autoscaling.unplaced import ReplicaCounts
from serve_app.names import RECORDS_FOLDER, ROUTER
from serve_app.system import EventWriter, keep_events
from serve_app.system.events import EventHandler
from tests.autoscaling.fake_serve import FakeServe

logger = logging.getLogger("ray.serve")


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EventWriter]:
    monkeypatch.setenv(RECORDS_FOLDER, str(tmp_path))
    level = logger.level
    logger.setLevel(logging.INFO)  # not by its attribute: a logger remembers which levels it has refused
    made = keep_events(tmp_path, "controller")
    assert made is not None
    yield made
    for handler in [one for one in logger.handlers if isinstance(one, EventHandler)]:
        logger.removeHandler(handler)
    logger.setLevel(level)


def found(writer: EventWriter, folder: Path, **wanted: Any) -> list[dict[str, Any]]:
    """The events, the oldest first."""
    writer.flush()
    return NodeRecords(folder).events(EventFilter(**wanted))[::-1]


def test_replicas_that_come_and_go_are_events_of_their_model(writer: EventWriter, tmp_path: Path) -> None:
    events = ScalingEvents(writer)
    for running, target in (("", 2), ("a", 2), ("ab", 2), ("ab", 2), ("b", 2), ("b", 1), ("", 0)):
        events.on_replicas("engine-chat", running, target)
    for running in ("", "r"):
        events.on_replicas(ROUTER, running, 1)
    assert [
        (one["subject"], one["level"], one["details"]["lost"], one["details"]["new"]) for one in found(writer, tmp_path)
    ] == [
        ("chat", "info", [], ["a"]),
        ("chat", "info", [], ["b"]),
        ("chat", "warning", ["a"], []),
        ("chat", "info", ["b"], []),
        ("router", "info", [], ["r"]),
    ]


def test_a_deployment_that_is_deployed_again_has_lost_nothing(writer: EventWriter, tmp_path: Path) -> None:
    events = ScalingEvents(writer)
    for deployments in ({"engine-chat": ("a", 1)}, {}, {"engine-chat": ("", 1)}, {"engine-chat": ("b", 1)}):
        events.on_deployments(deployments)
    assert [(one["details"]["lost"], one["details"]["new"]) for one in found(writer, tmp_path)] == [([], ["b"])]


def test_a_model_with_a_fixed_number_of_replicas_has_events_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: EventWriter
) -> None:
    """Serve shows its replicas to no scaling policy."""
    monkeypatch.setattr("autoscaling.ray_policy.session_folder", lambda: tmp_path)
    counts = {"engine-fixed": ReplicaCounts(running=frozenset("ab"), target=2)}
    seen: Any = SimpleNamespace(tick=lambda applications: counts)
    serve = FakeServe()
    policy = ScalingPolicy(serve.clock, unplaced=seen)
    policy(serve.contexts())
    counts["engine-fixed"] = ReplicaCounts(running=frozenset("a"), target=2)
    policy(serve.contexts())
    (lost,) = [one for one in found(writer, tmp_path) if one["subject"] == "fixed"]
    assert (lost["level"], lost["details"]) == ("warning", {"lost": ["b"], "new": [], "running": 1, "target": 2})


def test_a_changed_target_is_a_scaling_event_with_its_reason(writer: EventWriter, tmp_path: Path) -> None:
    ScalingEvents(writer).on_target("engine-chat", 1, 2, "load of 9 requests")
    (scaling,) = found(writer, tmp_path, kinds=("scaling",))
    assert scaling["message"] == "Deployment engine-chat changed its target from 1 to 2 replicas: load of 9 requests"
    details = {"before": 1, "target": 2, "reason": "load of 9 requests"}
    assert (scaling["subject"], scaling["details"]) == ("chat", details)


def test_a_snapshot_is_written_each_minute_in_which_something_changed(writer: EventWriter, tmp_path: Path) -> None:
    events = ScalingEvents(writer)
    for number, waiting in enumerate((1, 2, 2, 2, 3)):
        events.snapshot({"engine-chat": {"waiting": waiting}}, number * SNAPSHOT_S / 2, 1000.0 + number)
    shown = found(writer, tmp_path, kinds=("snapshot",))
    assert [(one["at"], one["details"]) for one in shown] == [
        (1000.0, {"waiting": 1}),
        (1002.0, {"waiting": 2}),
        (1004.0, {"waiting": 3}),
    ]
    assert found(writer, tmp_path) == []


def test_a_process_keeps_its_events_once_and_one_without_a_node_keeps_none(writer: EventWriter, tmp_path: Path) -> None:
    assert keep_events(tmp_path, "controller") is writer
    assert keep_events(None, "driver") is None
    ScalingEvents().on_target("engine-chat", 1, 2, "load")
    assert len(found(writer, tmp_path)) == 1
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())["source"] == "controller"
