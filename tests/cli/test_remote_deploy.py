"""`serve-app deploy --url`: what is sent, what is shown, and the exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from serve_app.cli import remote_deploy
from serve_app.settings import parse
from tests.cli.test_chat import KEY, reply, run, serve  # noqa: F401 - fixtures
from tests.cli.test_endpoint import error_body
from tests.requires import requires

requires("linux")

Serve = Callable[[Callable[[BaseHTTPRequestHandler, Any], None]], str]
SECRET = "sk-clear-0123456789abcdef"
FILE = """
models: [{name: a, engine: simulated, max_num_seqs: "${SEQS}"}]
auth: {keys: [{key: sk-clear-0123456789abcdef, name: ops, admin: true}]}
"""
CHANGE = {
    "deployment": "engine-a",
    "effect": "restarted",
    "why": "an engine cannot take this over while it runs",
    "fields": ["max_num_seqs: 64 -> 3"],
}
STAYS = {"deployment": "Router", "effect": "unchanged", "why": "the same settings", "fields": []}
NODE = {"resources": {"CPU": 64.0}, "device_bytes": [10**12]}
PLAN = {"changes": [CHANGE, STAYS], "nodes": [NODE], "replicas": {"engine-a": ["r1", "r2"]}}


class Application:
    """An endpoint that takes a deployment and answers looks at it, one state after the other."""

    def __init__(self, *states: str) -> None:
        self.states = list(states)
        self.bodies: list[Any] = []

    def __call__(self, request: BaseHTTPRequestHandler, body: Any) -> None:
        if request.headers["Authorization"] != f"Bearer {KEY}":
            reply(request, 403, error_body("this key may not deploy", "no_deploy_right"))
        elif request.command == "POST":
            self.bodies.append(body)
            plan = PLAN if body.get("plan_only") else {"id": "deploy_1", "state": "declaring"}
            reply(request, 200 if body.get("plan_only") else 202, json.dumps(plan).encode())
        else:
            assert request.path == "/admin/deploys/deploy_1"
            self._look(request)

    def _look(self, request: BaseHTTPRequestHandler) -> None:
        state = self.states.pop(0)
        if state == "away":
            reply(request, 503, error_body("no router", "no_controller"))
        else:
            found = {"id": "deploy_1", "state": state, "message": "no memory", "waits": {"engine-a": "updating"}}
            reply(request, 200, json.dumps(found).encode())


@pytest.fixture
def deploy(
    run: Callable[..., Result],  # noqa: F811
    serve: Serve,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Result]:
    monkeypatch.setattr(remote_deploy, "LOOK_S", 0.0)
    monkeypatch.setenv("SEQS", "3")
    file = tmp_path / "my.yaml"
    file.write_text(FILE)

    def command(application: Application, *arguments: str, key: str = KEY) -> Result:
        return run("deploy", "--config", str(file), "--url", serve(application), "--key", key, *arguments)

    return command


def test_what_the_file_has_is_sent_with_resolved_variables_and_no_key(deploy: Callable[..., Result]) -> None:
    application = Application("waiting", "away", "done")
    done = deploy(application)
    assert done.exit_code == 0, done.output
    assert "! engine-a (2 replicas): restarted" in done.stdout
    assert "Router" not in done.stdout
    (planned, sent) = application.bodies
    assert planned == sent | {"plan_only": True}
    assert SECRET not in json.dumps(application.bodies)
    given = sent["configuration"]
    assert given["models"] == [{"name": "a", "engine": "simulated", "max_num_seqs": 3}]
    assert given.keys() == {"models", "auth"}, "what the file leaves out is not sent"
    assert len(given["auth"]["keys"][0]["key_sha256"]) == 64
    assert (sent["roll_back"], sent["timeout_s"]) == (True, 900.0)


def test_keys_that_the_file_leaves_out_are_not_sent() -> None:
    without = {"models": [{"name": "a"}], "auth": {"key_file": "/etc/keys"}}
    assert remote_deploy.sent(parse(without)) == without
    assert remote_deploy.sent(parse({"models": [{"name": "a"}]})) == {"models": [{"name": "a"}]}


def test_a_plan_changes_nothing(deploy: Callable[..., Result]) -> None:
    application = Application()
    shown = json.loads(deploy(application, "--plan", "--json").stdout)
    assert [(one["deployment"], one["what"], one["replicas"]) for one in shown["plan"]] == [
        ("engine-a", "restarted", ["r1", "r2"]),
        ("Router", "unchanged", []),
    ]
    assert "= Router: unchanged" in deploy(application, "--plan").stdout
    assert all(body["plan_only"] for body in application.bodies)


@pytest.mark.parametrize(("state", "code"), [("failed", 1), ("rolled_back", 1), ("left", 1)])
def test_a_deployment_that_did_not_succeed_is_an_error(deploy: Callable[..., Result], state: str, code: int) -> None:
    done = deploy(Application("waiting", state), "--no-check")
    assert done.exit_code == code
    assert f"{state.replace('_', ' ')}  no memory" in done.stdout


def test_a_model_whose_path_only_the_machine_knows_is_not_judged_here(
    deploy: Callable[..., Result], tmp_path: Path
) -> None:
    """The default of `path` is a model whose heads four ranks do not divide."""
    (tmp_path / "my.yaml").write_text("models: [{name: a, tensor_parallel_size: 64, gpus_per_rank: 0}]")
    done = deploy(Application("done"))
    assert done.exit_code == 0, done.output


def test_without_wait_nothing_is_followed(deploy: Callable[..., Result]) -> None:
    done = deploy(Application(), "--no-check", "--no-wait", "--no-roll-back")
    assert (done.exit_code, "deploy_1" in done.stdout) == (0, True)


def test_another_key_and_two_places_are_refused(deploy: Callable[..., Result]) -> None:
    refused = deploy(Application(), key="sk-another-0123456789")
    assert (refused.exit_code, "may not deploy" in refused.stderr) == (2, True)
    both = deploy(Application(), "--address", "head:6379")
    assert (both.exit_code, "--url and --address" in both.stderr) == (2, True)
