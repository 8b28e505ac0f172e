"""Serve's own commands and its REST interface, each executed on a cluster with token authentication."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from serve_app.cli.deploy import export
from serve_app.names import APPLICATION, ROUTER, deployment_of
from serve_app.settings import parse
from tests.e2e.changing import KEY, OTHER, STEADY, Place, configured, model, running
from tests.interruptible import interruptible
from tests.waiting import patient

pytestmark = pytest.mark.long  # five changes of a cluster by Serve's own commands

BASE = configured(model(OTHER))
COMMAND_S = 120.0  # of one command: Python and Ray, five seconds on an idle machine
API_S = 30.0  # of one call of the REST interface


@pytest.fixture(scope="module")
def place(changing: Place) -> Place:
    return changing


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The configuration as a file."""
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump(BASE))
    return path


def command(place: Place | None, *line: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A Python module's command with what it takes to reach the cluster in its environment; without one, nothing."""
    return subprocess.run(
        [sys.executable, "-m", *line],
        env=environment(place) | more,
        capture_output=True,
        text=True,
        timeout=patient(COMMAND_S),
        check=False,
    )


def environment(place: Place | None) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SERVE_APP_"))}
    if place is None:
        return clean
    return clean | place.cluster.environment() | {"RAY_DASHBOARD_ADDRESS": str(place.cluster.instance.dashboard_url)}


SERVE = "ray.serve.scripts"  # the `serve` command


def declared(place: Place) -> dict[str, Any]:
    """`BASE` as Serve's own configuration, for this cluster's address."""
    where = place.cluster.instance
    text = export(parse(BASE), host=where.host, port=where.http_port, proxy_location="HeadOnly")
    config: dict[str, Any] = yaml.safe_load(text)
    return config


def status_of(place: Place) -> dict[str, Any]:
    """The application as `serve status` prints it."""
    done = command(place, SERVE, "status")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = yaml.safe_load(done.stdout)["applications"][APPLICATION]
    return found


class Rest:
    """Serve's REST interface on the cluster's dashboard."""

    def __init__(self, place: Place) -> None:
        self._url = f"{place.cluster.instance.dashboard_url}/api/serve/applications/"
        self._token = place.cluster.environment()["RAY_AUTH_TOKEN"]

    def headers(self, token: str | None) -> dict[str, str]:
        return {"Authorization": f"Bearer {token}"} if token else {}

    def put(self, config: Any) -> requests.Response:
        return self.put_as(config, self._token)

    def put_as(self, config: Any, token: str | None) -> requests.Response:
        return requests.put(self._url, json=config, headers=self.headers(token), timeout=patient(API_S))

    def get(self) -> Any:
        return requests.get(self._url, headers=self.headers(self._token), timeout=patient(API_S)).json()


def test_the_exported_configuration_holds_no_key_and_serve_deploy_runs_it(
    place: Place, file: Path, tmp_path: Path
) -> None:
    where = ["--host", place.cluster.instance.host, "--port", str(place.cluster.instance.http_port), "--head-only"]
    exported = command(None, "serve_app.cli", "export", "--config", str(file), *where)
    assert exported.returncode == 0, exported.stderr
    assert KEY not in exported.stdout
    assert yaml.safe_load(exported.stdout) == declared(place)
    target = tmp_path / "serve.yaml"
    target.write_text(exported.stdout)
    refused = command(None, SERVE, "deploy", str(target), "--address", str(place.cluster.instance.dashboard_url))
    assert refused.returncode != 0  # without the token
    assert "AuthenticationError" in refused.stderr
    done = command(place, SERVE, "deploy", str(target))
    assert done.returncode == 0, done.stderr
    place.wait_running(BASE)
    place.wait_serving(STEADY, OTHER)
    found = status_of(place)
    assert found["status"] == "RUNNING"
    assert set(found["deployments"]) == {ROUTER, deployment_of(STEADY), deployment_of(OTHER)}
    assert {one["status"] for one in found["deployments"].values()} == {"HEALTHY"}


def test_the_rest_interface_asks_for_the_token_and_changes_what_is_named(place: Place) -> None:
    place.become(BASE)
    place.wait_serving(STEADY, OTHER)
    before = place.replicas()
    rest = Rest(place)
    config = declared(place)
    config["applications"][0]["args"]["models"].append(model("added"))
    assert rest.put_as(config, None).status_code == 401
    assert rest.put_as(config, "0" * 64).status_code == 403
    assert place.endpoint.ask("added").status == 404
    assert rest.put(config).status_code == 200
    place.wait_running(configured(model(OTHER), model("added")))
    assert place.endpoint.ask("added").status == 200
    after = place.replicas()
    assert len(after.pop("added")) == 1
    assert after == before
    assert rest.get()["applications"][APPLICATION]["status"] == "RUNNING"


def test_wrong_arguments_leave_the_running_application_serving_and_whole(place: Place) -> None:
    """Serve builds an application after it has accepted it, so it is too late to refuse."""
    place.become(BASE)
    place.wait_serving(STEADY, OTHER)
    before = place.replicas()
    rest = Rest(place)
    config = declared(place)
    config["applications"][0]["args"]["models"][1]["unheard_of"] = 1
    assert rest.put(config).status_code == 200
    state = place.wait(lambda state: state["state"] == "failed", "Serve gives up building it")
    assert state["message"].endswith("models.1.unheard_of: unknown key")
    assert (state["models"], state["routers"]) == ([], [])  # what Serve shows of it: the documented price
    assert place.endpoint.ask(OTHER).status == 200
    process = place.process(deployment_of(OTHER))
    os.kill(process, signal.SIGKILL)  # a replica that dies is still replaced
    place.wait(lambda _: place.processes(deployment_of(OTHER)) not in ([], [process]), "another replica")
    assert place.endpoint.ask(OTHER).status == 200
    assert rest.put(declared(place)).status_code == 200
    place.wait_running(BASE)
    after = place.replicas()
    assert (after[STEADY], after["Router"]) == (before[STEADY], before["Router"])


def test_serve_build_prints_every_deployment_as_serve_is_asked_for_it(file: Path) -> None:
    done = command(None, SERVE, "build", "serve_app.configured:application", SERVE_APP_CONFIG=str(file))
    assert done.returncode == 0, done.stderr
    (built,) = yaml.safe_load(done.stdout[done.stdout.index("# This file") :])["applications"]
    deployments = {one["name"]: one for one in built["deployments"]}
    assert set(deployments) == {ROUTER, deployment_of(STEADY), deployment_of(OTHER)}
    assert deployments[deployment_of(OTHER)]["placement_group_bundles"] == [{"CPU": 0.5}]
    assert KEY not in done.stdout
    unset = command(None, SERVE, "build", "serve_app.configured:application")
    assert unset.returncode != 0
    assert "SERVE_APP_CONFIG is not set" in unset.stderr


def test_serve_run_refuses_a_wrong_file_and_takes_over_with_a_right_one(
    place: Place, file: Path, tmp_path: Path
) -> None:
    """It builds before it connects. As Serve has it, Serve ends with it: the last test of this module, and the next
    module declares its configuration to a Serve that is not there."""
    place.become(BASE)
    place.wait_serving(STEADY, OTHER)
    before = place.replicas()
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("modles: []")
    line = [SERVE, "run", "--name", APPLICATION, "serve_app.app:build"]
    refused = command(place, *line, f"config={wrong}")
    assert refused.returncode != 0
    assert f"{wrong}: modles: unknown key" in refused.stderr
    assert place.replicas() == before
    file.write_text(yaml.safe_dump(configured(model(OTHER), model("added"))))
    serve_run = interruptible([sys.executable, "-m", *line, f"config={file}"])
    run = subprocess.Popen(serve_run, env=environment(place), stdout=subprocess.DEVNULL)
    try:
        place.wait_serving("added")
        state = place.wait(lambda state: state["state"] == "running", "all of it runs")
        assert {name: ids for name, ids in running(state).items() if name != "added"} == before
        run.send_signal(signal.SIGINT)
        assert run.wait(patient(COMMAND_S)) == 0
    finally:
        run.kill()
        run.wait(patient(COMMAND_S))
    # the node's stand-in for Serve's HAProxy keeps the port for a while, and says so
    gone = place.endpoint.ask(STEADY)
    assert (gone.status, json.loads(gone.text)["error"]["code"]) == (503, "no_router")
