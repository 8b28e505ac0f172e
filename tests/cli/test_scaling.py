"""`serve-app scaling` with a server of the tests: what is wanted, what is advised, and both on what was recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import Result

from serve_app.types import Outcome
from tests.cli.test_chat import KEY, reply, run, serve  # noqa: F401 - fixtures
from tests.cli.test_records import AT, answering, page, record
from tests.cli.test_simulate import CONFIG, PROFILE
from tests.requires import requires

requires("linux")

Run = Callable[..., Result]
Serve = Callable[[Callable[[BaseHTTPRequestHandler, Any], None]], str]
MODEL = {
    "name": "chat",
    "replicas": [{"state": "RUNNING"}, {"state": "STARTING"}],
    "target": 2,
    "advised": 4,
    "why": "30.0 requests: 2 wanted",
    "advice": "too many would start too late: 4 wanted",
    "signals": "high: 4 run; room for 2 more",
}
STATUS = {"/admin/status": [{"models": [MODEL]}]}
COUNT = 60


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with `my.yaml`, whose model is advised by `slo`, and `quick.json`."""
    (model,) = CONFIG["models"]
    advised = model | {"replicas": model["replicas"] | {"advise": "slo"}}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(CONFIG | {"models": [advised]}))
    (tmp_path / "quick.json").write_text(json.dumps(PROFILE))
    return tmp_path


def test_it_tells_what_is_wanted_and_what_is_advised_with_both_reasons(run: Run, serve: Serve) -> None:  # noqa: F811
    url = serve(answering(STATUS, []))
    shown = run("scaling", "--url", url, "--key", KEY)
    assert shown.exit_code == 0, shown.output
    assert (
        "chat\t1\t2\t4\t30.0 requests: 2 wanted\ttoo many would start too late: 4 wanted\thigh: 4 run" in shown.output
    )
    found = json.loads(run("scaling", "--url", url, "--key", KEY, "--json").output)
    assert found["models"][0]["advised"] == 4


def test_without_advice_there_is_none(run: Run, serve: Serve) -> None:  # noqa: F811
    alone = MODEL | {"advised": None, "advice": ""}
    url = serve(answering({"/admin/status": [{"models": [alone]}]}, []))
    assert "chat\t1\t2\t-\t30.0 requests: 2 wanted\t-" in run("scaling", "--url", url, "--key", KEY).output


def test_both_policies_are_simulated_on_what_was_recorded(run: Run, serve: Serve, files: Path) -> None:  # noqa: F811
    rows = [record(f"r{number}", Outcome.OK) | {"at": AT + number, "slots": 1} for number in range(COUNT)]
    asked: list[tuple[str, dict[str, list[str]]]] = []
    url = serve(answering(STATUS | {"/admin/requests": [page(*rows[:40], cursor="1.0-r39"), page(*rows[40:])]}, asked))
    command = ("scaling", "--url", url, "--key", KEY, "--diff", str(files / "my.yaml"), "--since", "2h")
    done = run(*command, "--profile", str(files / "quick.json"), "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert [arm["policy"] for arm in found["arms"]] == ["ongoing", "slo"]
    assert found["trace"]["requests"] == COUNT
    assert found["models"][0]["advised"] == 4
    assert all(arm["gpu_hours"] > 0 for arm in found["arms"])
    assert {"since"} <= asked[-1][1].keys()


def test_without_a_recorded_request_there_is_nothing_to_compare(run: Run, serve: Serve, files: Path) -> None:  # noqa: F811
    url = serve(answering(STATUS | {"/admin/requests": [page()]}, []))
    refused = run("scaling", "--url", url, "--key", KEY, "--diff", str(files / "my.yaml"))
    assert refused.exit_code == 2
    assert "--since 1h: no request is recorded since then" in refused.output


def test_recorded_decisions_come_out_again_or_the_first_that_does_not_is_named(run: Run, tmp_path: Path) -> None:  # noqa: F811
    file = tmp_path / "decisions.controller-1.000001.jsonl"
    signals = dict.fromkeys(("running", "target", "min_replicas"), 1) | dict.fromkeys(("waiting", "granted"), 30.0)
    signals |= {"executing": 0.0, "complete": True, "cold_start_requested": False, "max_replicas": 9, "now": 0.0}
    signals |= {"target_ongoing": 20.0, "look_back_s": 5.0}
    line = {"deployment": "engine-chat", "policy": "ongoing", "begins": True, "times": [1.0, 1.1], "signals": signals}
    for replicas, differing, code in ((3, 0, 0), (4, 2, 1)):
        file.write_text(json.dumps(line | {"replicas": replicas, "cause": "load"}) + "\n")
        shown = run("scaling", "--replay", str(tmp_path))
        assert shown.exit_code == code, shown.output
        assert f"engine-chat\tongoing\t2\t{differing}" in shown.output
    assert "4 (load) recorded at 1.0, 3 (load) now" in shown.output
