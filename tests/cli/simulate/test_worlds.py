"""A configuration means to the simulator what it means to production."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaling.simulator import PROFILES, ServeDelays
from serve_app.cli.simulate import GpuBound, notes_on, world_of
from serve_app.core.limits import Limits
from serve_app.errors import BadRequest, ConfigError
from serve_app.settings import Settings, parse
from serve_app.types import RequestClass

H100 = PROFILES["8b-h100"]
NO_BOUND = GpuBound()


def settings_of(models: dict[str, Any] | None = None, **rest: Any) -> Settings:
    """A configuration of one model."""
    return parse({"models": [{"name": "chat", "path": "some/model", **(models or {})}], **rest})


def test_replicas_limits_levels_and_the_queue_are_those_of_the_settings() -> None:
    settings = settings_of(
        {
            "max_num_seqs": 96,
            "tensor_parallel_size": 2,
            "memory_gb": 40,
            "max_num_batched_tokens": 4096,
            "drain_s": 30,
            "replicas": {
                "min_replicas": 0,
                "max_replicas": 7,
                "target_ongoing_requests": 48,
                "upscale_delay_s": 3,
                "downscale_to_zero_delay_s": 900,
            },
        },
        admission={
            "max_queued": 50,
            "classes": {"high": {"ttft_slo_s": 1.5}, "low": {"max_queued": 5}},
            "tenants": {"a": {"share": 0.5, "limits": {"max_concurrent": 3}}, "b": {}},
        },
        router={"replicas": 3},
    )
    world = world_of(settings, {"chat": H100}, NO_BOUND)
    (model,) = world.models
    assert (model.profile.slots, model.profile.gpus, model.profile.memory_bytes) == (96, 2, 40 * 10**9)
    assert model.profile.prefill_chunk_tokens == 4096 - 96
    assert (model.profile.step_s, model.profile.kv_tokens) == (H100.step_s, H100.kv_tokens)
    assert (model.scaling.min_replicas, model.scaling.max_replicas, model.scaling.first_replicas) == (0, 7, 0)
    assert model.scaling.target_ongoing == 48
    assert model.scaling.delays == ServeDelays(3.0, 120.0, to_zero_s=900.0)
    assert model.queue == settings.admission.queue_policy()
    assert model.drain_s == 30
    assert world.limits == {"a": Limits(max_concurrent=3)}
    assert {name: plan.ttft_slo_s for name, plan in world.classes.items()} == {RequestClass.HIGH: 1.5}
    assert world.routers == 3


def test_without_a_bound_there_are_nodes_for_all_replicas() -> None:
    settings = settings_of({"replicas": {"min_replicas": 20, "max_replicas": 500}})
    nodes = world_of(settings, {"chat": H100}, NO_BOUND).nodes
    assert (nodes.gpus, nodes.least, nodes.start_s) == (8, 3, 0.0)
    assert nodes.most * nodes.gpus >= 500


def test_a_bound_of_gpus_is_whole_nodes() -> None:
    nodes = world_of(settings_of(), {"chat": H100}, GpuBound(24, 4)).nodes
    assert (nodes.gpus, nodes.least, nodes.most) == (4, 6, 6)
    assert world_of(settings_of(), {"chat": H100}, GpuBound(3)).nodes.gpus == 3
    with pytest.raises(BadRequest, match="--gpus 12: give a multiple of --gpus-per-node"):
        GpuBound(12)
    with pytest.raises(ConfigError, match="no node has room for a replica of chat"):
        world_of(settings_of({"tensor_parallel_size": 4}), {"chat": H100}, GpuBound(2))


def test_a_replica_larger_than_the_configured_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="no node has room"):
        world_of(settings_of(quota={"device_gb": 24}), {"chat": H100}, NO_BOUND)


@given(
    low=st.integers(0, 40),
    more=st.integers(0, 40),
    slots=st.integers(1, 4096),
    ranks=st.sampled_from([1, 2, 4, 8, 16]),
    profile=st.sampled_from(sorted(PROFILES)),
)
def test_every_configuration_has_a_world_with_room_for_its_first_replicas(
    low: int, more: int, slots: int, ranks: int, profile: str
) -> None:
    replicas = {"min_replicas": low, "max_replicas": max(1, low + more)}
    settings = settings_of({"max_num_seqs": slots, "tensor_parallel_size": ranks, "replicas": replicas})
    world = world_of(settings, {"chat": PROFILES[profile]}, NO_BOUND)
    (model,) = world.models
    assert model.profile.slots == slots
    assert world.nodes.least * (world.nodes.gpus // ranks) >= low
    assert (model.scaling.min_replicas, model.scaling.max_replicas) == tuple(replicas.values())


def test_what_is_estimated_or_left_out_is_in_the_notes() -> None:
    settings = settings_of(
        {"max_long_seqs": 4, "tensor_parallel_size": 2},
        admission={"classes": {"high": {"itl_slo_s": 0.1}}, "tenants": {"a": {"over_limit": "wait"}}},
    )
    notes = "\n".join(notes_on(settings, {"chat": H100}, NO_BOUND))
    assert "estimates of data sheets" in notes
    assert "has the speeds of 1 GPUs, and a replica has 2" in notes
    assert "GPUs are never short" in notes
    assert "admission.classes.high.itl_slo_s, admission.tenants.a.over_limit, models.max_long_seqs" in notes
    bound = GpuBound(8)
    assert notes_on(settings_of(), {"chat": PROFILES["tiny-cpu"]}, bound) == []
