"""vLLM's ranks are started in the bundle of their stage; tests/cluster/test_placement_vllm.py runs the whole of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.requires import requires

requires("vllm")

from vllm.v1.executor import ray_executor_v2  # noqa: E402

from serve_app.engine.vllm_adapter import staged_executor  # noqa: E402

REPLACED = ("initialize_ray_cluster", "get_bundles_sorted_by_node")
BY_NODE = [(1, "node a", "10.0.0.1"), (2, "node a", "10.0.0.1"), (0, "node b", "10.0.0.2")]


def executor(monkeypatch: pytest.MonkeyPatch, tensor: int) -> Any:
    """Ours, of this tensor-parallel size, on three bundles; without the rest of vLLM."""
    monkeypatch.setattr(staged_executor, "get_bundles_sorted_by_node", lambda group: BY_NODE)
    made = object.__new__(staged_executor.StagedRayExecutor)
    monkeypatch.setattr(staged_executor.StagedRayExecutor, "__del__", lambda self: None, raising=False)
    vars(made)["parallel_config"] = SimpleNamespace(tensor_parallel_size=tensor)
    return made


def test_vllm_asks_for_bundles_and_checks_them_under_the_names_we_replace() -> None:
    names = ray_executor_v2.RayExecutorV2._init_executor.__code__.co_names
    assert set(REPLACED) <= set(names)


def test_every_bundle_has_the_ranks_of_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def start(self: Any) -> None:
        seen.extend(ray_executor_v2.get_bundles_sorted_by_node("the group"))

    monkeypatch.setattr(ray_executor_v2.RayExecutorV2, "_init_executor", start)
    executor(monkeypatch, tensor=2)._init_executor()
    assert [bundle for bundle, _, _ in seen] == [1, 1, 2, 2, 0, 0]
    assert set(seen) == set(BY_NODE)


def test_vllm_has_its_own_functions_back_even_when_the_engine_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(ray_executor_v2.RayExecutorV2, "_init_executor", fail)
    broken = executor(monkeypatch, tensor=2)
    before = [getattr(ray_executor_v2, name) for name in REPLACED]
    with pytest.raises(RuntimeError, match="out of memory"):
        broken._init_executor()
    assert [getattr(ray_executor_v2, name) for name in REPLACED] == before
