"""A preset gives other settings their defaults, the user's own settings win, and vLLM is started with the outcome."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from serve_app.cli.commands import app
from serve_app.engine.start.engine_args import engine_arguments
from serve_app.errors import ConfigError
from serve_app.settings.presets import PRESETS, with_preset
from serve_app.settings.settings import ModelSettings, parse
from serve_app.settings.versions import engine_version
from tests.requires import requires


def model(**given: Any) -> ModelSettings:
    return parse({"models": [{"name": "m", **given}]}).models[0]


@pytest.mark.parametrize(
    ("preset", "seqs", "tokens", "sessions", "target"),
    [("latency", 8, 2048, 2, 5), ("balanced", 32, 8192, 8, 20), ("throughput", 64, 16384, 16, 40)],
)
def test_a_preset_is_the_size_and_the_token_budget_of_a_step(
    preset: str, seqs: int, tokens: int, sessions: int, target: float
) -> None:
    found = model(preset=preset)
    assert (found.max_num_seqs, found.max_num_batched_tokens, found.session_slots) == (seqs, tokens, sessions)
    assert found.replicas.target_ongoing_requests == target
    arguments = engine_arguments(found, "gpu")
    assert arguments["max_num_seqs"] == seqs + sessions
    assert arguments["max_num_batched_tokens"] == tokens
    assert arguments.get("performance_mode") == ("interactivity" if preset == "latency" else None)


def test_without_a_preset_everything_is_as_it_was() -> None:
    found = model()
    assert (found.preset, found.max_num_seqs, found.max_num_batched_tokens) == (None, 64, None)
    assert found.extra_engine_args == {}
    assert "max_num_batched_tokens" not in engine_arguments(found, "gpu")


def test_what_the_user_sets_wins_inside_other_settings_too() -> None:
    found = model(
        preset="latency",
        max_num_seqs=12,
        max_num_batched_tokens=None,
        replicas={"max_replicas": 3},
        extra_engine_args={"seed": 7},
    )
    assert (found.max_num_seqs, found.max_num_batched_tokens, found.session_slots) == (12, None, 2)
    assert (found.replicas.max_replicas, found.replicas.target_ongoing_requests) == (3, 5)
    assert found.extra_engine_args == {"performance_mode": "interactivity", "seed": 7}
    own = model(preset="latency", extra_engine_args={"performance_mode": "balanced"})
    assert engine_arguments(own, "gpu")["performance_mode"] == "balanced"
    assert model(preset="latency", replicas={"target_ongoing_requests": 9}).replicas.target_ongoing_requests == 9


@given(
    st.sampled_from(sorted(PRESETS)),
    st.fixed_dictionaries(
        {},
        optional={
            "max_num_seqs": st.integers(1, 64),
            "max_num_batched_tokens": st.none() | st.integers(128, 9000),
            "session_slots": st.integers(0, 9),
            "replicas": st.fixed_dictionaries({}, optional={"target_ongoing_requests": st.floats(1, 99)}),
            "extra_engine_args": st.dictionaries(st.sampled_from(["seed", "performance_mode"]), st.text(max_size=3)),
        },
    ),
)
def test_nothing_that_was_set_is_touched(preset: str, own: dict[str, Any]) -> None:
    found = with_preset({"preset": preset, **own})
    for name, value in own.items():
        if isinstance(value, dict):
            assert value.items() <= found[name].items()
        else:
            assert found[name] == value


def test_what_travels_to_routers_and_replicas_is_the_same_model() -> None:
    for preset in PRESETS:
        found = model(preset=preset, max_num_seqs=9)
        assert ModelSettings.model_validate(found.model_dump(mode="json")) == found


def test_an_embedding_model_s_token_budget_is_left_to_vllm() -> None:
    """It cannot read a prompt in pieces, so a budget below the model's length would end its start."""
    found = model(preset="latency", task="embed")
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (8, None)


def test_a_preset_written_out_is_the_same_engine() -> None:
    written = {"max_num_seqs": 32, "max_num_batched_tokens": 8192, "session_slots": 8}
    assert engine_version(model(preset="balanced"), on_cpu=True) == engine_version(model(**written), on_cpu=True)


@pytest.mark.parametrize("wrong", ["fast", "", 3, ["latency"], {"latency": 1}])
def test_an_unknown_preset_is_an_error_that_names_the_key(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"models\.0\.preset"):
        model(preset=wrong)


def test_a_token_budget_below_the_sequences_of_a_step_is_refused_before_an_engine_starts() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        model(preset="latency", max_num_seqs=2047)
    assert model(preset="latency", max_num_seqs=2046).engine_seqs == 2048


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "my.yaml"
    models = [{"name": "chat", "preset": "latency", "max_num_seqs": 12}, {"name": "other"}]
    path.write_text(yaml.safe_dump({"models": models}))
    return str(path)


def test_the_command_says_what_presets_mean_and_what_a_configuration_comes_to(file: str) -> None:
    every = CliRunner().invoke(app, ["presets"]).stdout.splitlines()
    assert [line for line in every if not line.startswith(" ")] == ["latency:", "balanced:", "throughput:"]
    assert "  replicas.target_ongoing_requests: 40.0" in every
    reported = CliRunner().invoke(app, ["presets", "--config", file]).stdout.splitlines()
    assert reported[:3] == [
        "chat: latency",
        "  max_num_seqs: 12 (set; the preset's is 8)",
        "  max_num_batched_tokens: 2048",
    ]
    assert reported[-1] == "other: no preset"


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_vllm_takes_it_as_it_is_meant(preset: str) -> None:
    requires("vllm")
    from vllm.engine.arg_utils import AsyncEngineArgs

    found = model(preset=preset, dtype="float32", max_model_len=512)
    config = AsyncEngineArgs(**engine_arguments(found, "cpu")).create_engine_config()
    scheduler = config.scheduler_config
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (
        found.engine_seqs,
        found.max_num_batched_tokens,
    )
    assert scheduler.enable_chunked_prefill
    assert config.performance_mode == ("interactivity" if preset == "latency" else "balanced")
