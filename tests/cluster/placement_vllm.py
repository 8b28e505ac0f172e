"""vLLM itself on the counted GPUs of the lab's nodes: its Ray executor, a worker process for each rank, the CPU build.

Only what asks about hardware is changed: the platform says that Ray counts its devices as GPUs, and a worker takes the
GPUs that Ray counted for it as its devices. Placement, ranks, executor and model are vLLM's and ours.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import ray
from ray.util import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from vllm.platforms import current_platform
from vllm.v1.executor import ray_executor_v2

from serve_app.engine import deployment
from serve_app.engine.start import environment, rank_layout
from serve_app.engine.start.engine_args import placement
from serve_app.engine.vllm_adapter import staged_executor
from serve_app.errors import EngineFailed
from serve_app.settings.settings import ModelSettings
from tests.e2e.one_engine import complete
from tests.waiting import during, patient

REPORTS = "PLACEMENT_RANKS"  # the folder in which each rank says where it is
PLACED_S = 30.0  # the nodes are there already
NOTICED_S = 60.0  # vLLM looks after its workers every 5 s; Ray has to find the node dead first
TICK_S = 0.2


class CountedGpuWorker(ray_executor_v2.RayWorkerProc):
    """A rank of vLLM's on the CPU, with the GPU that Ray counted for it."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        context = ray.get_runtime_context()
        self.seen = context.get_node_id(), [int(gpu) for gpu in context.get_accelerator_ids()["GPU"]]
        return self.seen

    def initialize_worker(self, local_rank: int, *args: Any, **kwargs: Any) -> None:
        super().initialize_worker(local_rank, *args, **kwargs)
        # the CPU build leaves this out with eager execution, and its pipelines then have no buffers
        self.worker.worker.model_runner.profile_run()
        node, gpus = self.seen
        report = {"rank": self.worker.rank, "local_rank": local_rank, "node": node, "gpus": gpus, "pid": os.getpid()}
        (Path(os.environ[REPORTS]) / f"{self.worker.rank}.json").write_text(json.dumps(report))


class CountedGpuExecutor(staged_executor.StagedRayExecutor):
    """Our executor where vLLM takes the counted GPUs for its own."""

    def _init_executor(self) -> None:
        current_platform.ray_device_key = "GPU"
        ray_executor_v2.RayWorkerProc = CountedGpuWorker
        super()._init_executor()


@ray.remote(num_cpus=1)
class Replica:
    """What an engine replica does from its start on, without Serve around it."""

    async def start(self, settings: dict[str, Any]) -> float:
        """Check the layout, start the engine; returns seconds."""
        environment.platform = lambda: "gpu"
        staged_executor.StagedRayExecutor = CountedGpuExecutor
        self._model = ModelSettings.model_validate(settings)
        self._layout = rank_layout.layout_of_this_replica(self._model, environment.platform())
        started = time.monotonic()
        self._backend = deployment.make_backend(self._model)
        await self._backend.start()
        return time.monotonic() - started

    async def complete(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """The greedy continuation of each prompt."""
        name = self._model.name
        numbered = list(enumerate(prompts))
        return [await complete(self._backend, name, number, prompt, max_tokens) for number, prompt in numbered]

    async def unhealthy(self) -> tuple[str, float]:
        """What Serve's health check says once it fails, and seconds until vLLM itself has noticed; bounded."""
        started = time.monotonic()
        reported = ""
        noticed = -1.0
        for _ in during(patient(NOTICED_S)):
            if noticed < 0 and not self._backend.alive:
                noticed = time.monotonic() - started
            try:
                await self._layout.check()
            except EngineFailed as error:
                reported = error.message
            if noticed >= 0 and reported:
                break
            await asyncio.sleep(TICK_S)  # between two looks: neither Ray nor vLLM tells by itself
        return reported, noticed


def run(settings: dict[str, Any], folder: str) -> Any:
    """Start a replica where Ray places its bundles; returns its handle and its group."""
    options = placement(ModelSettings.model_validate(settings), "gpu")
    group = placement_group(options["placement_group_bundles"], options["placement_group_strategy"])
    assert group.wait(patient(PLACED_S))
    actor = Replica.options(  # type: ignore[attr-defined]
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0, True),
        runtime_env={
            "env_vars": {
                REPORTS: folder,
                # four ranks on two cores: a thread each, wherever the kernel wants it
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": "1",
                "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # as operators set it; vLLM then leaves RAY_ADDRESS to us
            }
        },
    ).remote()
    return actor, group
