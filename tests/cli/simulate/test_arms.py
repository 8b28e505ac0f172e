"""What is compared: a change is found where it belongs, checked like a file, and makes a difference."""

from __future__ import annotations

from typing import Any

import pytest

from autoscaling.simulator import PROFILES
from serve_app.cli.simulate import Configuration, GpuBound, arms_of, changed, level_of, what_if_of, world_of
from serve_app.errors import BadRequest, ConfigError
from serve_app.settings import parse

DATA: dict[str, Any] = {
    "models": [{"name": "chat", "path": "a"}, {"name": "v1.5", "path": "b", "replicas": {"max_replicas": 2}}]
}


def after(*texts: str, data: dict[str, Any] | None = None) -> Any:
    found = Configuration(data or DATA, parse(data or DATA))
    for text in texts:
        found = changed(found, what_if_of(text))
    return found.settings


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("max_num_seqs=128", [128, 128]),
        ("chat.max_num_seqs=128", [128, 64]),
        ("v1.5.max_num_seqs=128", [64, 128]),
        ("models.v1.5.max_num_seqs=128", [64, 128]),
        ("models.0.max_num_seqs=128", [128, 64]),
    ],
)
def test_a_key_without_a_model_is_that_of_every_model(text: str, sizes: list[int]) -> None:
    assert [model.max_num_seqs for model in after(text).models] == sizes


def test_one_what_if_may_have_several_changes() -> None:
    found = after("max_replicas=8,replicas.min_replicas=2,admission.max_queued=5,chat.buckets_gb=[1,2]")
    assert [(model.replicas.min_replicas, model.replicas.max_replicas) for model in found.models] == [(2, 8), (2, 8)]
    assert found.admission.max_queued == 5
    assert found.models[0].buckets_gb == (1, 2)


def test_a_change_leaves_the_configuration_as_it_was() -> None:
    base = Configuration(DATA, parse(DATA))
    changed(base, what_if_of("max_replicas=9"))
    assert parse(base.data) == base.settings


def test_a_preset_changes_what_it_says_and_a_file_without_models_has_the_built_in_one() -> None:
    data = {"models": [{"name": "chat", "path": "a", "preset": "latency"}]}
    assert (
        after("preset=throughput", data=data).models[0].max_num_seqs
        == parse({"models": [{"name": "chat", "path": "a", "preset": "throughput"}]}).models[0].max_num_seqs
    )
    assert after("max_num_seqs=3", data={"router": {"replicas": 2}}).models[0].max_num_seqs == 3


def test_a_level_is_a_change_of_its_class() -> None:
    found = changed(Configuration(DATA, parse(DATA)), level_of("realtime=0.8s"))
    assert found.settings.admission.classes["critical"].ttft_slo_s == 0.8


@pytest.mark.parametrize("text", ["normal", "normal=", "nomal=2s", "normal=soon", "=2"])
def test_a_wrong_level_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match=f"--level {text}: give CLASS=SECONDS, such as normal=2s, of low, normal"):
        level_of(text)


@pytest.mark.parametrize("text", ["max_num_seqs", "=4", "a=[1"])
def test_a_what_if_without_key_or_value_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="--what-if"):
        what_if_of(text)


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ("max_num_seq=4", "models.0.max_num_seq"),
        ("max_num_seqs=0", "models.0.max_num_seqs"),
        ("admission.max_queud=4", "admission.max_queud"),
        ("min_replicas=5", "models.0.replicas"),
        ("models.7.path=x", "models.7.path"),
        ("chat.path.x=1", "models.0.path.x"),
    ],
)
def test_a_wrong_change_is_an_error_of_its_field(text: str, param: str) -> None:
    with pytest.raises(ConfigError, match=f"^--what-if {text}: {param}") as caught:
        after(text)
    assert (caught.value.param or "").startswith(param)


def test_arms_are_all_policies_with_all_worlds() -> None:
    profiles = dict.fromkeys(("chat", "v1.5"), PROFILES["8b-l4"])
    worlds = {text: world_of(after(text), profiles, GpuBound()) for text in ("max_replicas=4", "max_num_seqs=8")}
    unchanged = world_of(parse(DATA), profiles, GpuBound())
    assert [arm.name for arm in arms_of(["a"], unchanged, {})] == ["a"]
    assert [arm.name for arm in arms_of(["a", "b"], unchanged, {})] == ["a", "b"]
    assert [arm.name for arm in arms_of(["a"], unchanged, worlds)] == ["unchanged", "max_replicas=4", "max_num_seqs=8"]
    both = arms_of(["a", "b"], unchanged, worlds)
    assert [arm.name for arm in both][:2] == ["a unchanged", "a max_replicas=4"]
    assert len({(arm.policy, arm.what_if) for arm in both}) == 6
    with pytest.raises(BadRequest, match="enforce_eager=true: it changes nothing that is simulated"):
        arms_of(["a"], unchanged, {"enforce_eager=true": world_of(after("enforce_eager=true"), profiles, GpuBound())})
