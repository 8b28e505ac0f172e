"""Whether a configuration fits: memory of devices, CPUs and GPUs of nodes, and what the model itself can."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.cli.check import Cluster, Finding, Node, check_fit, check_model
from serve_app.engine.start.environment import Platform
from serve_app.engine.start.memory_size import CPU_OVERHEAD_BYTES, GPU_OVERHEAD_BYTES, estimated_need
from serve_app.engine.start.model_lookup import ModelFacts
from serve_app.settings import GB, ModelSettings, parse

CPU_NODE = Node(4.0, 0.0, (12 * GB,))
GPU_NODE = Node(16.0, 4.0, (80 * GB,) * 4, ("H100",))
LLAMA = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 256, "head_dim": 32}
KV_PER_TOKEN = 2 * 4 * 4 * 32 * 2
ONE_CPU_NODE = Cluster((CPU_NODE,))


def found(
    *models: dict[str, Any],
    cluster: Cluster = ONE_CPU_NODE,
    platform: Platform = "cpu",
    weights: int = 0,
    config: dict[str, Any] | None = None,
    **rest: Any,
) -> list[Finding]:
    named = [{"name": f"m{index}", **model} for index, model in enumerate(models)]
    facts = [ModelFacts(weights_bytes=weights, config=config)] * len(models)
    settings = parse({"models": named, **rest})
    needs = [estimated_need(model, platform, weights, config) for model in settings.models]
    return check_fit(settings, facts, needs, cluster, platform)


def on_gpus(*models: dict[str, Any], **more: Any) -> list[Finding]:
    return found(*models, cluster=Cluster((GPU_NODE,)), platform="gpu", **more)


def brief(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(one.code, one.path) for one in findings]


def test_a_cache_of_500_gb_on_a_device_of_12_is_an_error_before_anything_starts() -> None:
    (finding,) = found({"kv_cache_gb": 500})
    assert (finding.code, finding.path, finding.severity) == ("memory_too_large", "models.0.kv_cache_gb", "error")
    assert "500.00 GB KV cache" in finding.message
    assert "the largest device has 12.00 GB" in finding.message


def test_the_bound_is_exact_and_counts_weights_and_overhead() -> None:
    room = 12 * GB - CPU_OVERHEAD_BYTES - 2 * GB
    assert found({"kv_cache_gb": room / GB}, weights=2 * GB) == []
    assert brief(found({"kv_cache_gb": room / GB + 1e-6}, weights=2 * GB)) == [
        ("memory_too_large", "models.0.kv_cache_gb")
    ]


def test_with_a_least_cache_that_fits_a_larger_one_is_no_error() -> None:
    assert found({"kv_cache_gb": 500, "kv_cache_min_gb": 1}) == []
    assert brief(found({"memory_gb": 13})) == [("memory_too_large", "models.0.memory_gb")]


def test_ranks_on_a_cpu_share_the_memory_of_one_machine_and_gpus_do_not() -> None:
    assert brief(found({"memory_gb": 7, "tensor_parallel_size": 2})) == [("memory_too_large", "models.0.memory_gb")]
    assert on_gpus({"memory_gb": 70, "tensor_parallel_size": 4}) == []


@pytest.mark.parametrize(("ranks", "fits"), [(1, False), (2, True)])
def test_weights_have_to_leave_room_in_the_share_of_a_gpu(ranks: int, fits: bool) -> None:
    findings = on_gpus({"tensor_parallel_size": ranks}, weights=100 * GB)
    assert brief(findings) == ([] if fits else [("no_kv_left", "models.0.gpu_memory_utilization")])


def test_memory_that_is_less_than_weights_and_overhead_leaves_no_cache() -> None:
    size = (GPU_OVERHEAD_BYTES + 16 * GB) / GB
    assert brief(on_gpus({"memory_gb": size}, weights=16 * GB)) == [("no_kv_left", "models.0.memory_gb")]
    assert on_gpus({"memory_gb": size + 1}, weights=16 * GB) == []


def test_a_cache_holds_one_sequence_of_the_longest_length() -> None:
    exact = 8192 * KV_PER_TOKEN / GB
    assert found({"kv_cache_gb": exact, "max_model_len": 8192}, config=LLAMA) == []
    (finding,) = found({"kv_cache_gb": exact * 0.99, "max_model_len": 8192}, config=LLAMA)
    assert (finding.code, finding.path) == ("kv_below_length", "models.0.kv_cache_gb")
    assert found({"kv_cache_gb": exact * 0.99, "max_model_len": 8192}, config=LLAMA | {"sliding_window": 512}) == []


def test_cpus_and_gpus_of_a_replica_are_on_one_node() -> None:
    assert brief(found({"cpus_per_rank": 5})) == [("no_node", "models.0.cpus_per_rank")]
    assert brief(on_gpus({"tensor_parallel_size": 8})) == [("no_node", "models.0.tensor_parallel_size")]
    two = Cluster((GPU_NODE, GPU_NODE))
    staged = {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}
    assert found(staged, cluster=two, platform="gpu") == []  # a stage on each
    assert brief(on_gpus(staged)) == [("no_room", "models")]


def test_a_type_of_gpu_that_no_node_has_is_found() -> None:
    (finding,) = on_gpus({"accelerator_type": "H200"})
    assert (finding.code, finding.path) == ("no_accelerator", "models.0.accelerator_type")
    assert "there are: H100" in finding.message
    assert on_gpus({"accelerator_type": "H100"}) == []


def test_all_that_starts_at_first_has_room_together() -> None:
    three = {"replicas": {"min_replicas": 3, "max_replicas": 3}, "memory_gb": 4}
    assert found(three) == []
    (finding,) = found(three, {"memory_gb": 4, "cpus_per_rank": 2})
    assert finding.message == (
        "all replicas that start at first need 5 CPUs, 16.00 GB together, and the cluster has 4 CPUs, 12.00 GB"
    )
    assert found(three, {"memory_gb": 4, "replicas": {"min_replicas": 0}}) == []


def test_what_a_node_that_is_added_may_have_is_a_warning() -> None:
    growing = Cluster((CPU_NODE,), grows=True)
    findings = found({"kv_cache_gb": 500}, {"cpus_per_rank": 5}, cluster=growing)
    assert [(one.code, one.severity) for one in findings] == [("memory_too_large", "warning"), ("no_node", "warning")]
    assert all("a node that is added" in one.message for one in findings)
    assert found({"cpus_per_rank": 5}, cluster=Cluster((), grows=True)) == []  # nothing is known


def of_model(settings: dict[str, Any], facts: ModelFacts, *, here: bool = True) -> list[Finding]:
    model = ModelSettings.model_validate({"name": "a", "path": "org/a", **settings})
    return check_model("models.0", model, facts, here=here)


def test_what_this_machine_lacks_is_an_error_only_where_the_model_runs_here() -> None:
    for problem in ("no_such_folder", "offline", "hub_unreachable", "no_weights", "not_a_model"):
        facts = ModelFacts(problem, "refused")  # type: ignore[arg-type]
        assert [of_model({}, facts, here=here)[0].severity for here in (True, False)] == ["error", "warning"]
    for problem in ("no_such_model", "gated", "not_an_id"):
        assert of_model({}, ModelFacts(problem), here=False)[0].severity == "error"  # type: ignore[arg-type]


def test_a_model_that_chats_needs_a_template() -> None:
    without = ModelFacts(has_template=False)
    assert brief(of_model({}, without)) == [("no_chat_template", "models.0.chat_template")]
    assert of_model({"chat_template": "{{ messages }}"}, without) == []
    assert of_model({"task": "embed"}, without) == []
    assert of_model({}, ModelFacts(has_template=None)) == []


def test_a_length_beyond_the_model_s_own_and_heads_that_do_not_divide_are_found() -> None:
    config = LLAMA | {"max_position_embeddings": 4096}
    settings = {"max_model_len": 4097, "tensor_parallel_size": 3}
    assert [one.code for one in of_model(settings, ModelFacts(config=config))] == ["too_long", "heads"]
    assert of_model({"max_model_len": 4096, "tensor_parallel_size": 4}, ModelFacts(config=config)) == []
    stretched = config | {"rope_scaling": {"factor": 4.0}}
    assert of_model({"max_model_len": 4097}, ModelFacts(config=stretched)) == []
    for name, value in (("hf_overrides", {"rope_parameters": {"factor": 4.0}}), ("hf_config_path", "other")):
        reported = {"max_model_len": 16_384, "extra_engine_args": {name: value}}
        assert of_model(reported, ModelFacts(config=config)) == [], "vLLM reads another configuration"
    assert [one.code for one in of_model(settings, ModelFacts(config={"text_config": config}))] == ["too_long", "heads"]
