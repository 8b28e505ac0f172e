"""An engine replica's request for memory: the replica's name, the place of its ranks, and the bytes it needs.

A configuration that could not start fails here, with the setting's name.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import ray

from serve_app.core.memory import EngineReport, Hold, Rank
from serve_app.engine.engine_args import gpus_per_rank, model_path
from serve_app.engine.environment import Platform
from serve_app.engine.memory_grant import LOAD_STALL_S, MemoryGrant, MemoryMeter
from serve_app.engine.memory_size import kv_bytes_of, memory_request
from serve_app.quota import QuotaActor
from serve_app.ray_adapter import AWAY
from serve_app.settings import ModelSettings

ANSWER_S = 5.0  # the actor answers in milliseconds, also while it delays its answer to a router
DEVICES_S = 50.0  # the actor's first inventory starts a process on each node
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf")


def grant_of_this_replica(
    settings: ModelSettings,
    actor: QuotaActor,
    platform: Platform,
    ranks: tuple[Rank, ...],
    devices: DeviceSizes,
    lost: Callable[[str], None],
    drain: Callable[[], None],
) -> MemoryGrant:
    """A grant that is not requested yet; see `MemoryGrant.obtain`.

    Args:
        ranks: places of the ranks; one for all ranks if they share a machine's memory.
        lost, drain: see `MemoryGrant`.

    Raises:
        ConfigError: no setting determines how much memory the engine needs.
    """
    wanted_bytes, least_bytes = memory_request(
        settings, platform, weights_bytes(settings), devices.smallest_bytes(ranks)
    )
    together = settings.ranks // len(ranks)
    report = EngineReport(
        owner=_replica_name(),
        model=settings.name,
        ranks=ranks,
        wanted_bytes=wanted_bytes * together,
        least_bytes=least_bytes * together,
        measures=settings.engine != "simulated",
    )
    here = ray.get_runtime_context().get_node_id()
    meter = MemoryMeter(here, gpus=bool(gpus_per_rank(settings, platform)))
    stall_s = LOAD_STALL_S + (settings.simulated.start_s if settings.engine == "simulated" else 0.0)
    return MemoryGrant(report, lambda told: actor.engine(told, ANSWER_S), AWAY, lost, drain, meter, stall_s)


def ranks_of_this_replica(settings: ModelSettings, platform: Platform, nodes: tuple[str, ...]) -> tuple[Rank, ...]:
    """The places of the ranks: in this node's memory, on its GPUs, or on GPUs of the nodes of its bundles.

    A whole GPU is the one that Ray assigned. For a share of a GPU the ledger, which counts bytes where Ray counts
    fractions, chooses the device (`restrict_to_device`). The GPUs of several ranks are not known yet here.
    """
    here = ray.get_runtime_context().get_node_id()
    gpus = gpus_per_rank(settings, platform)
    if settings.ranks > 1 and gpus:
        nodes = nodes or (here,)
        return tuple(Rank(node) for node in nodes for _ in range(settings.ranks // len(nodes)))
    return (Rank(here, int(ray.get_gpu_ids()[0]) if gpus == 1 else None),)


def restrict_to_device(settings: ModelSettings, platform: Platform, hold: Hold) -> None:
    """Make only the device of its GPU share visible to this process and the engine it starts."""
    if 0 < gpus_per_rank(settings, platform) < 1:
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # NVML's order, which the ledger uses
        os.environ["CUDA_VISIBLE_DEVICES"] = hold.on.rpartition("/")[2]


def with_granted_memory(
    settings: ModelSettings, platform: Platform, holds: tuple[Hold, ...], ranks: int, device_bytes: int | None
) -> ModelSettings:
    """The settings with sizes that fit into the grant.

    On a GPU, vLLM requires `gpu_memory_utilization` of the device to be free before it starts, whatever it will use;
    it is set to the grant's share of the device.

    Args:
        ranks: number of the engine's ranks that share a hold.
        device_bytes: of the whole device; None: not known.
    """
    if settings.engine == "simulated":
        return settings
    changes: dict[str, float] = {}
    granted = holds[0].amount // ranks
    weights = weights_bytes(settings)
    if platform == "gpu" and device_bytes:
        changes["gpu_memory_utilization"] = min(1.0, granted / device_bytes)
    if platform == "cpu" or settings.kv_cache_gb is not None or (settings.memory_gb is not None and weights):
        kv_gb = kv_bytes_of(settings, platform, weights, granted) / 2**30
        if settings.memory_gb is None and settings.kv_cache_gb is not None:
            kv_gb = min(kv_gb, settings.kv_cache_gb)
        changes["kv_cache_gb"] = kv_gb
    return settings.model_copy(update=changes)


def weights_bytes(settings: ModelSettings) -> int:
    """The size of a model's weights on this machine; 0 if they are not downloaded yet."""
    if settings.engine == "simulated":
        return 0
    folder = Path(model_path(settings))
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(settings.path, local_files_only=True))
        except OSError:  # of huggingface_hub: it is not downloaded
            return 0
    return sum(file.stat().st_size for pattern in WEIGHT_FILES for file in folder.glob(pattern))


class DeviceSizes:
    """The memory sizes of devices, fetched from the quota actor once per engine start, and only if needed."""

    def __init__(self, actor: QuotaActor, settings: ModelSettings, platform: Platform) -> None:
        self._actor, self._settings, self._platform = actor, settings, platform
        self._sizes: dict[str, tuple[int, int]] | None = None

    def smallest_bytes(self, ranks: tuple[Rank, ...]) -> int | None:
        """Bytes for leases on the smallest device of these ranks' nodes; None: not known, or not needed for the
        memory request."""
        settings = self._settings
        if settings.memory_gb is not None or settings.kv_cache_gb is not None or settings.engine == "simulated":
            return None
        nodes = {rank.node for rank in ranks}
        sizes = (size for key, (_, size) in self._fetch_sizes().items() if key.rpartition("/")[0] in nodes)
        return min(sizes, default=None)

    def total_bytes(self, key: str) -> int | None:
        """The memory of a device including its reserved part; None: not known, or not needed to size the engine."""
        if self._platform != "gpu" or self._settings.engine == "simulated":
            return None
        return self._fetch_sizes().get(key, (None,))[0]

    def _fetch_sizes(self) -> dict[str, tuple[int, int]]:
        if self._sizes is None:
            try:
                self._sizes = self._actor.devices(DEVICES_S)
            except AWAY:
                return {}
        return self._sizes


def _replica_name() -> str:
    from ray import serve

    try:
        return serve.get_replica_context().replica_id.unique_id
    except serve.exceptions.RayServeException:
        return f"process-{os.getpid()}"
