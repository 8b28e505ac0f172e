"""Operators' commands by HTTP: from anywhere with a URL and a key, on the machine with the instance's own, and through
Ray where the endpoint cannot be asked."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from serve_app.cli import command_line, deploy, instances, quota
from serve_app.cluster.local import Instance, InstanceState
from tests.cli.test_chat import KEY, reply, run, serve  # noqa: F401 - fixtures
from tests.cli.test_endpoint import error_body
from tests.cli.test_layout import QUOTA, STATUS
from tests.requires import requires

requires("linux")

Serve = Callable[[Callable[[BaseHTTPRequestHandler, Any], None]], str]
STATE = {name: STATUS[name] for name in STATUS if name not in ("instance", "url", "api_key_file", "dashboard_url")}
PLAN = {"plan": None, "begun": False, "addresses": {}}
ANSWERS = {"/admin/status": STATE, "/admin/quota": QUOTA, "/admin/defrag": PLAN}


def answering(asked: list[Any]) -> Callable[[BaseHTTPRequestHandler, Any], None]:
    """An application of an operator with the key `KEY`."""

    def answer(request: BaseHTTPRequestHandler, _: Any) -> None:
        asked.append((request.command, request.path))
        if request.headers["Authorization"] != f"Bearer {KEY}":
            reply(request, 403, error_body("this key is not an operator's", "not_admin"))
        else:
            reply(request, 200, json.dumps(ANSWERS[request.path]).encode())

    return answer


def running(tmp_path: Path, url: str, key: str = KEY) -> None:
    """An instance of this machine whose endpoint is at `url`."""
    state = InstanceState("default", tmp_path)
    state.create()
    state.generated_key_file.write_text(key)
    file = str(state.generated_key_file)
    state.write(
        Instance("default", "a-mark", str(tmp_path), "127.0.0.1", 1, address="127.0.0.1:1", url=url, api_key_file=file)
    )


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What drivers were asked; they answer."""
    orders: list[dict[str, Any]] = []

    def ask(order: dict[str, Any], *_: Any) -> dict[str, Any]:
        orders.append(order)
        return {"quota": QUOTA, "defrag": PLAN, "status": STATE}[order["do"]]

    for module in (quota, instances):
        monkeypatch.setattr(module, "ask", ask)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(instances, "marked", lambda mark: [os.getpid()])
    monkeypatch.setattr(deploy, "marked", lambda mark: [os.getpid()])
    monkeypatch.setattr(InstanceState, "driver_environment", lambda self, instance: {"RAY_ADDRESS": "a:1"})
    return orders


@pytest.mark.parametrize(
    ("command", "question"),
    [
        (("status",), ("GET", "/admin/status")),
        (("quota",), ("GET", "/admin/quota")),
        (("defrag", "--plan"), ("GET", "/admin/defrag")),
        (("defrag",), ("POST", "/admin/defrag")),
    ],
)
def test_a_command_asks_the_endpoint_of_its_url_and_never_ray(
    run: Callable[..., Result],  # noqa: F811
    serve: Serve,  # noqa: F811
    ray: list[dict[str, Any]],
    command: tuple[str, ...],
    question: tuple[str, str],
) -> None:
    asked: list[Any] = []
    result = run(*command, "--json", "--url", f"{serve(answering(asked))}/v1", "--key", KEY)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout).items() >= ANSWERS[question[1]].items()
    assert (asked, ray) == ([question], [])


@pytest.mark.parametrize("command", [("status",), ("quota",), ("defrag",)])
def test_on_the_machine_of_the_instance_its_own_endpoint_is_asked_with_its_key(
    run: Callable[..., Result],  # noqa: F811
    serve: Serve,  # noqa: F811
    tmp_path: Path,
    ray: list[dict[str, Any]],
    command: tuple[str, ...],
) -> None:
    asked: list[Any] = []
    running(tmp_path, serve(answering(asked)))
    result = run(*command)
    assert result.exit_code == 0, result.output
    assert ([path for _, path in asked], ray) == ([f"/admin/{command[0]}"], [])


@pytest.mark.parametrize("command", ["status", "quota", "defrag"])
def test_where_the_key_here_is_no_operator_s_the_machine_s_owner_is_answered_through_ray(
    run: Callable[..., Result],  # noqa: F811
    serve: Serve,  # noqa: F811
    tmp_path: Path,
    ray: list[dict[str, Any]],
    command: str,
) -> None:
    running(tmp_path, serve(answering([])), key="sk-of-a-tenant")
    result = run(command)
    assert result.exit_code == 0, result.output
    assert [order["do"] for order in ray] == [command]


@pytest.mark.parametrize("command", ["status", "quota"])
def test_an_endpoint_that_does_not_answer_is_no_reason_to_see_nothing(
    run: Callable[..., Result],  # noqa: F811
    tmp_path: Path,
    ray: list[dict[str, Any]],
    command: str,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    running(tmp_path, f"http://127.0.0.1:{port}")
    assert run(command).exit_code == 0
    assert [order["do"] for order in ray] == [command]


def test_a_refusal_of_the_endpoint_is_not_asked_of_ray_again(
    run: Callable[..., Result],  # noqa: F811
    serve: Serve,  # noqa: F811
    tmp_path: Path,
    ray: list[dict[str, Any]],
) -> None:
    running(tmp_path, serve(lambda request, _: reply(request, 503, error_body("away", "no_quota"))))
    result = run("quota")
    assert (result.exit_code, result.stderr, ray) == (1, "error: 503: away\n", [])


def test_a_cluster_at_an_address_is_asked_through_ray(
    run: Callable[..., Result],  # noqa: F811
    ray: list[dict[str, Any]],
) -> None:
    assert run("quota", "--address", "head:6379").exit_code == 0
    assert [order["environment"]["RAY_ADDRESS"] for order in ray] == ["head:6379"]
    both = run("quota", "--address", "head:6379", "--url", "http://head:8000")
    assert (both.exit_code, len(ray)) == (2, 1)


def test_another_key_is_called_no_operator_s(run: Callable[..., Result], serve: Serve) -> None:  # noqa: F811
    result = run("quota", "--url", serve(answering([])), "--key", "sk-somebody")
    assert result.exit_code == 1
    assert "not an operator's; give an operator's key with --key" in result.stderr


def test_a_watch_goes_on_over_errors_until_ctrl_c(
    run: Callable[..., Result],  # noqa: F811
    serve: Serve,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = 0

    def answer(request: BaseHTTPRequestHandler, _: Any) -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            reply(request, 503, error_body("away", "no_quota"))
        else:
            reply(request, 200, json.dumps(QUOTA).encode())

    def sleep(_: float) -> None:
        if asked == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(command_line.time, "sleep", sleep)
    result = run("quota", "--watch", "--json", "--url", serve(answer), "--key", KEY)
    assert result.exit_code == 130
    assert [json.loads(line) for line in result.stdout.splitlines()] == [QUOTA, QUOTA]
    assert result.stderr == "error: 503: away\n"
