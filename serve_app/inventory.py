"""What devices the cluster has, and whose processes are still there: asked of each node, once a second.

A GPU node is asked through NVML what its GPUs have. A node without GPUs has one device, a stated share of its memory;
so the whole path is real on a machine without any. What a node cannot tell (fake GPUs of a test) the settings can.

Invariant: a node that does not answer is not taken for one without devices; only Ray says that a node is gone.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from serve_app.core.grants import EngineReport, Process
from serve_app.core.leases import DEFAULT_RESERVED_BYTES, Device
from serve_app.local.processes import start_ticks

logger = logging.getLogger("serve_app.quota")

DEFAULT_HOST_SHARE = 0.5  # of a node's memory without GPUs: the rest is for Ray, the routers and page cache
ASK_S = 5.0  # a node answers in milliseconds; the first time a process has to start there


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
        import pynvml

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
    """The nodes of the cluster, through a `NodeWatch` on each."""

    def __init__(self, settings: InventorySettings) -> None:
        self._settings = settings
        self._watches: dict[str, Any] = {}
        self._devices: dict[str, list[Device]] = {}  # of nodes that have told
        self._alive: frozenset[str] = frozenset()  # nodes, as Ray said last
        self._unsure: set[str] = set()  # of those, whose NVML has failed: asked again, and nobody waits for them

    async def devices(self) -> list[Device] | None:
        """All devices of the nodes that Ray counts as alive; None: a node has not told yet what it has."""
        nodes = await asyncio.to_thread(ray.nodes)
        alive = {node["NodeID"]: node.get("Resources", {}) for node in nodes if node["Alive"]}
        self._alive = frozenset(alive)
        for gone in (self._watches.keys() | self._devices.keys()) - self._alive:
            self._watches.pop(gone, None)
            self._devices.pop(gone, None)
            self._unsure.discard(gone)
        untold = [node for node in alive if node not in self._devices or node in self._unsure]
        told = await asyncio.gather(*(self._ask_devices(node, int(alive[node].get("GPU", 0))) for node in untold))
        for node, devices in zip(untold, told, strict=True):
            if devices is not None:
                self._devices[node] = devices
        if any(devices is None for devices in told):
            return None
        return [device for node in alive for device in self._devices[node]]

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
