"""What an engine replica says when it asks for its memory: who it is, where its ranks are, what it needs.

Fails here, with the setting's name, what could not start anyway.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import ray

from serve_app.core.memory import EngineReply, EngineReport, Hold, Rank
from serve_app.engine.engine_args import gpus_per_rank, model_path
from serve_app.engine.environment import Platform
from serve_app.engine.measured_memory import measured_here
from serve_app.engine.memory_grant import LOAD_STALL_S, Grant
from serve_app.engine.memory_size import kv_bytes_of, memory_ask
from serve_app.quota import AWAY, QuotaActor
from serve_app.settings import ModelSettings

ANSWER_S = 5.0  # the actor answers in milliseconds, also while it holds a router's word back
DEVICES_S = 50.0  # the actor's first look at the nodes starts a process on each
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf")


def grant_of_this_replica(
    settings: ModelSettings,
    actor: QuotaActor,
    platform: Platform,
    ranks: tuple[Rank, ...],
    devices: Devices,
    lost: Callable[[str], None],
    drain: Callable[[], None],
) -> Grant:
    """A grant that has been asked for by nobody yet; see `Grant.obtain`.

    Args:
        ranks: where they are; one for all of them where they share a machine's memory.
        lost, drain: see `Grant`.

    Raises:
        ConfigError: nothing says how much memory it needs.
    """
    ask = memory_ask(settings, platform, weights_bytes(settings), devices.smallest_bytes(ranks))
    together = settings.ranks // len(ranks)
    word = EngineReport(
        owner=_my_name(),
        model=settings.name,
        ranks=ranks,
        wanted_bytes=ask.wanted_bytes * together,
        least_bytes=ask.least_bytes * together,
        measures=settings.engine != "simulated",
    )

    def speak(report: EngineReport) -> EngineReply:
        return actor.engine(report, ANSWER_S)

    here = ray.get_runtime_context().get_node_id()
    measured = measured_here(here, gpus=bool(gpus_per_rank(settings, platform)))
    stall_s = LOAD_STALL_S + (settings.simulated.start_s if settings.engine == "simulated" else 0.0)
    return Grant(word, speak, AWAY, lost, drain, measured, stall_s)


def ranks_of_this_replica(settings: ModelSettings, platform: Platform, nodes: tuple[str, ...]) -> tuple[Rank, ...]:
    """Where the ranks are: on this node's memory, or on GPUs of it, or of the nodes of its bundles.

    A whole GPU is the one that Ray gave. A share of one is put on a device by the ledger (`see_only`), which knows
    bytes where Ray knows fractions. Which GPUs several ranks have, only they will know.
    """
    here = ray.get_runtime_context().get_node_id()
    gpus = gpus_per_rank(settings, platform)
    if settings.ranks > 1 and gpus:
        each = settings.ranks // max(1, len(nodes))
        return tuple(Rank(node) for node in (nodes or (here,)) for _ in range(each if nodes else settings.ranks))
    if gpus == 1:
        return (Rank(here, int(ray.get_gpu_ids()[0])),)
    return (Rank(here),)


def see_only(settings: ModelSettings, platform: Platform, hold: Hold) -> None:
    """Have this process, and the engine it starts, see the device of its share of a GPU and no other."""
    if 0 < gpus_per_rank(settings, platform) < 1:
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # NVML's, by which the ledger counts
        os.environ["CUDA_VISIBLE_DEVICES"] = hold.on.rpartition("/")[2]


def sized(
    settings: ModelSettings, platform: Platform, holds: tuple[Hold, ...], ranks: int, device_bytes: int | None
) -> ModelSettings:
    """The settings with what fits into the grant.

    On a GPU vLLM asks for `gpu_memory_utilization` of the device to be free before it starts, whatever it will use:
    that is the grant's share of it.

    Args:
        ranks: of the engine, that share a hold.
        device_bytes: the whole device; None: not known.
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
    """The size of a model's weights where they are on this machine; 0 where they have yet to come."""
    if settings.engine == "simulated":
        return 0
    folder = Path(model_path(settings))
    if not folder.is_dir():
        found = _in_cache(settings.path)
        if found is None:
            return 0
        folder = found
    return sum(file.stat().st_size for pattern in WEIGHT_FILES for file in folder.glob(pattern))


def _in_cache(name: str) -> Path | None:
    """The folder of a Hugging Face model that has been downloaded before."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, OSError):
        return None


class Devices:
    """What the devices have, asked of the quota actor once in an engine's start, and only where that matters."""

    def __init__(self, actor: QuotaActor, settings: ModelSettings, platform: Platform) -> None:
        self._actor, self._settings, self._platform = actor, settings, platform
        self._found: dict[str, tuple[int, int]] | None = None

    def smallest_bytes(self, ranks: tuple[Rank, ...]) -> int | None:
        """What leases can have of the smallest device of the nodes of these ranks; None: not known, or not needed to
        say what the engine asks for."""
        settings = self._settings
        if settings.memory_gb is not None or settings.kv_cache_gb is not None or settings.engine == "simulated":
            return None
        nodes = {rank.node for rank in ranks}
        sizes = (size for key, (_, size) in self._all().items() if key.rpartition("/")[0] in nodes)
        return min(sizes, default=None)

    def whole_bytes(self, key: str) -> int | None:
        """The memory of a device, reserved part and all; None: not known, or not needed to size the engine."""
        if self._platform != "gpu" or self._settings.engine == "simulated":
            return None
        return self._all().get(key, (None,))[0]

    def _all(self) -> dict[str, tuple[int, int]]:
        if self._found is None:
            try:
                self._found = self._actor.devices(DEVICES_S)
            except AWAY:
                return {}
        return self._found


def _my_name() -> str:
    from ray import serve

    try:
        return serve.get_replica_context().replica_id.unique_id
    except serve.exceptions.RayServeException:
        return f"process-{os.getpid()}"
