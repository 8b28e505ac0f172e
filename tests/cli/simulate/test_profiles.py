"""Each model has the profile that was given for it; a wrong one is an error that names the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pytest

from autoscaling.simulator import PROFILES
from serve_app.cli.simulate import chosen_profiles
from serve_app.errors import BadRequest
from serve_app.settings import ModelSettings

CHAT = ModelSettings(name="chat", path="some/model")
CODE = ModelSettings(name="team/code-8b", path="some/code")
FIGURES = asdict(PROFILES["8b-l4"]) | {"name": "mine", "source": "measured on our L4"}


def chosen(*given: str, files: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The names of the profiles of both models, where there are these files."""

    def read(name: str) -> str:
        figures = (files or {})[name]
        return figures if isinstance(figures, str) else json.dumps(figures)

    return {name: found.name for name, found in chosen_profiles(given, (CHAT, CODE), read).items()}


def test_a_models_own_profile_comes_before_that_of_all() -> None:
    assert chosen("8b-h100", "team/code-8b=8b-l4") == {"chat": "8b-h100", "team/code-8b": "8b-l4"}


def test_a_file_has_the_fields_of_a_profile() -> None:
    assert chosen("mine.json", files={"mine.json": FIGURES}) == {"chat": "mine", "team/code-8b": "mine"}


def test_the_built_in_model_and_a_simulated_engine_need_none() -> None:
    tiny = ModelSettings(name="tiny", path="tiny")
    played = ModelSettings.model_validate(
        {"name": "played", "path": "p", "engine": "simulated", "max_num_seqs": 9, "simulated": {"decode_step_s": 0.5}}
    )
    found = chosen_profiles([], [tiny, played], str)
    assert found["tiny"] is PROFILES["tiny-cpu"]
    assert (found["played"].step_s, found["played"].slots) == (0.5, 9)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "how fast is an engine of chat.* --profile chat=PROFILE.*tiny-cpu, 8b-l4"),
        (("8b-h10",), "no such profile; did you mean 8b-h100"),
        (("chta=8b-l4",), "no model 'chta'; did you mean chat"),
        (("chat=8b-l4",), "how fast is an engine of team/code-8b"),
    ],
)
def test_a_missing_profile_is_an_error_that_lists_all(given: tuple[str, ...], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        chosen(*given)


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ("{", "f.json: it is no JSON"),
        ("[]", "f.json: it is no JSON object"),
        (FIGURES | {"slot": 8}, "f.json: slot: there is no such field; did you mean slots"),
        ({name: value for name, value in FIGURES.items() if name != "step_s"}, "f.json: step_s: it is missing"),
        (FIGURES | {"step_s": "fast"}, "f.json: step_s: 'fast' is no number"),
        (FIGURES | {"step_s": True}, "f.json: step_s: True is no number"),
        (FIGURES | {"slots": 8.5}, "f.json: slots: 8.5 is no whole number"),
        (FIGURES | {"prefix_cache": 1}, "f.json: prefix_cache: 1 is neither true nor false"),
        (FIGURES | {"name": 3}, "f.json: name: 3 is no text"),
        (FIGURES | {"kv_token_s": -1.0}, "f.json: kv_token_s of profile 'mine' is -1.0, below 0"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_the_field(figures: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        chosen("f.json", files={"f.json": figures})
