"""Making room for an engine that waits, on a ledger and with engines that are only their words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve_app.core.memory.leases import Device
from serve_app.core.memory.reports import EngineReport, Rank
from serve_app.core.quota import Quota

GB = 10**9


class Cluster:
    """Engines that speak to a quota core; those told to drain end, and restart as another replica."""

    def __init__(self, sizes: dict[str, list[int]]) -> None:
        self.now = 0.0
        self.quota = Quota(1, {}, self.now)
        devices = [Device(node, index, size * GB, 0) for node, all_ in sizes.items() for index, size in enumerate(all_)]
        self.quota.on_devices(devices, self.now)
        self.words: dict[str, EngineReport] = {}
        self.drained: list[str] = []

    def start(self, name: str, node: str, size: int, ranks: int = 1, device: int | None = None) -> None:
        self.words[name] = EngineReport(name, name, (Rank(node, device),) * ranks, size * GB, size * GB)
        self.speak()

    def speak(self, seconds: float = 0.0) -> None:
        """Everybody says its word, often enough for all that follows from it to happen."""
        self.now += seconds
        for _ in range(3):
            for name, word in list(self.words.items()):
                reply = self.quota.on_engine(word, self.now)
                if reply.drain:
                    self.quota.on_engine(replace(word, gone=True), self.now)
                    del self.words[name]
                    self.drained.append(name)
                elif reply.holds:
                    self.words[name] = replace(word, holds=reply.holds, kv_tokens=100)
            self.quota.on_tick(self.now)

    def runs(self, name: str) -> bool:
        return name in self.words and bool(self.words[name].kv_tokens)

    def on(self, name: str) -> list[str]:
        return [hold.on for hold in self.words[name].holds]


def scattered() -> Cluster:
    """Two devices of 10 GB with an engine of 4 GB on each: 6 + 6 GB are free, and no place for 8."""
    cluster = Cluster({"n": [10, 10]})
    cluster.start("a", "n", 4, device=0)
    cluster.start("b", "n", 4, device=1)
    cluster.start("big", "n", 8)
    return cluster


def test_the_plan_says_who_drains_and_where_it_goes() -> None:
    cluster = scattered()
    assert not cluster.runs("big")
    plan = cluster.quota.relocation.plan(cluster.now)
    assert plan is not None
    (step,) = plan.steps
    assert (plan.waits.owner, step.bytes_to_move) == ("big", 4 * GB)
    assert {*step.source, *step.target} == {"n/0", "n/1"}
    assert cluster.drained == []  # planning does nothing


def test_one_engine_drains_and_the_one_that_waited_starts() -> None:
    cluster = scattered()
    cluster.quota.relocation.begin()
    cluster.speak(0.5)
    cluster.speak(0.5)
    assert len(cluster.drained) == 1
    assert cluster.runs("big")
    cluster.start("again", "n", 4)  # what drained restarts, where there is room
    assert cluster.runs("again")
    cluster.speak(1.0)
    assert not cluster.quota.relocation.active
    assert len(cluster.drained) == 1


def test_nobody_is_drained_where_it_would_not_help() -> None:
    cluster = scattered()
    cluster.start("huge", "n", 11)
    del cluster.words["big"]
    cluster.quota.on_engine(replace(EngineReport("big", "big", (Rank("n"),), 1, 1), gone=True), cluster.now)
    assert cluster.quota.relocation.plan(cluster.now) is None
    cluster.quota.relocation.begin()
    cluster.speak(0.5)
    assert cluster.drained == []
    assert not cluster.quota.relocation.active


def test_nobody_is_drained_while_nobody_waits() -> None:
    cluster = Cluster({"n": [10, 10]})
    cluster.start("a", "n", 4)
    cluster.quota.relocation.begin()
    cluster.speak(0.5)
    assert (cluster.drained, cluster.quota.relocation.active) == ([], False)


def test_room_is_made_on_the_node_of_who_waits() -> None:
    cluster = Cluster({"n": [10, 10], "m": [10]})
    cluster.start("a", "n", 4, device=0)
    cluster.start("b", "n", 4, device=1)
    cluster.start("c", "m", 4)
    cluster.start("big", "m", 8)
    plan = cluster.quota.relocation.plan(cluster.now)
    assert plan is not None
    assert [step.owner for step in plan.steps] == ["c"]


def test_fragmentation_is_reported_by_what_the_models_here_ask() -> None:
    """6 + 6 GB are free: two of the models need 4, the third 8."""
    assert scattered().quota.relocation.fragmentation() == (pytest.approx(1 / 3), {"n": pytest.approx(1 / 3)})


def test_empty_devices_are_not_fragmented_and_what_fits_nowhere_does_not_count() -> None:
    cluster = Cluster({"n": [10, 10], "m": [10, 10]})
    assert cluster.quota.relocation.fragmentation()[0] == 0.0
    cluster.start("whole", "n", 10)
    cluster.start("huge", "m", 11)
    assert cluster.quota.relocation.fragmentation() == (0.0, {"n": 0.0, "m": 0.0})


def test_a_model_that_has_left_is_expected_back() -> None:
    cluster = Cluster({"n": [10, 10]})
    cluster.start("a", "n", 4, device=0)
    cluster.start("b", "n", 4, device=1)
    cluster.start("gone", "n", 6)
    cluster.quota.on_engine(replace(cluster.words.pop("gone"), gone=True), cluster.now)
    cluster.start("more", "n", 1)
    assert cluster.quota.relocation.fragmentation()[0] > 0
