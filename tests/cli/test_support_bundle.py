"""`serve-app support-bundle`: what is in the file, what it says is missing, and that no secret is ever in it."""

from __future__ import annotations

import json
import stat
import tarfile
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from serve_app.cli import support_bundle
from serve_app.cli.command_line import EndpointOptions
from serve_app.cli.commands import app
from serve_app.cli.secret_values import SHOWN, Secrets, is_secret_name, without_secrets
from serve_app.cli.support_bundle import Bundle, Place, configuration, parts
from serve_app.cluster.local import InstanceState
from serve_app.settings.variables import escaped
from tests.cli.test_chat import KEY, reply, serve  # noqa: F401 - fixtures
from tests.effort import examples
from tests.requires import requires

requires("linux")

Run = Callable[..., Result]
Serve = Callable[[Callable[[BaseHTTPRequestHandler, Any], None]], str]
ROUTER_LOG = "ray/serve/replica_serve_app_Router_r1.log"
# as a key may be: visible ASCII, with the characters that JSON, YAML, Python and URLs write in other ways
KEYS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=16, max_size=40)
TOKENS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=6, max_size=40)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command in a folder of its own, where an instance has run and left its logs."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    state = InstanceState("default", tmp_path / "state")
    (state.logs / "ray/serve").mkdir(parents=True)
    (state.logs / ROUTER_LOG).write_text(f"INFO one\nINFO it was {KEY}\n")
    (state.logs / "driver.log").write_text("started\n")
    return lambda *arguments: CliRunner().invoke(
        app, ["support-bundle", *arguments], env={"SERVE_APP_STATE": str(tmp_path / "state"), "COLUMNS": "200"}
    )


def files(path: Path) -> dict[str, str]:
    """The files of a bundle, by their names in its folder."""
    with tarfile.open(path) as archive:
        found = {member.name.partition("/")[2]: archive.extractfile(member) for member in archive.getmembers()}
        return {name: file.read().decode() for name, file in found.items() if file is not None}


def endpoint(handler: BaseHTTPRequestHandler, _: Any) -> None:
    """Answers all but the quota."""
    if handler.path.startswith("/admin/quota"):
        reply(handler, 503, b'{"error": {"message": "the quota actor does not answer"}}')
    elif handler.path.startswith("/admin/audit"):
        reply(handler, 200, b'{"data": [{"id": "1"}], "has_more": false, "next_cursor": "1"}')
    elif handler.path.startswith("/admin/logs"):
        lines = [("router", "r1", "INFO one"), ("engine-m", "x1", "INFO two"), ("router", "r1", f"INFO it was {KEY}")]
        data = [
            {"time": None, "source": source, "replica": replica, "path": f"/logs/{replica}.log", "line": line}
            for source, replica, line in lines
        ]
        reply(handler, 200, json.dumps({"data": data}).encode())
    elif handler.path == "/metrics":
        reply(handler, 200, b"serve_app_waiting 0\n")
    else:
        reply(handler, 200, f'{{"data": [], "echo": "{handler.headers["Authorization"]}"}}'.encode())


def test_when_nothing_runs_it_has_what_is_there_and_says_what_is_missing(run: Run, tmp_path: Path) -> None:
    done = run("--output", "out.tar.gz", "--json")
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert printed["path"] == str(tmp_path / "out.tar.gz")
    assert set(printed["missing"]) == {"configuration", "status", "quota", "metrics", "models", "audit"}
    assert "nothing runs" in printed["missing"]["quota"]
    assert "missing: quota: nothing runs here" in done.stderr
    found = files(tmp_path / "out.tar.gz")
    assert set(found) == {
        "manifest.json",
        "versions.json",
        "packages.txt",
        "machine.json",
        "logs/driver.log",
        "logs/001-router-r1-replica_serve_app_Router_r1.log",
    }
    assert json.loads(found["manifest.json"])["missing"] == printed["missing"]
    assert "pydantic==" in found["packages.txt"]
    assert stat.S_IMODE((tmp_path / "out.tar.gz").stat().st_mode) == 0o600


def test_no_prompt_is_in_it_where_the_settings_ask_for_prompts_in_logs(
    run: Run,
    serve: Serve,  # noqa: F811
    tmp_path: Path,
) -> None:
    """In neither form of the log, of the files here and of an endpoint."""
    secret = "heron-in-the-reeds"
    text = f"INFO Request a of tenant 'x' has the prompt: {secret}"
    lines = ["INFO one", text, json.dumps({"level": "INFO", "message": text}), "INFO two"]
    (tmp_path / "state/default/logs" / ROUTER_LOG).write_text("".join(f"{line}\n" for line in lines))

    def answer(handler: BaseHTTPRequestHandler, body: Any) -> None:
        if handler.path.startswith("/admin/logs"):
            data = [
                {"time": None, "source": "router", "replica": "r1", "path": "/r1.log", "line": line} for line in lines
            ]
            reply(handler, 200, json.dumps({"data": data}).encode())
        else:
            endpoint(handler, body)

    for name, where in (("here", ()), ("there", ("--url", serve(answer), "--key", KEY))):
        assert run("--output", name, *where).exit_code == 0
        found = files(tmp_path / name)
        assert any("INFO two" in content for content in found.values())
        assert not any(secret in content for content in found.values())


def test_of_an_endpoint_it_has_the_figures_and_goes_on_after_a_refusal(run: Run, serve: Serve, tmp_path: Path) -> None:  # noqa: F811
    done = run("--url", serve(endpoint), "--key", KEY, "--output", "out.tar.gz")
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == str(tmp_path / "out.tar.gz")
    found = files(tmp_path / "out.tar.gz")
    assert found["metrics.txt"] == "serve_app_waiting 0\n"
    assert found["audit.jsonl"] == '{"id": "1"}\n'
    assert "does not answer" in json.loads(found["manifest.json"])["missing"]["quota"]
    assert KEY not in str(found)
    assert "[secret the API key of this command]" in found["models.json"]
    assert found["logs/000-router-r1-r1.log"] == "INFO one\nINFO it was [secret the API key of this command]\n"
    assert found["logs/001-engine-m-x1-x1.log"] == "INFO two\n"
    assert not any(name.endswith("driver.log") for name in found), "that is another application's, of this machine"
    assert "--config" in json.loads(found["manifest.json"])["missing"]["configuration"]


def test_of_a_context_it_has_what_its_endpoint_answers(
    run: Run,
    serve: Serve,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "config/serve-app"
    folder.mkdir(parents=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "night.key").write_text(f"{KEY}\n")
    (tmp_path / "night.key").chmod(0o600)
    night = {"url": serve(endpoint), "key_file": str(tmp_path / "night.key")}
    (folder / "contexts.yaml").write_text(yaml.safe_dump({"contexts": {"night": night}}))
    assert run("--context", "night", "--output", "out.tar.gz").exit_code == 0
    found = files(tmp_path / "out.tar.gz")
    assert {"status.json", "metrics.txt", "models.json", "audit.jsonl"} <= set(found)
    assert KEY not in str(found)


def test_a_bundle_replaces_no_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "out.tar.gz").write_text("mine")
    assert run("--output", "out.tar.gz").exit_code == 2
    assert (tmp_path / "out.tar.gz").read_text() == "mine"


def test_a_configuration_is_shown_with_the_names_of_its_secrets(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-of-a-variable-01")
    (tmp_path / "my.yaml").write_text(
        "auth: {keys: [{key: '${MY_KEY}', name: ops}, {key: sk-in-the-file-0123, tenant: acme}]}\n"
        "models: [{name: m, path: org/m, extra_engine_args: {hf_token: hf_0123456789}}]\n"
        "store: {url: 'postgresql://serve@db/keys'}\n"
    )
    assert run("--config", "my.yaml", "--output", "out.tar.gz").exit_code == 0
    found = files(tmp_path / "out.tar.gz")
    shown = yaml.safe_load(found["configuration.yaml"])
    assert shown["auth"]["keys"] == [
        {"key": "${MY_KEY}", "name": "ops"},
        {"key": "[secret auth.keys.key]", "tenant": "acme"},
    ]
    assert shown["models"][0]["extra_engine_args"] == {"hf_token": "[secret models.extra_engine_args.hf_token]"}
    assert shown["store"]["url"] == "postgresql://serve@db/keys"
    for secret in ("sk-of-a-variable-01", "sk-in-the-file-0123", "hf_0123456789"):
        assert secret not in str(found)
    assert len(json.loads(found["configuration.json"])["digest"]) == 64


def test_a_wrong_configuration_is_there_with_what_is_wrong(run: Run, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("auth: {keys: [{key: sk-in-the-file-0123, tenants: acme}]}\n")
    assert run("--config", "my.yaml", "--output", "out.tar.gz").exit_code == 0
    found = files(tmp_path / "out.tar.gz")
    assert "tenants" in str(json.loads(found["configuration.json"])["wrong"])
    assert "sk-in-the-file" not in str(found)


@settings(max_examples=examples(60), deadline=None)
@given(
    keys=st.lists(KEYS, min_size=1, max_size=3, unique=True),
    token=TOKENS,
    variable=TOKENS,
    password=KEYS,
    form=st.sampled_from([str, json.dumps, repr, yaml.safe_dump]),
)
def test_no_secret_of_the_settings_is_in_any_file(
    tmp_path_factory: pytest.TempPathFactory,
    keys: list[str],
    token: str,
    variable: str,
    password: str,
    form: Callable[[str], str],
) -> None:
    """In a configuration, and in whatever else repeats it: a log, an answer, the reason of a failure."""
    folder = tmp_path_factory.mktemp("bundle")
    secrets = [*keys, token, variable, password]
    data = {
        "auth": {"keys": [{"key": key, "name": f"name-{number}"} for number, key in enumerate(keys)]},
        "models": [{"name": "m", "extra_engine_args": {"nested": {"hf_token": token}, "note": form(token)}}],
        "batch": {"redis": {"url": "redis://db", "password": password}},
    }
    config = folder / "my.yaml"
    config.write_text(yaml.safe_dump(escaped(data) | {"store": {"url": "${STORE}"}}, allow_unicode=True))
    place = Place(EndpointOptions(state_dir=str(folder)), config=config)
    bundle = Bundle()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORE", variable)
        bundle.collect("configuration", lambda: configuration(place, bundle.secrets))
    bundle.collect("logs", lambda: {"logs/a.log": "\n".join(form(secret) for secret in secrets)})

    def fail() -> dict[str, str]:
        raise RuntimeError(" ".join(map(form, secrets)))

    bundle.collect("status", fail)
    path = folder / "out.tar.gz"
    bundle.write(path)
    found = files(path)
    assert list(bundle.missing) == ["status"]
    assert "configuration.yaml" in found
    for secret in secrets:
        for name, text in found.items():
            assert secret not in text.replace(SHOWN.partition("{")[0], ""), (name, secret)


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        ("key", True),
        ("key_sha256", True),
        ("hf_token", True),
        ("HF_TOKEN", True),
        ("PGPASSWORD", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("apiKey", True),
        ("max_queued_tokens", False),
        ("tokenizer", False),
        ("key_file", False),
        ("key_id", False),
        ("RAY_AUTH_TOKEN_PATH", False),
        ("name", False),
    ],
)
def test_which_names_hold_secrets(name: str, is_secret: bool) -> None:
    assert is_secret_name(name) is is_secret


def test_a_password_in_a_url_is_a_secret_wherever_the_url_stands() -> None:
    data = {"batch": {"files_url": "s3://user:pass%2Fword@host/path?token=abcdef0"}}
    secrets = Secrets()
    secrets.add_settings(data, {})
    shown = str(without_secrets(data, {}))
    for text in (shown, secrets.without("pass%2Fword pass/word abcdef0")):
        assert "word" not in text
        assert "abcdef0" not in text


def test_every_part_of_the_bundle_has_a_name_of_its_own() -> None:
    place = Place(EndpointOptions(state_dir="/nowhere"))
    names = [name for name, _ in parts(place, Secrets())]
    assert len(names) == len(set(names))
    assert names[0] == "configuration", "its secrets are known before any other part"
    assert {name for name, _, _ in support_bundle.FIGURES} <= set(names)
