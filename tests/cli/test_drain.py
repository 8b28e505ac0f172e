"""`serve-app drain`: what is printed while replicas drain, and of their end, by HTTP and through Ray. Routers and the
driver are scripts."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from rich.console import Console
from typer.testing import Result

from autoscaling.operations import draining
from autoscaling.operations.draining import DrainLook
from serve_app.cli import drain
from serve_app.cluster.local import remote_driver
from serve_app.errors import Unavailable
from tests.cli.test_chat import KEY, reply, run, serve  # noqa: F401 - fixtures
from tests.cli.test_endpoint import error_body
from tests.requires import requires

requires("linux")

Serve = Callable[[Callable[[BaseHTTPRequestHandler, Any], None]], str]


class Script:
    """A driver that says these events."""

    def __init__(self, *events: dict[str, Any] | None) -> None:
        self.events = list(events)
        self.order: dict[str, Any] = {}
        self.closed = False

    def __call__(self, order: dict[str, Any]) -> Script:
        self.order = order
        return self

    def event(self, timeout_s: float) -> dict[str, Any] | None:
        return self.events.pop(0)

    def close(self) -> None:
        self.closed = True


def row(left_s: float = 30.0, **changes: Any) -> dict[str, Any]:
    row = {"replica": "x7k2", "model": "m", "why": "serve-app drain", "ended": False, "final": True, "left_s": left_s}
    return row | {"running": 3, "finished": 0, "moved": 0} | changes


def drained(monkeypatch: pytest.MonkeyPatch, script: Script) -> str:
    monkeypatch.setattr(remote_driver, "RemoteDriver", script)
    console = Console(file=io.StringIO(), width=100)
    found = drain.drain("x7k", 30.0, {"RAY_ADDRESS": "a"}, console=console)
    drain.show_end(found, console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_each_change_is_a_record_and_the_end_says_what_became_of_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    end = row(0.0, ended=True, running=0, finished=2, moved=1)
    script = Script(
        {"event": "drains", "rows": [row()]},
        {"event": "drains", "rows": [row(29.0)]},  # nothing but time has passed
        {"event": "drains", "rows": [row(1.0, running=1, finished=2)]},
        {"event": "drains", "rows": [end]},
        {"event": "drained", "target": "x7k2", "rows": [end]},
    )
    assert drained(monkeypatch, script).splitlines() == [
        "drain\tx7k2\tm\tdrains\t3\t0\t0\t30",
        "drain\tx7k2\tm\tdrains\t1\t2\t0\t1",
        "drain\tx7k2\tm\tended\t0\t2\t1\t-",
        "drained\tx7k2\t2\t1\t0\t0",
    ]
    assert (script.order["do"], script.order["name"], script.order["within_s"]) == ("drain", "x7k", 30.0)
    assert script.closed


def test_requests_that_no_router_took_are_reported_to_be_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(0.0, ended=True, running=2)]
    end = {"event": "drained", "target": "x7k2", "rows": rows}
    assert drained(monkeypatch, Script(end)) == "drained\tx7k2\t0\t0\t2\t0\n"


def test_what_an_engine_ran_that_ended_without_a_word_is_not_called_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(0.0, ended=True, final=False, running=2, finished=1)]
    end = {"event": "drained", "target": "x7k2", "rows": rows}
    assert drained(monkeypatch, Script(end)) == "drained\tx7k2\t1\t0\t0\t2\n"


@pytest.mark.parametrize("end", [None, {"event": "end"}, {"event": "error", "message": "no such replica"}])
def test_a_drain_that_cannot_be_followed_fails(monkeypatch: pytest.MonkeyPatch, end: dict[str, Any] | None) -> None:
    script = Script(end)
    with pytest.raises(Unavailable):
        drained(monkeypatch, script)
    assert script.closed


def test_nothing_is_reported_of_requests_that_no_engine_has_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script({"event": "drained", "target": "x7k2", "rows": []})
    assert drained(monkeypatch, script) == "drained\tx7k2\t-\t-\t-\t-\n"


def routers(
    looks: list[DrainLook | None], asked: list[Any], *, is_node: bool = False, unrecorded: str = ""
) -> Callable[..., None]:
    """Routers that drain `x7k2`, or the node `n1`; each look is answered by the next script, None by a 503."""

    def answer(request: BaseHTTPRequestHandler, body: Any) -> None:
        target = "n1" if is_node else "x7k2"
        begun = {"object": "drain", "id": target, "is_node": is_node, "limit_s": 60.0 if is_node else None}
        begun |= {"unrecorded": unrecorded}
        if body is not None:
            asked.append(body)
            is_known = target.startswith(body["name"]) or body["name"] == "x7k2"
            reply(request, *((200, json.dumps(begun).encode()) if is_known else (404, error_body("no", "not_found"))))
            return
        asked.append(request.path)
        look = looks.pop(0) if len(looks) > 1 else looks[0]
        if look is None:
            reply(request, 503, error_body("away", "no_controller"))
        else:
            reply(request, 200, json.dumps(begun | asdict(look)).encode())

    return answer


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "POLL_S", 0.001)


@pytest.mark.usefixtures("quick")
def test_by_http_a_replica_is_followed_over_routers_that_do_not_answer(
    run: Callable[..., Result],  # noqa: F811
    serve: Serve,  # noqa: F811
) -> None:
    end = row(0.0, ended=True, running=0, finished=2, moved=1)
    running = DrainLook([row()], engines={"x7k2": "RUNNING"})
    asked: list[Any] = []
    url = serve(routers([running, None, running, DrainLook([end], engines={})], asked))
    result = run("drain", "x7k", "--within", "30s", "--url", url, "--key", KEY)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "drain\tx7k2\tm\tdrains\t3\t0\t0\t30",
        "drain\tx7k2\tm\tended\t0\t2\t1\t-",
        "drained\tx7k2\t2\t1\t0\t0",
    ]
    assert asked[0] == {"name": "x7k", "within_s": 30.0}
    assert "/admin/drains/x7k2" in asked


@pytest.mark.usefixtures("quick")
def test_by_http_a_node_is_followed_until_nothing_is_left_there(
    run: Callable[..., Result],  # noqa: F811
    serve: Serve,  # noqa: F811
) -> None:
    end = row(0.0, ended=True, running=0, finished=2)
    stopping = DrainLook([row()], False, {"x7k2": "STOPPING"}, ["engine-m"], True)
    asked: list[Any] = []
    url = serve(routers([stopping, DrainLook([end], False, {}, [], False)], asked, is_node=True))
    found = json.loads(run("drain", "n1", "--json", "--url", url, "--key", KEY).stdout)
    assert found == {"target": "n1", "rows": [end], "unrecorded": ""}
    assert {"name": "x7k2", "within_s": None} in asked, "so that its progress is known"
    assert asked.count({"name": "n1", "within_s": None}) == 1, "the audit record has an entry for each"


@pytest.mark.usefixtures("quick")
def test_what_the_audit_record_lacks_is_printed(
    run: Callable[..., Result],  # noqa: F811
    serve: Serve,  # noqa: F811
) -> None:
    end = row(0.0, ended=True, running=0, finished=2)
    url = serve(routers([DrainLook([end], engines={})], [], unrecorded="the audit record lacks this drain: away"))
    result = run("drain", "x7k", "--url", url, "--key", KEY)
    assert result.exit_code == 0, result.output
    assert "unrecorded\tthe audit record lacks this drain: away" in result.stdout.splitlines()


def test_by_http_a_name_of_nothing_is_one_line(run: Callable[..., Result], serve: Serve) -> None:  # noqa: F811
    result = run("drain", "zz", "--url", serve(routers([None], [])), "--key", KEY)
    assert (result.exit_code, result.stderr) == (2, "error: 404: no\n")
