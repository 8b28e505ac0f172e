"""Which changes of the configuration give which deployment another version, and so replace its replicas."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from ray.serve._private.build_app import build_app

from serve_app import settings as configuration
from serve_app.app import build
from serve_app.names import BATCH_WORKER, ROUTER, deployment_of
from serve_app.settings import DEFAULT_KV_CACHE_GB, AutoscaleSettings, ModelSettings, SimulatedSettings
from serve_app.settings.versions import code_version, engine_version

MODEL = ModelSettings(name="a")
# Another value for each field; `test_every_field_is_here` keeps the list whole.
OTHERWISE: dict[str, Any] = {
    "name": "b",
    "path": "/models/other",
    "generation": 1,
    "engine": "simulated",
    "task": "embed",
    "max_image_pixels": 1_000_000,
    "max_audio_s": 60.0,
    "max_audio_hz": 48_000,
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "replicas": {"min_replicas": 2, "max_replicas": 5},
    "dtype": "bfloat16",
    "quantization": "fp8",
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "preset": "balanced",
    "batching": {"preset": "dynamic-32"},
    "max_long_seqs": 16,
    "long_from_tokens": 200,
    "session_slots": 4,
    "max_session_share": 0.25,
    "buckets_gb": [0.5, 1.0],
    "max_num_batched_tokens": 8192,
    "kv_cache_gb": 2.0,
    "kv_cache_min_gb": 1.0,
    "memory_gb": 20.0,
    "gpu_memory_utilization": 0.5,
    "enable_prefix_caching": False,
    "enforce_eager": True,
    "tool_parser": "hermes",
    "tool_strict": False,
    "reasoning_parser": "qwen3",
    "chat_template": "{{ messages }}",
    "media_domains": ["example.org"],
    "prices": {"prompt_per_million": 1.0},
    "cpus_per_rank": 2.0,
    "gpus_per_rank": 0.5,
    "accelerator_type": "H200",
    "grammar_cpu_s": 5.0,
    "health_stall_s": 5.0,
    "drain_s": 5.0,
    "extra_engine_args": {"seed": 1},
    "simulated": {"decode_step_s": 1.0},
}


def changed(field: str, value: Any) -> ModelSettings:
    return ModelSettings.model_validate({"name": "a", field: value})


def version(model: ModelSettings, *, on_cpu: bool = False) -> str:
    return engine_version(model, on_cpu=on_cpu)


def fields(model: type[BaseModel]) -> list[str]:
    return list(model.model_fields)


def test_every_field_is_here() -> None:
    assert set(OTHERWISE) == set(fields(ModelSettings))
    for field, value in OTHERWISE.items():
        assert getattr(changed(field, value), field) != getattr(MODEL, field), field


@pytest.mark.parametrize("field", fields(ModelSettings))
def test_every_setting_of_a_model_but_the_live_ones_replaces_its_replicas(field: str) -> None:
    other = version(changed(field, OTHERWISE[field]))
    live = (
        "max_session_share",
        "replicas",
        "drain_s",
        "batching",
        "buckets_gb",
        "max_long_seqs",
        "long_from_tokens",
        "prices",
    )
    assert (other == version(MODEL)) == (field in live)


@pytest.mark.parametrize("field", fields(AutoscaleSettings))
def test_no_scaling_bound_replaces_a_replica(field: str) -> None:
    values = {"min_replicas": 0, "metrics_interval_s": 2.0, "count_batch_rows": True, "policy": "slo", "advise": "slo"}
    value = values.get(field, 7)
    assert value != getattr(MODEL.replicas, field)
    bounds = {"max_replicas": 9, field: value}
    assert version(changed("replicas", bounds)) == version(MODEL)


@pytest.mark.parametrize("field", fields(SimulatedSettings))
def test_every_rate_and_the_script_of_the_simulated_engine_does(field: str) -> None:
    value = ({"text": "hello"},) if field == "script" else 77
    assert version(changed("simulated", {field: value})) != version(MODEL)


def test_a_version_is_the_same_for_equal_settings_and_another_for_another_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = version(MODEL), code_version("router")
    assert (version(ModelSettings(name="a")), code_version("router")) == before
    monkeypatch.setattr("serve_app.settings.versions.RELEASE", "99.0")
    assert version(MODEL) != before[0]
    assert code_version("router") != before[1]


# What a setting is where it is not set, by vLLM's build.
OF_ITSELF: dict[bool, dict[str, Any]] = {
    False: {"gpus_per_rank": 1},
    True: {"gpus_per_rank": 0, "kv_cache_gb": DEFAULT_KV_CACHE_GB, "kv_cache_min_gb": DEFAULT_KV_CACHE_GB},
}


def written_out(chosen: Collection[str], *, on_cpu: bool) -> ModelSettings:
    """The model with these of its defaults in its configuration."""
    defaults = ModelSettings(name="a").model_dump(mode="json") | OF_ITSELF[on_cpu]
    written = ModelSettings.model_validate({"name": "a"} | {name: defaults[name] for name in chosen})
    if on_cpu and "kv_cache_min_gb" in chosen and "kv_cache_gb" not in chosen:
        return written.model_copy(update={"kv_cache_gb": DEFAULT_KV_CACHE_GB})
    return written


@pytest.mark.parametrize("on_cpu", [False, True], ids=["gpu", "cpu"])
@pytest.mark.parametrize("field", fields(ModelSettings))
def test_the_default_of_every_setting_written_out_restarts_nothing(field: str, on_cpu: bool) -> None:
    assert version(written_out([field], on_cpu=on_cpu), on_cpu=on_cpu) == version(MODEL, on_cpu=on_cpu)


@pytest.mark.parametrize("on_cpu", [False, True])
@given(chosen=st.sets(st.sampled_from(fields(ModelSettings))))
def test_any_defaults_that_are_written_out_restart_nothing(on_cpu: bool, chosen: set[str]) -> None:
    assert version(written_out(chosen, on_cpu=on_cpu), on_cpu=on_cpu) == version(MODEL, on_cpu=on_cpu)


@pytest.mark.parametrize("field", fields(SimulatedSettings))
def test_the_default_of_every_rate_written_out_restarts_nothing(field: str) -> None:
    default = getattr(SimulatedSettings(), field)
    assert version(changed("simulated", {field: default})) == version(MODEL)


def test_what_a_build_has_of_itself_is_a_difference_for_the_other() -> None:
    assert version(changed("kv_cache_gb", DEFAULT_KV_CACHE_GB)) != version(MODEL)
    assert version(changed("gpus_per_rank", 0.5)) != version(MODEL)


def test_ready_configurations_of_one_model_give_it_one_version() -> None:
    """From one to the other no engine restarts; nor from what is served without a configuration to its ready file."""
    folder = Path(configuration.__file__).parent / "configs"
    models = [model for file in sorted(folder.glob("*.yaml")) for model in configuration.load(file).models]
    models += configuration.Settings().models
    by_place: dict[tuple[str, int], set[str]] = {}
    for model in models:
        by_place.setdefault((model.name, model.ranks), set()).add(version(model, on_cpu=model.path == "tiny"))
    assert len(by_place) < len(models)
    assert {place: len(found) for place, found in by_place.items()} == dict.fromkeys(by_place, 1)


def versions(config: dict[str, Any]) -> dict[str, str]:
    """By deployment, as they reach Serve's controller: through all the copies that Serve makes of a deployment."""
    application = build({**config, "auth": {"keys": [{"key": "sk-0123456789abcdef"}]}})
    built = build_app(application, name="serve_app")
    return {one.name: one._deployment_config.to_proto().version for one in built.deployments}


A = deployment_of("a")
B = deployment_of("b")


def test_a_change_of_one_model_leaves_all_other_versions_as_they_are() -> None:
    before = versions({"models": [{"name": "a"}, {"name": "b"}]})
    assert set(before) == {ROUTER, BATCH_WORKER, A, B}
    assert len(set(before.values())) == 4
    after = versions({"models": [{"name": "a"}, {"name": "b", "path": "/models/other"}]})
    assert {name for name in before if after[name] != before[name]} == {B}
    fewer = versions({"models": [{"name": "a"}]})
    assert fewer == {name: before[name] for name in (ROUTER, BATCH_WORKER, A)}


def test_nothing_outside_the_models_replaces_any_replica() -> None:
    before = versions({"models": [{"name": "a"}]})
    outside = {
        "admission": {"max_queued": 5, "max_wait_s": 9.0},
        "http": {"max_sequences": 1},
        "router": {"replicas": 3},
        "batch": {"workers": 2, "max_in_flight": 3},
    }
    assert versions({"models": [{"name": "a"}], **outside}) == before
