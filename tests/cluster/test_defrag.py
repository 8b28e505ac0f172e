"""`serve-app defrag` on a node with two counted GPUs: room is made for an engine that waits, and no request is lost."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest

from tests.cluster.placement_lab import Lab
from tests.requires import requires

requires("linux")

pytestmark = pytest.mark.long  # four nodes' starts; tests/quota has each plan, tests/core each decision

# of devices with 78: two small ones on a device, a big one on none that has a small one
SMALL_GB = 32
BIG_GB = 60
PAUSE_S = 0.05  # between a client's requests


def share(name: str, memory_gb: float) -> dict[str, Any]:
    return {
        "name": name,
        "engine": "simulated",
        "memory_gb": memory_gb,
        "gpus_per_rank": 0.2,
        "cpus_per_rank": 0.2,
        "simulated": {"decode_step_s": 0.005},
    }


def wait_running(nodes: Lab, name: str) -> None:
    nodes.until(lambda: nodes.states(name) == ["RUNNING"], f"{name} runs", lambda: nodes.ask("quota"))


class Clients:
    """Requests to some models until told to stop; what they got."""

    def __init__(self, nodes: Lab, models: list[str]) -> None:
        self.statuses: Counter[int] = Counter()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(nodes, name), daemon=True) for name in models]
        for thread in self._threads:
            thread.start()

    def _ask(self, nodes: Lab, name: str) -> None:
        while not self._over.wait(PAUSE_S):
            self.statuses[nodes.complete(name, tokens=40).status_code] += 1

    def stop(self) -> Counter[int]:
        self._over.set()
        for thread in self._threads:
            thread.join()
        return self.statuses


def test_one_engine_drains_and_restarts_beside_another_and_the_big_one_starts(nodes: Lab) -> None:
    nodes.add("a", 2)
    small = {name: share(name, SMALL_GB) for name in ("s1", "s2", "s3")}
    nodes.deploy(list(small.values()))
    for name in small:
        wait_running(nodes, name)
    places = {name: next(iter(nodes.grants(name)[0])) for name in small}
    (crowded,) = [place for place, count in Counter(places.values()).items() if count == 2]
    leaves = next(name for name, place in places.items() if place == crowded)
    stay = [name for name in small if name != leaves]
    nodes.deploy([small[name] for name in stay])
    assert len({next(iter(nodes.grants(name)[0])) for name in stay}) == 2  # one on each device now

    nodes.deploy([*(small[name] for name in stay), share("big", BIG_GB)])
    (waits,) = nodes.until(lambda: nodes.ask("quota")["waiting"], "the big one waits", lambda: nodes.ask("quota"))
    assert (waits["model"], waits["state"]) == ("big", "blocked: memory")

    clients = Clients(nodes, stay)
    plan = nodes.ask("defrag")
    assert [step["model"] for step in plan["steps"]] in ([stay[0]], [stay[1]])
    wait_running(nodes, "big")
    for name in stay:
        wait_running(nodes, name)
    statuses = clients.stop()
    assert set(statuses) == {200}
    together = [next(iter(nodes.grants(name)[0])) for name in stay]
    assert len(set(together)) == 1
    assert next(iter(nodes.grants("big")[0])) not in together
    assert nodes.ask("defrag") is None  # nobody waits any more
