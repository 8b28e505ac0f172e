"""Decisions that were recorded come out again, from the simulator's runs as from a cluster's."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autoscaling.policies import POLICIES, Decision, Signals
from autoscaling.recorded_decisions import MOST_TIMES, DecisionRecorder, lines_of, replayed
from autoscaling.simulator import ScalingPlan, Simulation, SyntheticLoad
from serve_app.errors import BadRequest
from tests.autoscaling.simulator.worlds import MODEL, world


class Recorded:
    """A policy, with a recorder."""

    def __init__(self, name: str, lines: list[bytes]) -> None:
        self._policy = POLICIES[name]()
        self.has_own_delays = self._policy.has_own_delays
        self.recorder = DecisionRecorder("engine-m", name, lambda line: lines.append(msgspec.json.encode(line)))

    def decide(self, signals: Signals) -> Decision:
        decision = self._policy.decide(signals)
        self.recorder.add(signals, decision)
        return decision


@cache
def recorded(name: str) -> tuple[tuple[bytes, ...], int]:
    """The lines of simulated minutes, and how many decisions they had."""
    lines: list[bytes] = []
    policy = Recorded(name, lines)
    load = SyntheticLoad(MODEL, 2.0, 300.0, seed=3)
    Simulation(
        world(ScalingPlan(1, 8, target_ongoing=3.0)), load.requests(), lambda end: None, lambda plan: policy
    ).run()
    policy.recorder.flush()
    return tuple(lines), sum(len(json.loads(line)["times"]) for line in lines)


@pytest.mark.parametrize("name", POLICIES)
def test_every_decision_comes_out_again(name: str) -> None:
    lines, decisions = recorded(name)
    (found,) = replayed(lines)
    assert (found.policy, found.decisions, found.differing) == (name, decisions, 0)
    assert decisions > 500
    assert len({json.loads(line)["replicas"] for line in lines}) > 1, "nothing was decided"


def test_a_changed_decision_is_found_with_its_time() -> None:
    known, decisions = recorded("ongoing")
    lines = list(known)
    changed = json.loads(lines[5])
    lines[5] = json.dumps(changed | {"replicas": changed["replicas"] + 1}).encode()
    (found,) = replayed(lines)
    assert (found.decisions, found.differing) == (decisions, len(changed["times"]))
    assert found.first is not None
    assert found.first.now == changed["times"][0]
    assert found.first.recorded.replicas == found.first.again.replicas + 1


def test_a_new_policy_begins_anew() -> None:
    lines, decisions = recorded("slo")
    (found,) = replayed(lines + lines)
    assert (found.decisions, found.differing) == (2 * decisions, 0)


def test_a_span_without_a_change_has_a_line_a_minute() -> None:
    lines: list[Any] = []
    recorder = DecisionRecorder("engine-m", "ongoing", lines.append)
    quiet = Signals(1, 1, 0.0, 0.0, 0.0, True, False, 0, 3, 8.0, 5.0, now=0.0)
    for tick in range(2 * MOST_TIMES + 1):
        recorder.add(replace(quiet, now=tick / 10), Decision(1, 0.0, "text"))
    recorder.flush()
    recorder.flush()
    assert [len(line["times"]) for line in lines] == [MOST_TIMES, MOST_TIMES, 1]
    assert [line["begins"] for line in lines] == [True, False, False]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"begins": False}, "begins"),
        ({"policy": "best"}, "policy"),
        ({"signals": {"running": 1}}, "line"),
        ({"times": "now"}, "line"),
    ],
)
def test_what_cannot_be_replayed_is_refused_by_name(change: dict[str, Any], field: str) -> None:
    line = json.loads(recorded("ongoing")[0][0])
    with pytest.raises(BadRequest) as refused:
        replayed([json.dumps(line | change).encode()])
    assert refused.value.param == field


def test_a_line_that_is_no_json_is_named() -> None:
    with pytest.raises(BadRequest, match="line 1 is no JSON"):
        replayed([b"{"])


def test_a_folder_has_the_files_of_all_controllers_in_order(tmp_path: Path) -> None:
    lines, decisions = recorded("ongoing")
    half = len(lines) // 2
    for name, part in (
        ("decisions.controller-1.000001.jsonl", lines[:half]),
        ("decisions.controller-1.000002.jsonl", lines[half:]),
        ("decisions.controller-2.000001.jsonl", lines),
        ("events.controller-2.000001.jsonl", [b"{}"]),
    ):
        (tmp_path / name).write_bytes(b"".join(line + b"\n" for line in part))
    (found,) = replayed(lines_of(tmp_path))
    assert (found.decisions, found.differing) == (2 * decisions, 0)
    (alone,) = replayed(lines_of(tmp_path / "decisions.controller-2.000001.jsonl"))
    assert alone.decisions == decisions


def test_a_folder_without_decisions_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"scaling\.record_decisions"):
        list(lines_of(tmp_path))
    with pytest.raises(BadRequest, match="cannot be read: No such file"):
        list(lines_of(tmp_path / "missing.jsonl"))
