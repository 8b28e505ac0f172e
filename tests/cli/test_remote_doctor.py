"""`serve-app doctor --url`: each check by what the endpoint answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from typer.testing import Result

from serve_app.cli.endpoint import Endpoint
from serve_app.cli.remote_doctor import checks
from serve_app.names import RELEASE
from tests.cli.test_chat import KEY, reply, run, serve  # noqa: F401 - fixtures
from tests.cli.test_endpoint import error_body
from tests.cli.test_layout import QUOTA, STATUS
from tests.requires import requires

requires("linux")

Serve = Callable[[Callable[[BaseHTTPRequestHandler, Any], None]], str]
NAMES = ["endpoint", "clock", "release", "key", "models", "application", "quota actor", "store"]
WELL: dict[str, Any] = {
    "/health": {"status": "ok"},
    "/version": {"version": RELEASE},
    "/v1/models": {"data": [{"id": "tiny"}]},
    "/ready": {"status": "ready", "without_replica": []},
    "/admin/status": {**STATUS, "state": "running", "message": ""},
    "/admin/quota": {**QUOTA, "waiting": []},
    "/admin/audit?limit=1": {"data": []},
}


def answering(**changes: Any) -> Callable[[BaseHTTPRequestHandler, Any], None]:
    """An endpoint that is well, apart from these routes: a value, or a status with a code. Names without `/admin/`."""

    def answer(request: BaseHTTPRequestHandler, _: Any) -> None:
        name = request.path.partition("?")[0].rpartition("/")[2]
        found = changes.get(name, WELL[request.path])
        if isinstance(found, tuple):
            reply(request, found[0], error_body("it is away", found[1]))
        else:
            reply(request, 200, json.dumps(found).encode())

    return answer


def found(url: str, **changes: Any) -> dict[str, tuple[str, str]]:
    listed = checks(Endpoint(url, KEY), **changes)
    assert all(bool(one.remedy) == (one.state != "ok") for one in listed), "a remedy where there is something to do"
    return {one.name: (one.state, one.found) for one in listed}


def test_an_endpoint_that_is_well_passes_every_check(serve: Serve) -> None:  # noqa: F811
    seen = found(serve(answering()))
    assert list(seen) == NAMES
    assert {state for state, _ in seen.values()} == {"ok"}
    assert "tiny" in seen["key"][1]


@pytest.mark.parametrize(
    ("changes", "name", "state", "text"),
    [
        ({"version": {"version": "0.0.1"}}, "release", "warn", f"0.0.1 there, {RELEASE} here"),
        ({"ready": {"without_replica": ["tiny"]}}, "models", "warn", "no replica runs of tiny"),
        ({"ready": (503, "not_ready")}, "models", "fail", "it is away"),
        ({"status": {"state": "unhealthy", "message": "engine-a"}}, "application", "warn", "unhealthy: engine-a"),
        ({"status": (503, "no_controller")}, "application", "fail", "it is away"),
        ({"quota": {"waiting": [{"replica": "x"}]}}, "quota actor", "warn", "1 engines wait for memory"),
        ({"quota": (503, "no_quota")}, "quota actor", "fail", "it is away"),
        ({"audit": (503, "no_store")}, "store", "fail", "it is away"),
        ({"status": (403, "not_admin")}, "operator", "warn", "not an operator's"),
    ],
)
def test_what_is_wrong_is_one_check(serve: Serve, changes: Any, name: str, state: str, text: str) -> None:  # noqa: F811
    seen = found(serve(answering(**changes)))
    assert (seen[name][0], text in seen[name][1]) == (state, True), seen
    assert {one for one, (judged, _) in seen.items() if judged != "ok"} == {name}


def test_behind_a_refused_key_and_a_dead_endpoint_nothing_is_checked(serve: Serve) -> None:  # noqa: F811
    assert list(found(serve(answering(models=(401, "invalid_api_key"))))) == NAMES[:4]
    assert list(found("http://127.0.0.1:9")) == ["endpoint"]


@pytest.mark.parametrize(("ahead_s", "state"), [(0, "ok"), (4, "ok"), (90, "warn"), (-90, "warn")])
def test_a_clock_that_differs_is_seen(serve: Serve, ahead_s: float, state: str) -> None:  # noqa: F811
    here = datetime(2027, 1, 31, tzinfo=UTC)

    def answer(request: BaseHTTPRequestHandler, body: Any) -> None:
        request.date_time_string = lambda timestamp=None: format_datetime(  # type: ignore[method-assign]
            here + timedelta(seconds=ahead_s), usegmt=True
        )
        answering()(request, body)

    assert found(serve(answer), now=lambda: here)["clock"][0] == state


def test_the_command_asks_that_endpoint_and_not_this_machine(
    run: Callable[..., Result],  # noqa: F811
    serve: Serve,  # noqa: F811
) -> None:
    done = run("doctor", "--url", serve(answering()), "--key", KEY, "--json")
    shown = json.loads(done.stdout)
    assert (done.exit_code, shown["state"], [one["name"] for one in shown["checks"]]) == (0, "ok", NAMES)
    failed = run("doctor", "--url", serve(answering(audit=(503, "no_store"))), "--key", KEY)
    assert (failed.exit_code, "store" in failed.stdout) == (1, True)
    assert run("doctor", "--url", "http://a:1", "--address", "b:2").exit_code == 2
