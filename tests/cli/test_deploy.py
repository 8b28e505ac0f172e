"""`serve-app deploy` and `serve-app export`: what a user can do wrong is one line and an exit status."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from serve_app.cli import check_command as checking
from serve_app.cli import deploy as module
from serve_app.cli.commands import app
from serve_app.cluster.local import Instance, InstanceState
from serve_app.settings import application, parse
from tests.requires import requires

requires("linux")

KEY = "sk-0123456789abcdef"
CONFIG = {"models": [{"name": "a"}, {"name": "b"}], "auth": {"keys": [{"key": KEY, "admin": True}]}}
TOKEN = "0" * 64


NODE = {"resources": {"CPU": 8.0}, "device_bytes": [12 * 10**9]}


@pytest.fixture(autouse=True)
def deployed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a cluster answers that is asked before a deploy."""
    answer: dict[str, Any] = {"nodes": [NODE], "arguments": None, "replicas": {}}
    monkeypatch.setattr(checking, "ask", lambda order: answer)
    return answer


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Result]:
    def invoke(*arguments: str, **environment: str | None) -> Result:
        given: dict[str, str | None] = {"SERVE_APP_STATE": str(tmp_path / "state"), "COLUMNS": "200"}
        nothing = dict.fromkeys(("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
        return CliRunner().invoke(app, list(arguments), env=nothing | given | environment)

    return invoke


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


def one_line(result: Result, status: int, *words: str) -> None:
    """It has failed with this exit status and with one line on stderr that says so."""
    assert result.exit_code == status, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


# export


def test_the_exported_configuration_is_serve_s_and_holds_no_key(run: Callable[..., Result], file: Path) -> None:
    done = run("export", "--config", str(file), "--port", "8100")
    assert done.exit_code == 0
    assert KEY not in done.output
    reported = yaml.safe_load(done.stdout)
    (entry,) = reported["applications"]
    assert entry["args"]["auth"]["keys"][0]["key_sha256"] == hashlib.sha256(KEY.encode()).hexdigest()
    assert [one["name"] for one in entry["args"]["models"]] == ["a", "b"]
    assert reported["http_options"]["port"] == 8100
    assert reported["proxy_location"] == "EveryNode"
    head = yaml.safe_load(run("export", "--config", str(file), "--head-only", "--host", "127.0.0.1").stdout)
    assert (head["proxy_location"], head["http_options"]["host"]) == ("HeadOnly", "127.0.0.1")


def test_without_a_key_of_its_own_nothing_is_exported(run: Callable[..., Result], file: Path, tmp_path: Path) -> None:
    file.write_text("models: [{name: a}]\n")
    one_line(run("export", "--config", str(file)), 2, "auth.keys: give at least one key")
    assert not (tmp_path / "state").exists()  # and none is made


WRONG = pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("modles: []", "modles: unknown key"),
        ("models: [1", "not YAML"),
        ("models: [{name: a}, {name: a}]", "'a' is given twice"),
        ("models: [{name: x/a}, {name: x--a}]", "'x/a' and 'x--a' are the same for Serve"),
        (f"auth: {{keys: [{{key: {KEY}}}, {{key: {KEY}}}]}}", "this key is given twice"),
        ("models: [{name: a, replicas: {max_surge_percent: 101}}]", "max_surge_percent"),
    ],
)


@WRONG
@pytest.mark.parametrize("command", [["export"], ["deploy", "--no-check"]], ids=" ".join)
def test_a_wrong_file_is_named_before_anything_is_touched(
    run: Callable[..., Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    text: str,
    problem: str,
) -> None:
    monkeypatch.setattr(module, "RemoteDriver", None)  # calling it would be another error
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    one_line(run(*command, "--config", str(file)), 2, str(file), problem)
    one_line(run(*command, "--config", str(tmp_path / "absent.yaml")), 2, "absent.yaml: No such file or directory")
    assert [entry.name for entry in tmp_path.iterdir()] == ["wrong.yaml"]


@WRONG
def test_the_check_before_a_deploy_tells_of_a_wrong_file_what_check_tells(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, problem: str
) -> None:
    monkeypatch.setattr(module, "RemoteDriver", None)
    monkeypatch.setattr(checking, "ask", None)
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    done = run("deploy", "--config", str(file))
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == run("check", str(file)).stdout
    assert problem.removeprefix("modles: ") in done.stderr


# deploy


def test_where_nothing_runs_nothing_is_deployed(run: Callable[..., Result], file: Path, tmp_path: Path) -> None:
    one_line(run("deploy", "--config", str(file)), 1, "default: nothing runs", "--address")
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("address", "reported"),
    [
        ("127.0.0.1:1", "no Ray cluster answers there"),
        ("nonsense", "Invalid address format: nonsense"),
        pytest.param("ray://127.0.0.1:10001", "give host:port", marks=pytest.mark.long),  # refused as `local` is
        ("local", "give host:port"),
    ],
)
def test_an_address_where_no_cluster_is_fails_at_once(
    run: Callable[..., Result], file: Path, address: str, reported: str
) -> None:
    """With the real driver; Ray itself would try for minutes, or start a cluster of its own."""
    one_line(run("deploy", "--no-check", "--config", str(file), "--address", address), 1, reported)


def test_ray_s_own_variables_choose_the_cluster_and_its_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = InstanceState("default", tmp_path)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/token")
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.setenv("RAY_SERVE_THROUGHPUT_OPTIMIZED", "1")
    wanted = {"RAY_ADDRESS": "head:6379", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/token"}
    assert module.find(None, state) == module.Target(wanted, None)
    assert module.find("other:1", state).environment == wanted | {"RAY_ADDRESS": "other:1"}


def status(state: str, message: str = "", others: dict[str, str] | None = None) -> dict[str, Any]:
    reported = {"id": "r", "state": "RUNNING", "node": "n"}
    model = {
        "name": "a",
        "deployment": "engine-a",
        "state": "healthy",
        "message": "",
        "replicas": [reported],
        "target": 1,
    }
    waits = {"starting": {"engine-a": "updating"}, "failed": {"engine-a": "deploy_failed"}, "running": {}}[state]
    names = {"waits": waits, "unready": waits | (others or {}), "more": {}}
    return {"event": "status", "state": state, "message": message, "models": [model], "routers": [reported], **names}


DECLARED = {"event": "phase", "phase": "declared"}
END = {"event": "end"}


class FakeDriver:
    """Gives the scripted events."""

    events: list[dict[str, Any]] = []
    orders: list[dict[str, Any]] = []
    closed = 0

    def __init__(self, order: dict[str, Any], log: Path) -> None:
        self.orders.append(order)
        self._left = list(self.events)
        log.write_text("a first word\nthe last word\n")

    def event(self, timeout_s: float) -> dict[str, Any] | None:
        return self._left.pop(0) if self._left else END

    def close(self) -> None:
        type(self).closed += 1


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> type[FakeDriver]:
    class Driver(FakeDriver):
        orders: list[dict[str, Any]] = []

    monkeypatch.setattr(module, "RemoteDriver", Driver)
    return Driver


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InstanceState:
    """An instance that seems to run, with a generated key."""
    monkeypatch.setattr(module, "marked", lambda mark: [1])
    state = InstanceState("default", tmp_path / "state")
    state.create()
    (state.folder / "token").write_text(TOKEN)
    kept = str(state.generated_key_file)
    state.write(Instance("default", "mark", "/run", "127.0.0.1", 8123, "127.0.0.1:6379", "u", api_key_file=kept))
    return state


def test_what_is_declared_and_runs_is_recorded_with_its_key(
    run: Callable[..., Result], file: Path, driver: type[FakeDriver], state: InstanceState
) -> None:
    driver.events = [DECLARED, status("starting"), status("running")]
    done = run("deploy", "--config", str(file))
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.endswith("running  a 1/1  router 1\n")
    (order,) = driver.orders
    assert (order["do"], order["wait"], order["models"]) == ("declare", True, ["a", "b"])
    assert order["environment"]["RAY_AUTH_TOKEN"] == TOKEN
    where = {"http_options": {"host": "127.0.0.1", "port": 8123}, "proxy_location": "HeadOnly"}
    assert order["serve"] == where
    assert KEY not in json.dumps(order)
    recorded = state.read()
    assert recorded is not None
    assert recorded.models == ("a", "b")
    assert recorded.api_key_file == str(state.configured_key_file)  # what `chat` and `status` go by
    assert state.configured_key_file.read_text().strip() == KEY
    assert driver.closed == 1


def test_what_is_not_waited_for_is_reported(
    run: Callable[..., Result], file: Path, driver: type[FakeDriver], state: InstanceState
) -> None:
    others = {"engine-b": "updating"}
    driver.events = [DECLARED, status("starting", others=others), status("running", others=others)]
    done = run("deploy", "--config", str(file))
    assert done.exit_code == 0
    assert done.stdout.endswith("not ready before, not changed and not waited for: engine-b (updating)\n")


def test_replicas_that_only_the_load_wants_are_reported_and_are_no_failure(
    run: Callable[..., Result], file: Path, driver: type[FakeDriver], state: InstanceState
) -> None:
    reported = status("running", others={"engine-a": "updating"}) | {
        "state": "starting",
        "more": {"engine-a": "1 of 2"},
    }
    driver.events = [DECLARED, reported]
    done = run("deploy", "--config", str(file))
    assert done.exit_code == 0
    assert done.stdout.endswith("replicas that only load wants are not waited for: engine-a (1 of 2)\n")


def test_what_will_restart_is_reported_before_anything_is_changed(
    run: Callable[..., Result], file: Path, driver: type[FakeDriver], state: InstanceState, deployed: dict[str, Any]
) -> None:
    driver.events = [DECLARED, status("running")]
    before = parse({**CONFIG, "models": [{"name": "a", "max_num_seqs": 8}, {"name": "b"}]}).without_secrets()
    deployed["arguments"] = application(before)["args"]
    deployed["replicas"] = {"engine-a": ["r1", "r2"], "engine-b": ["r3"]}
    lines = run("deploy", "--config", str(file)).stdout.splitlines()
    plan = [
        "! engine-a (2 replicas): restarted: an engine cannot take this over while it runs",
        "    max_num_seqs: 8 -> 64",
        "~ Router: changed: taken over without a restart",
    ]
    at = lines.index(plan[0])
    assert lines[at : at + 3] == plan
    assert lines.index("Declaring the application ...") > at
    assert not [line for line in lines if "engine-b" in line]


def test_what_cannot_run_there_is_not_declared_unless_nothing_is_to_be_checked(
    run: Callable[..., Result], file: Path, driver: type[FakeDriver], state: InstanceState
) -> None:
    driver.events = [DECLARED, status("running")]
    file.write_text(yaml.safe_dump({**CONFIG, "models": [{"name": "a", "kv_cache_gb": 500}]}))
    refused = run("deploy", "--config", str(file))
    assert refused.exit_code == 2
    assert "error: models.0.kv_cache_gb" in refused.stderr
    assert driver.orders == []
    assert run("deploy", "--config", str(file), "--no-check").exit_code == 0
    assert len(driver.orders) == 1


def test_with_a_generated_key_its_file_is_reported(
    run: Callable[..., Result], file: Path, driver: type[FakeDriver], state: InstanceState
) -> None:
    driver.events = [DECLARED, status("running")]
    file.write_text("models: [{name: a}]\n")
    done = run("deploy", "--config", str(file))
    assert done.exit_code == 0
    assert f"API key in {state.generated_key_file}" in done.stdout
    key = state.generated_key_file.read_text().strip()
    assert hashlib.sha256(key.encode()).hexdigest() in json.dumps(driver.orders[0])
    assert key not in done.output


def test_a_model_that_does_not_come_up_is_an_exit_status_and_its_reason(
    run: Callable[..., Result], file: Path, driver: type[FakeDriver], state: InstanceState
) -> None:
    driver.events = [DECLARED, status("failed", "engine-a: ValueError: no such folder")]
    done = run("deploy", "--config", str(file))
    assert done.exit_code == 1
    assert "failed  a 1/1  router 1  engine-a: ValueError: no such folder" in done.stdout
    assert state.read().models == ("a", "b")  # type: ignore[union-attr] # it is declared, though


def test_a_change_that_was_rolled_back_says_so_and_leaves_the_records_as_they_were(
    run: Callable[..., Result], file: Path, driver: type[FakeDriver], state: InstanceState
) -> None:
    driver.events = [DECLARED, status("running")]
    assert run("deploy", "--config", str(file)).exit_code == 0
    before = state.read()
    file.write_text(yaml.safe_dump({"models": [{"name": "c"}], "auth": {"keys": [{"key": "sk-another-0123456789"}]}}))
    driver.events = [DECLARED, {**status("failed", "engine-c: ValueError: no such folder"), "rolled_back": True}]
    done = run("deploy", "--config", str(file))
    assert done.exit_code == 1
    assert "engine-c: ValueError: no such folder; the previous declaration is declared again" in done.stdout
    assert driver.orders[-1]["roll_back"]
    assert state.read() == before
    assert state.configured_key_file.read_text().strip() == KEY
    run("deploy", "--config", str(file), "--no-roll-back")
    assert not driver.orders[-1]["roll_back"]


@pytest.mark.parametrize(
    ("events", "reported"),
    [
        ([{"event": "error", "message": "Serve cannot build it"}], "error: Serve cannot build it\n"),
        ([END], "error: the process that deploys it has ended: the last word\n"),
    ],
)
def test_what_was_not_declared_changes_no_record(
    run: Callable[..., Result],
    file: Path,
    driver: type[FakeDriver],
    state: InstanceState,
    events: list[dict[str, Any]],
    reported: str,
) -> None:
    before = state.read()
    driver.events = events
    done = run("deploy", "--config", str(file))
    assert (done.exit_code, done.stderr) == (1, reported)
    assert state.read() == before
    assert not state.configured_key_file.exists()


def test_a_driver_that_dies_while_it_is_waited_for_is_no_success(
    run: Callable[..., Result], file: Path, driver: type[FakeDriver], state: InstanceState
) -> None:
    for events in ([DECLARED], [DECLARED, status("starting")]):
        driver.events = events
        one_line(run("deploy", "--config", str(file)), 1, "has ended: the last word")
        assert run("deploy", "--config", str(file), "--no-wait").exit_code == 0  # nothing more was to be told


def test_the_wait_is_bounded(
    file: Path, driver: type[FakeDriver], state: InstanceState, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    driver.events = [DECLARED] + [status("starting")] * 50
    result = CliRunner().invoke(
        app,
        ["deploy", "--config", str(file), "--timeout", "20"],
        env={"SERVE_APP_STATE": str(state.folder.parent), "RAY_ADDRESS": None},
    )
    assert result.exit_code == 1
    assert "it does not run after 20 s" in result.stderr
    assert driver.closed == 1


def test_a_certificate_that_is_not_what_runs_is_refused_and_nothing_is_declared(
    run: Callable[..., Result], file: Path, driver: type[FakeDriver], state: InstanceState
) -> None:
    file.write_text(yaml.safe_dump(CONFIG | {"http": {"tls": {"certificate": "/c.pem", "key": "/k.pem"}}}))
    one_line(run("deploy", "--config", str(file)), 2, "http.tls", "serve-app up")
    one_line(run("deploy", "--config", str(file), "--address", "127.0.0.1:1"), 2, "SERVE_APP_TLS_CERTIFICATE")
    one_line(run("export", "--config", str(file)), 2, "SERVE_APP_TLS_CERTIFICATE")
    assert driver.orders == []
    running = state.read()
    assert running is not None
    state.write(dataclasses.replace(running, certificate="/c.pem"))
    driver.events = [DECLARED, status("running")]
    assert run("deploy", "--config", str(file)).exit_code == 0
