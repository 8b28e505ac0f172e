"""The cluster's devices, and the live processes of engines: queried on each node, once a second.

On a GPU node NVML reports the GPUs' memory. A node without GPUs has one device, a configured share of its memory, so
the whole path also runs on a machine without GPUs. The settings give what a node cannot report (fake GPUs of a test).

A live node that does not answer keeps its last reported devices, to this actor or an earlier one; on a node that has
never reported there are no leases, and other nodes do not wait for it.

Invariant: only Ray decides that a node is gone; an unresponsive node delays no check of the others but the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from serve_app.core.memory import Device, NodeProcesses, Process
from serve_app.core.times import FIRST_NODES_S, NODE_ANSWER_S, NODE_LIST_S, NODE_SILENT_S
from serve_app.quota.gcs_wait import bounded_wait
from serve_app.ray_adapter import draining_nodes, live_nodes
from serve_app.settings import GB, QuotaSettings
from serve_app.system import gpus, start_ticks

logger = logging.getLogger("ray.serve")

LATER_S = 0.1  # wait for answers in all checks but the first; later answers count in the next check

T = TypeVar("T")


class NodeWatch:
    """Actor on each node, for queries that need a process there."""

    def gpu_bytes(self) -> list[int]:
        """The memory of each GPU here, by NVML. Raises NVML's error where there is none."""
        return [size for _, size in gpus()]

    def host_bytes(self) -> int:
        """The memory of this machine."""
        return int(psutil.virtual_memory().total)

    def alive(self, processes: tuple[Process, ...]) -> list[int]:
        """The ids of live processes among these; zombies hold no memory and do not count."""
        return [pid for pid, started in processes if start_ticks(pid) == started]

    def end_orphans(self, processes: tuple[Process, ...]) -> list[int]:
        """As `alive`, of an engine that is silent. If the first of its processes, its replica's, is gone, this ends
        the others: they end by themselves (`engine.parent_guard`), but not one that stands still."""
        alive = self.alive(processes)
        if processes[0][0] not in alive:
            for pid in alive:
                logger.warning("Process %d lost its engine replica and is killed", pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return alive


@dataclass(slots=True)
class StartedWatch:
    """The `NodeWatch` of a node. `unanswered_since`: the first question after its last answer; None: none."""

    actor: Any
    unanswered_since: float | None = None


class Inventory:
    """The nodes of the cluster, through a `NodeWatch` on each.

    Args:
        settings: what counts as a device.
        known_devices: devices by node, as stored by an earlier actor.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        settings: QuotaSettings,
        known_devices: Mapping[str, list[Device]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._watches: dict[str, StartedWatch] = {}
        self._earlier_devices = dict(known_devices)
        self._devices: dict[str, list[Device]] = {}  # of nodes that have reported
        self._device_queries: dict[str, asyncio.Task[list[Device] | None]] = {}
        self.check_timeout_s = FIRST_NODES_S  # of the first check
        self._alive: frozenset[str] = frozenset()  # nodes, as last reported by Ray
        self._nvml_failed: set[str] = set()  # nodes whose NVML has failed: asked again

    async def devices(self) -> list[Device]:
        """All reported devices of the nodes that Ray counts as alive. Raises Unavailable: the GCS does not answer."""
        alive = await _from_gcs(live_nodes)
        self._alive = frozenset(alive)
        for known_nodes in (self._watches, self._devices, self._earlier_devices):
            for gone in known_nodes.keys() - self._alive:
                del known_nodes[gone]
        self._nvml_failed &= self._alive
        for node, resources in alive.items():
            if node not in self._device_queries and (node not in self._devices or node in self._nvml_failed):
                asked = self._ask_devices(node, int(resources.get("GPU", 0)))
                self._device_queries[node] = asyncio.create_task(asked, name=f"devices-of-{node}")
        if self._device_queries:
            await asyncio.wait(self._device_queries.values(), timeout=self.check_timeout_s)
        self.check_timeout_s = LATER_S
        for node in [node for node, task in self._device_queries.items() if task.done()]:
            devices = self._device_queries.pop(node).result()
            if devices is not None and node in alive:
                self._devices[node] = devices
        known = self._earlier_devices | self._devices
        return [device for node in alive for device in known.get(node, ())]

    async def leaving(self) -> dict[str, float]:
        """The nodes that drain by Ray's state (a command, a spot notice, its autoscaler), and when each ends, on the
        monotonic clock. Those without a deadline are left out: Serve replaces what they run, however long that takes.
        Raises Unavailable: the GCS does not answer.
        """
        found = await _from_gcs(draining_nodes)
        ahead_s = time.time() - time.monotonic()
        return {node: ends_ms / 1000.0 - ahead_s for node, ends_ms in found.items() if ends_ms}

    async def gone(self, processes: Iterable[NodeProcesses]) -> bool:
        """Whether all these processes are gone; those on a removed node are."""
        answers = await asyncio.gather(*(self._ask_alive("alive", node, pids) for node, pids in processes))
        return not any(answers)

    async def end_orphans(self, processes: Iterable[NodeProcesses]) -> bool:
        """Whether all processes of a silent engine are gone; its orphans are ended, see `NodeWatch`."""
        answers = await asyncio.gather(*(self._ask_alive("end_orphans", node, pids) for node, pids in processes))
        return not any(answers)

    async def _ask_devices(self, node: str, gpus: int) -> list[Device] | None:
        settings = self._settings
        try:
            self._nvml_failed.discard(node)
            if not gpus:
                if not settings.host_memory_share:
                    return []
                share = int(await self._ask(node, "host_bytes") * settings.host_memory_share)
                return [Device(node, 0, share, 0)]
            if settings.device_gb is not None:
                sizes = [int(settings.device_gb * GB)] * gpus
            else:
                sizes = await self._ask(node, "gpu_bytes")
            return [Device(node, index, size, int(settings.reserved_gb * GB)) for index, size in enumerate(sizes)]
        except ray.exceptions.RayTaskError as error:
            if node not in self._devices:
                logger.error(
                    "Node %s gets no engines because NVML reports no GPUs: %s. Set quota.device_gb", node, error.cause
                )
            self._nvml_failed.add(node)
            return []
        except (TimeoutError, ray.exceptions.RayError) as error:
            logger.warning("Node %s does not report its devices; only known ones get engines: %s", node, error)
            return None

    async def _ask_alive(self, question: str, node: str, processes: tuple[Process, ...]) -> bool:
        """Whether any of these processes is alive, or may be."""
        if not processes or node not in self._alive:
            return False  # the node is gone, and its memory with it
        try:
            return bool(await self._ask(node, question, processes))
        except (TimeoutError, ray.exceptions.RayError) as error:
            logger.warning("Node %s does not report its processes, whose memory stays reserved: %s", node, error)
            return True

    async def _ask(self, node: str, question: str, *args: Any) -> Any:
        watch = self._watch(node)
        try:
            async with asyncio.timeout(NODE_ANSWER_S):
                answer = await getattr(watch.actor, question).remote(*args)
        except ray.exceptions.RayTaskError:
            watch.unanswered_since = None  # an error is an answer
            raise
        except ray.exceptions.ActorDiedError:
            if self._watches.get(node) is watch:
                del self._watches[node]  # Ray starts this one no more
            raise
        watch.unanswered_since = None
        return answer

    def _watch(self, node: str) -> StartedWatch:
        """The watch of a node, which gets a question now; a new one where there is none or it has been silent."""
        now = self._clock()
        watch = self._watches.get(node)
        since = now if watch is None or watch.unanswered_since is None else watch.unanswered_since
        if watch is None or now - since >= NODE_SILENT_S:
            if watch is not None:
                logger.warning(
                    "Node %s gave no answer for %.0f s, and its engines went unchecked; its watch actor is replaced",
                    node,
                    now - since,
                )
            where = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            actor = ray.remote(NodeWatch).options(num_cpus=0, scheduling_strategy=where, max_restarts=-1).remote()
            watch = self._watches[node] = StartedWatch(actor)
        if watch.unanswered_since is None:
            watch.unanswered_since = now
        return watch


async def _from_gcs(ask: Callable[[float], T]) -> T:
    """Ray's own state of the nodes. Raises Unavailable: the GCS does not answer."""
    async with bounded_wait("the list of the nodes", NODE_LIST_S):
        return await asyncio.to_thread(ask, NODE_LIST_S)
