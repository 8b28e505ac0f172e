"""What devices there are and whose processes live, over nodes that answer, fail, or are gone. Ray is a fake."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from serve_app.core.memory import Device
from serve_app.core.times import NODE_LIST_S, NODE_SILENT_S
from serve_app.errors import Unavailable
from serve_app.quota import inventory
from serve_app.quota.inventory import Inventory, NodeWatch
from serve_app.settings import QuotaSettings
from serve_app.system import start_ticks

GB = 10**9
SOON_S = 10.0  # for what takes milliseconds on an idle machine
SLOW = "5a" * 28  # the id of a node, in Ray's form


class Nodes:
    """The cluster: GPUs of each node that is alive, and what a question to a node comes to."""

    def __init__(self, **gpus: int) -> None:
        self.gpus = dict(gpus)
        self.answers: dict[tuple[str, str], Any] = {}
        self.asked: list[tuple[str, str]] = []

    def listed(self, timeout_s: float) -> dict[str, dict[str, float]]:
        return {node: {"GPU": float(gpus)} for node, gpus in self.gpus.items()}

    async def ask(self, node: str, question: str, *args: Any) -> Any:
        self.asked.append((node, question))
        answer = self.answers[node, question]
        if isinstance(answer, BaseException):
            raise answer
        return answer(*args) if isinstance(answer, Callable) else answer  # type: ignore[arg-type]


def failed(text: str) -> ray.exceptions.RayTaskError:
    return ray.exceptions.RayTaskError("gpu_bytes", text, RuntimeError(text))


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    cluster_nodes = Nodes()
    monkeypatch.setattr(inventory, "live_nodes", cluster_nodes.listed)
    monkeypatch.setattr(Inventory, "_ask", lambda self, node, question, *args: cluster_nodes.ask(node, question, *args))
    return cluster_nodes


def looked(watched: Inventory) -> list[Device]:
    return asyncio.run(watched.devices())


def test_a_node_without_gpus_has_a_share_of_its_memory_as_one_device(nodes: Nodes) -> None:
    nodes.gpus["cpu"] = 0
    nodes.answers["cpu", "host_bytes"] = 100 * GB
    assert looked(Inventory(QuotaSettings(host_memory_share=0.25), {})) == [Device("cpu", 0, 25 * GB, 0)]
    assert looked(Inventory(QuotaSettings(host_memory_share=0.0), {})) == []


def test_a_gpu_node_has_what_nvml_says_there_less_what_is_nobodys(nodes: Nodes) -> None:
    nodes.gpus["gpu"] = 2
    nodes.answers["gpu", "gpu_bytes"] = [80 * GB, 40 * GB]
    found = looked(Inventory(QuotaSettings(reserved_gb=3), {}))
    assert found == [Device("gpu", 0, 80 * GB, 3 * GB), Device("gpu", 1, 40 * GB, 3 * GB)]


def test_where_the_settings_say_it_nvml_is_not_asked(nodes: Nodes) -> None:
    nodes.gpus["gpu"] = 2
    found = looked(Inventory(QuotaSettings(device_gb=80), {}))
    assert [(one.key, one.total_bytes) for one in found] == [("gpu/0", 80 * GB), ("gpu/1", 80 * GB)]
    assert nodes.asked == []


def test_a_node_that_does_not_answer_has_what_it_reported_before(nodes: Nodes) -> None:
    nodes.gpus |= {"gpu": 1, "cpu": 0}
    nodes.answers |= {("gpu", "gpu_bytes"): TimeoutError(), ("cpu", "host_bytes"): 10 * GB}
    watched = Inventory(QuotaSettings(), {"gpu": [Device("gpu", 0, 80 * GB, 0)], "left": [Device("left", 0, 1, 0)]})
    assert [one.key for one in looked(watched)] == ["gpu/0", "cpu/0"]
    nodes.answers["gpu", "gpu_bytes"] = [80 * GB, 80 * GB]
    assert len(looked(watched)) == 3
    nodes.asked.clear()
    assert len(looked(watched)) == 3
    assert nodes.asked == [], "what is known is not asked again"


def test_nobody_waits_for_a_node_that_has_never_reported(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "NODE_ANSWER_S", 0.0)
    monkeypatch.setattr(inventory, "LATER_S", 0.0)
    nodes.gpus |= {"cpu": 0, "slow": 0}
    nodes.answers |= {("cpu", "host_bytes"): 10 * GB, ("slow", "host_bytes"): 10 * GB}
    answers = nodes.ask
    ready = asyncio.Event()

    async def slowly(node: str, question: str, *args: Any) -> Any:
        if node == "slow":
            await ready.wait()
        return await answers(node, question, *args)

    monkeypatch.setattr(nodes, "ask", slowly)

    async def looks() -> list[list[str]]:
        watched = Inventory(QuotaSettings(), {})
        watched.check_timeout_s = 0.01
        first = await watched.devices()
        ready.set()
        await asyncio.sleep(0)
        second = await watched.devices()
        return [[one.node for one in found] for found in (first, second)]

    first, second = asyncio.run(looks())
    assert first == ["cpu"]
    assert second == ["cpu", "slow"]


def test_a_node_whose_nvml_fails_is_asked_again_and_nobody_waits_for_it(nodes: Nodes) -> None:
    nodes.gpus |= {"gpu": 1, "cpu": 0}
    nodes.answers |= {("gpu", "gpu_bytes"): failed("driver"), ("cpu", "host_bytes"): 10 * GB}
    watched = Inventory(QuotaSettings(), {})
    assert [one.node for one in looked(watched)] == ["cpu"]
    nodes.answers["gpu", "gpu_bytes"] = [80 * GB]
    assert [one.node for one in looked(watched)] == ["gpu", "cpu"]
    nodes.asked.clear()
    looked(watched)
    assert nodes.asked == []


def test_a_node_that_ray_calls_gone_is_gone(nodes: Nodes) -> None:
    nodes.gpus |= {"a": 0, "b": 0}
    nodes.answers |= {("a", "host_bytes"): 10 * GB, ("b", "host_bytes"): 10 * GB}
    watched = Inventory(QuotaSettings(), {})
    looked(watched)
    del nodes.gpus["b"]
    assert [one.node for one in looked(watched)] == ["a"]


def test_a_gcs_that_does_not_list_the_nodes_is_reported(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    given_s: list[float] = []

    def silent(timeout_s: float) -> Any:
        given_s.append(timeout_s)
        raise ray.exceptions.RpcError("RPC error: Deadline Exceeded")

    monkeypatch.setattr(inventory, "live_nodes", silent)
    monkeypatch.setattr(inventory, "draining_nodes", silent)
    watched = Inventory(QuotaSettings(), {})
    for asked in (watched.devices, watched.leaving):
        with pytest.raises(Unavailable, match="the list of the nodes, and Ray's GCS fails: RPC error"):
            asyncio.run(asked())
    assert given_s == [NODE_LIST_S, NODE_LIST_S], "the thread that asks ends, too"


def test_an_engine_is_gone_when_its_processes_are_on_every_node(nodes: Nodes) -> None:
    nodes.gpus |= {"a": 0, "b": 0}
    alive: dict[str, list[int]] = {"a": [], "b": [7]}
    for node in nodes.gpus:
        nodes.answers[node, "host_bytes"] = 10 * GB
        nodes.answers[node, "alive"] = lambda asked, node=node: [pid for pid, _ in asked if pid in alive[node]]
    watched = Inventory(QuotaSettings(), {})
    looked(watched)
    engine = (("a", ((7, 1),)), ("b", ((7, 1),)))
    assert not asyncio.run(watched.gone(engine))
    alive["b"] = []
    assert asyncio.run(watched.gone(engine))


def test_an_engine_of_a_node_that_does_not_answer_may_be_there_and_of_one_that_is_gone_is_not(nodes: Nodes) -> None:
    nodes.gpus |= {"a": 0}
    nodes.answers |= {("a", "host_bytes"): 10 * GB, ("a", "alive"): TimeoutError()}
    watched = Inventory(QuotaSettings(), {})
    looked(watched)
    assert not asyncio.run(watched.gone([("a", ((7, 1),))]))
    assert asyncio.run(watched.gone([("left", ((7, 1),))]))
    assert asyncio.run(watched.gone([]))


def test_an_engine_on_a_node_that_has_not_reported_its_devices_yet_is_not_gone(nodes: Nodes) -> None:
    nodes.gpus |= {"a": 0}
    nodes.answers |= {("a", "host_bytes"): TimeoutError(), ("a", "alive"): TimeoutError()}
    watched = Inventory(QuotaSettings(), {})
    assert looked(watched) == []
    assert not asyncio.run(watched.gone([("a", ((7, 1),))]))


class StartingWatches:
    """In place of `ray.remote`: actors that answer once `ready` is set; each one that is started is counted."""

    def __init__(self) -> None:
        self.started = 0
        self.now = 0.0
        self.error: Exception | None = None
        self.ready = False

    def remote(self, actor: type) -> Any:
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=self.start))

    def start(self) -> Any:
        self.started += 1
        method = SimpleNamespace(remote=self.answer)
        return SimpleNamespace(host_bytes=method, alive=method)

    async def answer(self, *args: Any) -> int:
        if self.error is not None:
            raise self.error
        if not self.ready:
            await asyncio.Event().wait()
        return 10 * GB


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> StartingWatches:
    watches = StartingWatches()
    monkeypatch.setattr(ray, "remote", watches.remote)
    monkeypatch.setattr(inventory, "live_nodes", lambda timeout_s: {SLOW: {"CPU": 2.0}})
    monkeypatch.setattr(inventory, "NODE_ANSWER_S", 0.005)
    return watches


def looked_at(watches: StartingWatches, *times: float) -> list[int]:
    """The number of devices found by each look at these times, with one inventory."""

    async def looks() -> list[int]:
        watched = Inventory(QuotaSettings(), {}, lambda: watches.now)
        watched.check_timeout_s = SOON_S
        found = []
        for at in times:
            watches.now = at
            found.append(len(await watched.devices()))
            watched.check_timeout_s = SOON_S
        return found

    return asyncio.run(looks())


def test_a_watch_that_takes_long_to_start_is_not_started_anew(starting: StartingWatches) -> None:
    assert looked_at(starting, *range(0, int(NODE_SILENT_S), 6)) == [0] * 20
    assert starting.started == 1


def test_a_watch_is_replaced_after_two_minutes_without_an_answer(starting: StartingWatches) -> None:
    assert looked_at(starting, 0.0, 60.0, NODE_SILENT_S, NODE_SILENT_S + 6.0) == [0] * 4
    assert starting.started == 2


def test_a_watch_that_nobody_asked_for_long_is_not_replaced(starting: StartingWatches) -> None:
    async def looks() -> None:
        watched = Inventory(QuotaSettings(), {}, lambda: starting.now)
        starting.ready = True
        assert len(await watched.devices()) == 1
        starting.now = 10 * NODE_SILENT_S
        starting.ready = False
        starting.error = failed("driver")
        assert not await watched.gone([(SLOW, ((7, 1),))])

    asyncio.run(looks())
    assert starting.started == 1


def test_a_watch_that_ray_does_not_start_again_is_replaced_at_once(starting: StartingWatches) -> None:
    starting.error = ray.exceptions.ActorDiedError()
    assert looked_at(starting, 0.0, 1.0) == [0, 0]
    assert starting.started == 2


def test_a_watch_that_ray_starts_again_is_kept(starting: StartingWatches) -> None:
    starting.error = ray.exceptions.ActorUnavailableError("restarting", None)
    assert looked_at(starting, 0.0, 1.0, 2.0) == [0, 0, 0]
    assert starting.started == 1


def test_a_process_is_known_by_its_start_since_ids_are_used_again() -> None:
    me = os.getpid()
    started = start_ticks(me)
    assert started is not None
    watch = NodeWatch()
    assert watch.alive(((me, started),)) == [me]
    assert watch.alive(((me, started - 1),)) == []
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert watch.alive(((ended.pid, start_ticks(ended.pid) or 0),)) == [], "not waited for, and without memory"
    ended.wait()
    assert watch.host_bytes() > GB


def test_what_an_engine_replica_has_left_behind_is_ended_even_if_it_stands_still() -> None:
    replica, engine, other = (subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in "abc")
    watch = NodeWatch()
    try:
        ticks = {one.pid: start_ticks(one.pid) or 0 for one in (replica, engine, other)}
        processes = tuple((one.pid, ticks[one.pid]) for one in (replica, engine))
        os.kill(engine.pid, signal.SIGSTOP)
        assert watch.end_orphans(processes) == [replica.pid, engine.pid], "the replica lives: it is only silent"
        replica.kill()
        replica.wait(SOON_S)
        assert watch.end_orphans(processes) == [engine.pid]
        assert engine.wait(SOON_S) == -signal.SIGKILL
        assert watch.end_orphans(processes) == []
        reused = ((replica.pid, 1), (other.pid, ticks[other.pid] - 1))
        assert watch.end_orphans(reused) == [], "another process has that id now"
        assert other.poll() is None
    finally:
        for process in (replica, engine, other):
            process.kill()
            process.wait()
