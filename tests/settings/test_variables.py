"""`${NAME}` in a configuration: read where the file is resolved, shown by its name wherever it is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from serve_app.app import build
from serve_app.cli import check_command
from serve_app.cli.check import read
from serve_app.cli.commands import configured
from serve_app.cli.deploy import export
from serve_app.errors import ConfigError
from serve_app.settings import Settings, application, changes, load, parse, read_file
from serve_app.settings.variables import escaped, masked, resolve

KEY = "sk-from-the-environment-0123456789"
FILE = """\
models:
  - {name: chat, path: "${FOLDER}/chat", max_num_seqs: "${SEQS}", chat_template: "costs $$5 and $${SEQS}"}
auth:
  keys:
    - {key: "${SERVE_KEY}", admin: true}
"""
ENVIRONMENT = {"FOLDER": "/srv/secret-place", "SEQS": "24", "SERVE_KEY": KEY}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "my.yaml"
    path.write_text(FILE)
    return path


def test_a_variable_is_read_from_the_environment_of_the_process_that_reads_the_file(file: Path) -> None:
    settings = load(file)
    (model,) = settings.models
    (key,) = settings.auth.keys
    assert (model.path, model.max_num_seqs, key.key) == ("/srv/secret-place/chat", 24, KEY)
    assert model.chat_template == "costs $5 and ${SEQS}"


@pytest.mark.parametrize(
    ("text", "path", "message"),
    [
        ("auth: {keys: [{key: '${ABSENT}'}]}", "auth.keys.0.key", "line 1: the variable ABSENT is not set"),
        ("models:\n- name: a\n  path: x${ABSENT}y", "models.0.path", "line 3: the variable ABSENT is not set"),
        ("models: [{name: a, path: '${1X}'}]", "models.0.path", "line 1: ${1X} names no variable"),
        ("models: [{name: a, path: '${X'}]", "models.0.path", "line 1: ${X names no variable"),
        ("models: [{name: a, path: '${}'}]", "models.0.path", "line 1: ${} names no variable"),
        ("admission: {tenants: {'${TEAM}': {}}}", "admission.tenants.${TEAM}", "a value, not for a key"),
    ],
)
def test_one_that_cannot_be_resolved_is_an_error_that_names_setting_and_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, path: str, message: str
) -> None:
    monkeypatch.delenv("ABSENT", raising=False)
    file = tmp_path / "my.yaml"
    file.write_text(text)
    (found,) = read(file).findings
    assert (found.code, found.path, found.severity) == ("wrong_value", path, "error")
    assert message in found.message
    with pytest.raises(ConfigError) as refused:
        load(file)
    assert refused.value.param == path


def test_an_export_has_the_names_and_the_process_that_builds_it_the_values(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = export(load(file), host=None, port=None, proxy_location="HeadOnly")
    assert [value for value in ENVIRONMENT.values() if value in text] == []
    args = yaml.safe_load(text)["applications"][0]["args"]
    assert args["models"][0]["path"] == "${FOLDER}/chat"
    assert args["auth"]["keys"][0]["key"] == "${SERVE_KEY}"
    assert args["auth"]["keys"][0]["key_sha256"] is None
    build(args)
    monkeypatch.delenv("SERVE_KEY")
    with pytest.raises(ConfigError, match=r"auth\.keys\.0\.key: the variable SERVE_KEY is not set") as refused:
        build(args)
    assert refused.value.param == "auth.keys.0.key"


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("models: [{name: a, memory_gb: '${SEQS}'}]", "models.0.memory_gb"),
        ("{models: [{name: a, gpus_per_rank: 0.5}], quota: {device_gb: '${SEQS}'}}", "quota.device_gb"),
    ],
)
def test_an_export_has_no_value_where_serve_s_controller_reads_it_itself(file: Path, text: str, path: str) -> None:
    file.write_text(f"{text}\n")
    settings = load(file)
    keyed = settings.with_key(KEY).with_names(settings.names)
    with pytest.raises(ConfigError, match="an export cannot have a variable here") as refused:
        export(keyed, host=None, port=None, proxy_location="HeadOnly")
    assert refused.value.param == path


def arguments(settings: Settings) -> dict[str, Any]:
    found: dict[str, Any] = application(settings.without_secrets())["args"]
    return found


def test_what_is_deployed_holds_the_values_and_no_key(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(load(file))
    assert KEY not in json.dumps(args)
    for name in ENVIRONMENT:
        monkeypatch.delenv(name)
    build(args)  # on a node that has none of them


def test_a_plan_shows_the_names(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = arguments(load(file))
    monkeypatch.setenv("SEQS", "48")
    monkeypatch.setenv("FOLDER", "/srv/another-place")
    (engine, *_) = changes(before, arguments(load(file)), on_cpu=True)
    assert engine.effect == "restarted"
    assert engine.fields == (
        "max_num_seqs: ${SEQS} -> ${SEQS}, which has another value now",
        "path: ${FOLDER}/chat -> ${FOLDER}/chat, which has another value now",
    )
    literal = parse({"models": [{"name": "chat", "path": "/other", "max_num_seqs": 8}]})
    (engine, *_) = changes(before, arguments(literal), on_cpu=True)
    assert "max_num_seqs: ${SEQS} -> 8" in engine.fields
    assert not [one for one in engine.fields if "24" in one or "secret" in one]
    assert {one.effect for one in changes(before, before, on_cpu=True)} == {"unchanged"}


def test_a_finding_shows_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQS", "twenty-four")
    monkeypatch.setenv("FOLDER", "/srv/secret-place")
    file = tmp_path / "my.yaml"
    file.write_text("models: [{name: a, max_num_seqs: '${SEQS}'}]")
    assert [one.message for one in read(file).findings] == ["line 1: '${SEQS}' is no whole number"]
    file.write_text("models: [{name: a, path: '${FOLDER}'}]")
    settings = load(file)
    with check_command.Progress(check_command.Console(stderr=True)) as progress:
        machine = check_command.this_machine(settings.quota)
        (found,) = check_command.check(settings, machine, progress, here=True).findings
    assert found.message == "there is no folder ${FOLDER}"


def test_a_number_of_a_variable_is_not_in_a_comparison_with_another_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEAST", "7")
    file = tmp_path / "my.yaml"
    file.write_text("models: [{name: a, replicas: {min_replicas: '${LEAST}', max_replicas: 5}}]")
    (wrong,) = read_file(file).wrong
    assert wrong.message == "min_replicas (${LEAST}) is above max_replicas (5)"


def test_another_model_of_the_command_line_leaves_the_other_names(file: Path) -> None:
    settings = configured(file, "tiny")
    assert settings.names == {"auth": {"keys": {"0": {"key": "${SERVE_KEY}"}}}}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("a${}XY ", max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_what_was_resolved_can_be_written_and_resolved_again(value: Any) -> None:
    assert resolve(escaped(value), {}).data == value
    assert resolve(escaped(value), {}).names == {}
    assert resolve(escaped(value), {}).wrong == ()


@given(st.text("a$ {}N", max_size=12), st.text("xyz", min_size=1, max_size=3))
def test_a_dollar_that_begins_no_variable_stays(text: str, value: str) -> None:
    resolved = resolve([text], {"N": value})
    if not resolved.wrong and "$$" not in text and "${" not in text:
        assert resolved.data == [text]


def test_a_value_is_masked_only_where_it_stands_alone() -> None:
    data = {"a": {"b": "2", "c": "long/2"}}
    names = {"a": {"b": "${B}", "c": "${C}"}}
    assert masked("2 of 20, long/2 and x2", data, names, ("a",)) == "${B} of 20, ${C} and x2"
    assert masked("2", data, names, ("z",)) == "2"
