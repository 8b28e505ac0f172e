"""The command line without a cluster: arguments, settings, keys, errors."""

from __future__ import annotations

import hashlib
import json
import shlex
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from serve_app.cli import keys
from serve_app.cli.commands import app, configured
from serve_app.cli.progress import replica_states
from serve_app.cli.up import curl_line, duration
from serve_app.cluster.local import Instance, InstanceState
from serve_app.errors import ConfigError
from serve_app.settings import Settings, parse
from tests.requires import requires

requires("linux")

KEY = "sk-0123456789abcdef"


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Result]:
    def invoke(*arguments: str, text: str | None = None) -> Result:
        return CliRunner().invoke(
            app, list(arguments), input=text, env={"SERVE_APP_STATE": str(tmp_path), "COLUMNS": "200"}
        )

    return invoke


def test_without_an_instance_everything_says_so(run: Callable[..., Result], tmp_path: Path) -> None:
    found = run("status", "--json")
    assert (found.exit_code, json.loads(found.stdout)) == (3, {"instance": "default", "state": "stopped"})
    shown = run("status")
    assert (shown.exit_code, shown.stdout) == (3, "default: nothing runs; start it with `serve-app up`\n")
    down = run("down", "--instance", "x")
    assert (down.exit_code, down.stdout) == (0, "x: nothing runs\n")
    asked = run("chat", "hello")
    assert asked.exit_code == 3
    assert "serve-app up" in asked.stderr
    assert list(tmp_path.iterdir()) == []  # asking leaves no trace


def test_an_instance_whose_processes_are_gone_does_not_count_as_running(
    run: Callable[..., Result], tmp_path: Path
) -> None:
    state = InstanceState("default", tmp_path)
    state.create()
    state.write(
        Instance("default", "default-gone", str(tmp_path / "run"), "127.0.0.1", 8000, url="http://127.0.0.1:8000")
    )
    (state.logs / "ray").mkdir(parents=True)
    shown = run("status")
    assert shown.exit_code == 3
    assert shown.stdout.endswith("start it with `serve-app up`; `serve-app logs` shows how it ended\n")
    assert run("down").stdout.endswith("default: nothing runs\n")
    assert state.read() is None


@pytest.mark.parametrize(
    ("yaml", "reported"),
    [
        ("modles: []", "modles: unknown key"),
        ("models: [{name: a, replicas: {min_replicas: 3, max_replicas: 2}}]", "min_replicas"),
        ("models: [1", "not YAML"),
    ],
)
def test_wrong_settings_are_named_before_anything_is_touched(
    run: Callable[..., Result], tmp_path: Path, yaml: str, reported: str
) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(yaml)
    result = run("up", "--config", str(file))
    assert result.exit_code == 2
    assert reported in result.stderr
    assert str(file) in result.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["my.yaml"]


def test_a_taken_port_is_named_before_anything_is_touched(run: Callable[..., Result], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = run("up", "--port", str(port))
    assert result.exit_code == 2
    assert f"port {port} is taken by" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_instance_that_runs_is_not_started_twice(run: Callable[..., Result], tmp_path: Path) -> None:
    state = InstanceState("default", tmp_path)
    state.create()
    state.acquire()
    result = run("up")
    state.release()
    assert result.exit_code == 1
    assert "already running" in result.stderr


def test_model_replaces_the_configured_models_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("models: [{name: a}, {name: b}]\nadmission: {max_queued: 7}\n")
    settings = configured(file, "Qwen/Qwen3-0.6B")
    assert [(model.name, model.path) for model in settings.models] == [("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")]
    assert settings.admission.max_queued == 7
    assert configured(None, None) == Settings()
    assert configured(None, "tiny").models[0].path == "tiny"


def test_a_folder_as_model_is_served_under_its_own_name(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    model = configured(None, str(folder)).models[0]
    assert (model.name, model.path) == ("my-model", str(folder))
    with pytest.raises(ConfigError, match="no such folder"):
        configured(None, str(tmp_path / "absent"))


def state_in(folder: Path) -> InstanceState:
    state = InstanceState("one", folder)
    state.create()
    return state


def test_a_generated_key_is_private_and_used_again(tmp_path: Path) -> None:
    state = state_in(tmp_path)
    first = keys.resolve(Settings(), state)
    second = keys.resolve(Settings(), state)
    assert first == second
    assert first.generated
    assert first.key is not None
    assert first.file == state.generated_key_file
    assert stat.S_IMODE(state.generated_key_file.stat().st_mode) == 0o600
    state.clear()
    assert keys.resolve(Settings(), state).key == first.key
    elsewhere = parse({"auth": {"key_file": str(tmp_path / "mine")}})
    assert keys.resolve(elsewhere, state).file == tmp_path / "mine"


def test_no_key_reaches_the_application_only_digests(tmp_path: Path) -> None:
    state = state_in(tmp_path)
    digest = hashlib.sha256(b"another key entirely").hexdigest()
    settings = parse({"auth": {"keys": [{"key_sha256": digest, "tenant": "t"}, {"key": KEY, "max_class": "critical"}]}})
    resolved = keys.resolve(settings, state)
    assert KEY not in resolved.settings.model_dump_json()
    assert resolved.key == KEY
    hidden = parse(resolved.settings.model_dump(mode="json"))  # the application's own check accepts it
    assert [one.key_sha256 for one in hidden.auth.keys] == [digest, hashlib.sha256(KEY.encode()).hexdigest()]
    assert [(one.tenant, one.max_class) for one in hidden.auth.keys] == [("t", "high"), ("default", "critical")]
    keys.keep(resolved)
    assert state.configured_key_file.read_text().strip() == KEY
    assert stat.S_IMODE(state.configured_key_file.stat().st_mode) == 0o600
    state.clear()
    assert not state.configured_key_file.exists()
    generated = keys.resolve(Settings(), state)
    assert str(generated.key) not in generated.settings.model_dump_json()
    only_digests = keys.resolve(parse({"auth": {"keys": [{"key_sha256": digest}]}}), state)
    assert (only_digests.key, only_digests.file) == (None, None)


def test_commands_of_the_machine_have_an_operators_key_where_the_configuration_has_one(tmp_path: Path) -> None:
    first = {"key": KEY, "tenant": "people"}
    operator = {"key": f"{KEY}-operator", "admin": True}
    state = state_in(tmp_path)
    assert keys.resolve(parse({"auth": {"keys": [first, operator]}}), state).key == operator["key"]
    assert keys.resolve(parse({"auth": {"keys": [first]}}), state).key == KEY


def test_the_curl_line_is_one_shell_command_with_valid_json() -> None:
    words = shlex.split(curl_line("http://127.0.0.1:8000", KEY, Settings()))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert f"Authorization: Bearer {KEY}" in words
    assert json.loads(words[words.index("-d") + 1])["model"] == "tiny"
    embedding = shlex.split(curl_line("u", None, parse({"models": [{"name": "e", "task": "embed"}]})))
    assert embedding[1] == "u/v1/embeddings"


def test_states_are_reported_in_a_few_words() -> None:
    model = {"name": "tiny", "target": 2, "replicas": [{"state": "RUNNING"}, {"state": "PENDING_INITIALIZATION"}]}
    assert replica_states({"models": [model], "routers": [{"state": "RUNNING"}]}) == (
        "tiny 1/2 (pending initialization)  router 1"
    )
    assert [duration(5), duration(65), duration(3700)] == ["0m05s", "1m05s", "1h01m"]
