"""An engine replica's request for memory: the place of its ranks, the bytes it needs, and its sizes within the grant.

A configuration that could not start fails here, with the setting's name.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import ray
from ray import serve

from serve_app.core.memory import DrainReport, EngineReply, EngineReport, Hold, Rank, StartReport
from serve_app.core.times import DEVICES_S, ENGINE_ANSWER_S
from serve_app.engine.start.engine_args import gpus_per_rank
from serve_app.engine.start.environment import Platform
from serve_app.engine.start.memory_grant import LOAD_STALL_S, MemoryGrant, MemoryMeter
from serve_app.engine.start.memory_history import MemoryHistory, history_of
from serve_app.engine.start.memory_size import MemoryNeed, estimated_need, kv_bytes_of, memory_request
from serve_app.engine.start.model_lookup import ModelFacts, stored
from serve_app.quota import QuotaActor
from serve_app.ray_adapter import AWAY
from serve_app.settings import GB, ModelSettings


@dataclass(eq=False)
class GrantRequest:
    """The memory of one start of an engine. The quota actor is asked for the sizes of devices once, and only if they
    are needed."""

    settings: ModelSettings
    platform: Platform
    actor: QuotaActor
    _sizes: dict[str, tuple[int, int]] | None = field(default=None, init=False)

    @functools.cached_property
    def need(self) -> MemoryNeed:
        """What a rank needs beside its KV pool, measured or estimated. At first it may ask the hub, for seconds."""
        facts = self._facts
        estimate = estimated_need(self.settings, self.platform, facts.weights_bytes or 0, facts.config)
        return estimate if self._history is None else self._history.need(estimate)

    @functools.cached_property
    def _facts(self) -> ModelFacts:
        return stored(self.settings)

    @functools.cached_property
    def _history(self) -> MemoryHistory | None:
        """What was measured on this machine; None: nothing of a simulated engine is."""
        if self.settings.engine == "simulated":
            return None
        facts = self._facts
        return history_of(self.settings, self.platform, facts.weights_bytes or 0, facts.config, time.monotonic)

    def ranks(self, nodes: tuple[str, ...]) -> tuple[Rank, ...]:
        """The places of the ranks: in this node's memory, on its GPUs, or on GPUs of the nodes of its bundles; one for
        all ranks if they share a machine's memory.

        A whole GPU is the one that Ray assigned. For a share of a GPU the ledger, which counts bytes where Ray counts
        fractions, chooses the device (`restrict_to_device`). The GPUs of several ranks are not known yet here.
        """
        here = ray.get_runtime_context().get_node_id()
        gpus = gpus_per_rank(self.settings, self.platform)
        if self.settings.ranks > 1 and gpus:
            nodes = nodes or (here,)
            return tuple(Rank(node) for node in nodes for _ in range(self.settings.ranks // len(nodes)))
        return (Rank(here, int(ray.get_gpu_ids()[0]) if gpus == 1 else None),)

    def grant(
        self,
        ranks: tuple[Rank, ...],
        lost: Callable[[str], None],
        drain: Callable[[float], None],
        drained: Callable[[], DrainReport | None],
        start: Callable[[int], StartReport | None],
    ) -> MemoryGrant:
        """A grant that is not requested yet, see `MemoryGrant.obtain`. The arguments: see `MemoryGrant`.

        Raises:
            ConfigError: no setting determines how much memory the engine needs.
        """
        settings = self.settings
        smallest_bytes = self.smallest_device_bytes(ranks)
        wanted_bytes, least_bytes = memory_request(settings, self.platform, self.need, smallest_bytes)
        together = settings.ranks // len(ranks)
        report = EngineReport(
            owner=replica_name(),
            model=settings.name,
            ranks=ranks,
            wanted_bytes=wanted_bytes * together,
            least_bytes=least_bytes * together,
            measures=settings.engine != "simulated",
            drain_s=settings.drain_s,
        )
        here = ray.get_runtime_context().get_node_id()
        meter = MemoryMeter(here, gpus=bool(gpus_per_rank(settings, self.platform)))
        stall_s = LOAD_STALL_S + (settings.simulated.start_s if settings.engine == "simulated" else 0.0)

        def send(report: EngineReport) -> EngineReply:
            return self.actor.engine(report, ENGINE_ANSWER_S)

        def measured(hold_bytes: int, kv_bytes: int) -> None:
            if self._history is not None:
                self._history.measured(hold_bytes // together - kv_bytes // settings.ranks)

        return MemoryGrant(
            report, send, AWAY, lost, drain, meter, stall_s, start=start, drained=drained, measured=measured
        )

    def restrict_to_device(self, hold: Hold) -> None:
        """Make only the device of its GPU share visible to this process and the engine it starts."""
        if 0 < gpus_per_rank(self.settings, self.platform) < 1:
            os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # NVML's order, which the ledger uses
            os.environ["CUDA_VISIBLE_DEVICES"] = hold.on.rpartition("/")[2]

    def granted_settings(self, hold: Hold, ranks: int) -> ModelSettings:
        """The settings with sizes that fit into the grant, of which `ranks` ranks share a hold. May wait for the actor.

        On a GPU, vLLM requires `gpu_memory_utilization` of the device to be free before it starts, whatever it will
        use; it is set to the grant's share of the device.
        """
        settings = self.settings
        platform = self.platform
        if settings.engine == "simulated":
            return settings
        changes: dict[str, float] = {}
        granted = hold.amount // ranks
        weights = self._facts.weights_bytes
        device_bytes = self._device_sizes().get(hold.on, (0,))[0] if platform == "gpu" else 0
        if device_bytes:
            changes["gpu_memory_utilization"] = min(1.0, granted / device_bytes)
        if platform == "cpu" or settings.kv_cache_gb is not None or (settings.memory_gb is not None and weights):
            kv_gb = kv_bytes_of(settings, self.need, granted) / GB
            if settings.memory_gb is None and settings.kv_cache_gb is not None:
                kv_gb = min(kv_gb, settings.kv_cache_gb)
            changes["kv_cache_gb"] = kv_gb
        return settings.model_copy(update=changes)

    def smallest_device_bytes(self, ranks: tuple[Rank, ...]) -> int | None:
        """Bytes for leases on the smallest device of these ranks' nodes; None: not known, or not needed for the
        memory request."""
        settings = self.settings
        if settings.memory_gb is not None or settings.kv_cache_gb is not None or settings.engine == "simulated":
            return None
        nodes = {rank.node for rank in ranks}
        sizes = (size for key, (_, size) in self._device_sizes().items() if key.rpartition("/")[0] in nodes)
        return min(sizes, default=None)

    def _device_sizes(self) -> dict[str, tuple[int, int]]:
        """By device: its bytes, and those for leases; empty while the actor is away."""
        if self._sizes is None:
            try:
                self._sizes = self.actor.devices(DEVICES_S)
            except AWAY:
                return {}
        return self._sizes


def replica_name() -> str:
    try:
        return serve.get_replica_context().replica_id.unique_id
    except serve.exceptions.RayServeException:
        return f"process-{os.getpid()}"
