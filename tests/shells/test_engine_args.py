"""vLLM's arguments and Ray's resources, from settings alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app import settings as configuration
from serve_app.engine.engine_args import engine_arguments, executor, kv_cache_bytes, placement
from serve_app.engine.environment import bind_ranks, cpu_environment
from serve_app.settings import ModelSettings

CONFIGS = Path(configuration.__file__).parent / "configs"


def model(**changes: object) -> ModelSettings:
    return ModelSettings.model_validate({"name": "m", "path": "/models/m"} | changes)


def test_one_rank_needs_no_distributed_executor() -> None:
    assert executor(model(), "gpu") == executor(model(), "cpu") == "uni"


def test_ray_places_the_ranks_on_gpus_and_processes_run_them_on_the_cpu() -> None:
    parallel = model(tensor_parallel_size=2)
    assert executor(parallel, "gpu") == "ray"
    assert executor(parallel, "cpu") == "mp"


def test_every_rank_has_a_bundle_with_at_most_one_gpu() -> None:
    options = placement(model(tensor_parallel_size=4, pipeline_parallel_size=2), "gpu")
    assert options["placement_group_bundles"] == [{"CPU": 1.0, "GPU": 1.0}] * 8
    assert "num_gpus" not in options["ray_actor_options"]


def test_a_tensor_parallel_group_stays_on_one_node_and_a_pipeline_may_span_nodes() -> None:
    assert placement(model(tensor_parallel_size=4), "gpu")["placement_group_strategy"] == "STRICT_PACK"
    assert placement(model(pipeline_parallel_size=2), "gpu")["placement_group_strategy"] == "PACK"


def test_the_replica_of_a_single_rank_holds_the_gpu_itself() -> None:
    assert placement(model(gpus_per_rank=0.5), "gpu")["ray_actor_options"] == {"num_cpus": 1.0, "num_gpus": 0.5}


def test_no_gpu_is_asked_for_on_cpu_machines_or_by_the_simulated_engine() -> None:
    assert placement(model(tensor_parallel_size=2), "cpu")["placement_group_bundles"] == [{"CPU": 1.0}] * 2
    assert placement(model(engine="simulated"), "gpu")["placement_group_bundles"] == [{"CPU": 1.0}]


def test_kv_cache_is_always_sized_on_the_cpu_and_left_to_utilization_on_gpus() -> None:
    assert kv_cache_bytes(model(), "cpu") == 2**29
    assert kv_cache_bytes(model(), "gpu") is None
    assert kv_cache_bytes(model(kv_cache_gb=2), "gpu") == 2 * 2**30


def test_engine_arguments_carry_the_model_and_the_rules_of_the_house() -> None:
    arguments = engine_arguments(model(max_model_len=512, extra_engine_args={"seed": 7}), "cpu")
    assert arguments["model"] == "/models/m"
    assert arguments["served_model_name"] == ["m"]
    assert arguments["scheduling_policy"] == "priority"
    assert arguments["trust_remote_code"] is False
    assert arguments["max_model_len"] == 512
    assert arguments["seed"] == 7


def test_an_embedding_model_runs_as_a_pooling_model() -> None:
    arguments = engine_arguments(model(task="embed"), "cpu")
    assert (arguments["runner"], arguments["convert"]) == ("pooling", "embed")


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [
        ([0, 1], 1, "0"),
        ([0, 1], 2, "0|1"),
        ([0, 1, 2, 3], 1, "0,1"),
        ([0, 1, 2, 3], 2, "0|1"),
        ([0, 1, 2, 3, 4, 5, 6, 7], 2, "0,1|2,3"),
        ([3], 1, "3"),
        ([3], 2, "3|3"),
    ],
)
def test_the_model_gets_one_of_each_two_cores(cores: list[int], ranks: int, expected: str) -> None:
    assert bind_ranks(cores, ranks) == expected


def test_threads_follow_the_binding() -> None:
    assert cpu_environment(range(8), 1)["OMP_NUM_THREADS"] == "4"
    assert cpu_environment(range(2), 1)["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in cpu_environment(range(2), 2)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_configuration_is_valid(path: Path) -> None:
    settings = configuration.load(path)
    for entry in settings.models:
        assert len(placement(entry, "gpu")["placement_group_bundles"]) == entry.ranks


def test_the_cluster_configuration_scales_as_the_owner_asked() -> None:
    replicas = configuration.load(CONFIGS / "many-nodes.yaml").models[0].replicas
    assert (replicas.min_replicas, replicas.max_replicas, replicas.target_ongoing_requests) == (2, 8, 20)
    assert (replicas.upscale_delay_s, replicas.downscale_delay_s) == (30, 120)
