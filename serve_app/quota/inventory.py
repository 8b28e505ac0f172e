"""What devices the cluster has, and whose processes are still there: asked of each node, once a second.

A GPU node is asked through NVML what its GPUs have. A node without GPUs has one device, a stated share of its memory;
so the whole path is real on a machine without any. What a node cannot tell (fake GPUs of a test) the settings can.

A node that is alive and does not answer has the devices that it told last, to this actor or to one before it; of one
that has never told nobody holds anything, and the others do not wait for it.

Invariant: only Ray says that a node is gone; no node's silence delays a look at the others, the first one apart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import psutil
import pynvml
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from serve_app.core.memory import DEFAULT_RESERVED_BYTES, Device, EngineReport, Process
from serve_app.system import start_ticks

logger = logging.getLogger("serve_app.quota")

DEFAULT_HOST_SHARE = 0.5  # of a node's memory without GPUs: the rest is for Ray, the routers and page cache
ASK_S = 5.0  # a node answers in milliseconds; the first time a process has to start there
LATER_S = 0.1  # for that answer in all looks but the first; one that comes later counts in the next look
NONE: Mapping[str, list[Device]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class InventorySettings:
    """What counts as a device.

    Args:
        reserved_bytes: of each GPU, nobody's.
        host_share: of a node's memory that is its device where it has no GPU; 0: such nodes have none.
        device_bytes: of each GPU, where NVML is not to be asked; None: it is.
    """

    reserved_bytes: int = DEFAULT_RESERVED_BYTES
    host_share: float = DEFAULT_HOST_SHARE
    device_bytes: int | None = None


class NodeWatch:
    """One on each node: what only a process there can see."""

    def gpu_bytes(self) -> list[int]:
        """The memory of each GPU here, by NVML. Raises what NVML does where there is none."""
        pynvml.nvmlInit()
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles]
        finally:
            pynvml.nvmlShutdown()

    def host_bytes(self) -> int:
        """The memory of this machine."""
        return int(psutil.virtual_memory().total)

    def alive(self, processes: tuple[Process, ...]) -> list[int]:
        """Which of these are there; one that has ended and was not waited for holds no memory."""
        return [pid for pid, started in processes if start_ticks(pid) == started]


class Inventory:
    """The nodes of the cluster, through a `NodeWatch` on each.

    Args:
        settings: what counts as a device.
        told_before: devices by node, as an earlier actor knew them.
    """

    def __init__(self, settings: InventorySettings, told_before: Mapping[str, list[Device]] = NONE) -> None:
        self._settings = settings
        self._watches: dict[str, Any] = {}
        self._before = dict(told_before)
        self._devices: dict[str, list[Device]] = {}  # of nodes that have told
        self._asking: dict[str, asyncio.Task[list[Device] | None]] = {}
        self._patience_s = ASK_S + 1.0  # of the first look
        self._alive: frozenset[str] = frozenset()  # nodes, as Ray said last
        self._unsure: set[str] = set()  # of those, whose NVML has failed: asked again, and nobody waits for them

    async def devices(self) -> list[Device]:
        """All devices of the nodes that Ray counts as alive, as far as they have told."""
        nodes = await asyncio.to_thread(ray.nodes)
        alive = {node["NodeID"]: node.get("Resources", {}) for node in nodes if node["Alive"]}
        self._alive = frozenset(alive)
        for gone in (self._watches.keys() | self._devices.keys() | self._before.keys()) - self._alive:
            self._watches.pop(gone, None)
            self._devices.pop(gone, None)
            self._before.pop(gone, None)
            self._unsure.discard(gone)
        for node, resources in alive.items():
            if node not in self._asking and (node not in self._devices or node in self._unsure):
                asked = self._ask_devices(node, int(resources.get("GPU", 0)))
                self._asking[node] = asyncio.create_task(asked, name=f"devices-of-{node}")
        if self._asking:
            await asyncio.wait(self._asking.values(), timeout=self._patience_s)
        self._patience_s = LATER_S
        for node in [node for node, task in self._asking.items() if task.done()]:
            devices = self._asking.pop(node).result()
            if devices is not None and node in alive:
                self._devices[node] = devices
        known = self._before | self._devices
        return [device for node in alive for device in known.get(node, ())]

    async def gone(self, told: EngineReport | None) -> bool:
        """Whether no process of an engine is there any more; one on a node that is gone is gone."""
        if told is None:
            return True
        answers = await asyncio.gather(*(self._ask_alive(node, pids) for node, pids in told.processes))
        return not any(answers)

    async def _ask_devices(self, node: str, gpus: int) -> list[Device] | None:
        settings = self._settings
        try:
            self._unsure.discard(node)
            if not gpus:
                if not settings.host_share:
                    return []
                share = int(await self._ask(node, "host_bytes") * settings.host_share)
                return [Device(node, 0, share, 0)]
            if settings.device_bytes is not None:
                sizes = [settings.device_bytes] * gpus
            else:
                sizes = await self._ask(node, "gpu_bytes")
            return [Device(node, index, size, settings.reserved_bytes) for index, size in enumerate(sizes)]
        except ray.exceptions.RayTaskError as error:
            if node not in self._devices:
                logger.error("node %s: NVML does not tell its GPUs; set quota.device_gb: %s", node, error.cause)
            self._unsure.add(node)
            return []
        except (TimeoutError, ray.exceptions.RayError) as error:
            logger.warning("node %s does not tell its devices: %s", node, error)
            self._watches.pop(node, None)  # one that Ray could not start again is of no use
            return None

    async def _ask_alive(self, node: str, processes: tuple[Process, ...]) -> bool:
        """Whether any of these is there, or may be."""
        if not processes or node not in self._alive:
            return False  # the node is gone, and its memory with it
        try:
            return bool(await self._ask(node, "alive", processes))
        except (TimeoutError, ray.exceptions.RayError) as error:
            logger.warning("node %s does not tell which processes it has: %s", node, error)
            return True

    async def _ask(self, node: str, question: str, *args: Any) -> Any:
        watch = self._watches.get(node)
        if watch is None:
            where = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            watch = ray.remote(NodeWatch).options(num_cpus=0, scheduling_strategy=where, max_restarts=-1).remote()
            self._watches[node] = watch
        async with asyncio.timeout(ASK_S):
            return await getattr(watch, question).remote(*args)
