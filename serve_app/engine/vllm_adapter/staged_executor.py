"""vLLM's ranks started by Ray, in a replica's placement group (private in vLLM 0.32.0: `v1.executor.ray_executor_v2`).

vLLM accepts bundles of at most one GPU, and Ray may split the bundles of one stage over nodes. A bundle that holds a
whole stage cannot be split, but then each rank must start in the bundle of its stage. vLLM sorts bundles by node, its
own first, and assigns ranks in that order: here every bundle counts once for each of its ranks.

Invariant: ranks `k * T` to `k * T + T - 1`, a tensor-parallel group of size T, are in one bundle.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import ray
from ray.util import get_current_placement_group
from vllm.config import ParallelConfig, VllmConfig
from vllm.v1.executor import Executor, ray_executor_v2
from vllm.v1.executor.ray_utils import get_bundles_sorted_by_node


def ray_executor_class(config: VllmConfig, *, staged: bool) -> type[Executor]:
    """The executor for a configuration whose backend is "ray"; `staged`: a bundle of its group holds a whole stage.

    Sets this replica's placement group in the configuration and its cluster in the environment: EngineCore is a
    separate process and finds neither by itself.
    """
    config.parallel_config.placement_group = get_current_placement_group()
    # vLLM sets it unless VLLM_WORKER_MULTIPROC_METHOD is set; without it EngineCore joins the machine's newest Ray
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    if not staged:
        chosen: type[Executor] = Executor.get_class(config)
        return chosen
    os.environ.pop("VLLM_RAY_BUNDLE_INDICES", None)  # it orders bundles of one rank only
    return StagedRayExecutor


@contextlib.contextmanager
def _patched(**functions: Any) -> Iterator[None]:
    """Replace functions of vLLM's module by name during the block."""
    before = {name: getattr(ray_executor_v2, name) for name in functions}
    vars(ray_executor_v2).update(functions)
    try:
        yield
    finally:
        vars(ray_executor_v2).update(before)


def _connect(parallel_config: ParallelConfig, *_: Any, **__: Any) -> None:
    """Connect without vLLM's check for one GPU per bundle; the replica has checked its bundles
    (`serve_app.engine.start.rank_layout`)."""
    if not ray.is_initialized():
        ray.init(runtime_env=parallel_config.ray_runtime_env)


class StagedRayExecutor(ray_executor_v2.RayExecutorV2):
    """Starts each rank in the bundle of its stage. `parallel_config.placement_group` has one bundle per stage."""

    def _init_executor(self) -> None:
        ranks = self.parallel_config.tensor_parallel_size

        def bundle_of_each_rank(group: Any) -> list[tuple[int, str, str]]:
            return [bundle for bundle in get_bundles_sorted_by_node(group) for _ in range(ranks)]

        with _patched(initialize_ray_cluster=_connect, get_bundles_sorted_by_node=bundle_of_each_rank):
            super()._init_executor()
