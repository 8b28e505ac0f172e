"""`serve-app explain` with a server of the tests: the story for people, every figure for programs, errors in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

from typer.testing import Result

from tests.cli.test_chat import KEY, run, serve  # noqa: F401 - fixtures
from tests.requires import requires

requires("linux")

Run = Callable[..., Result]
Serve = Callable[[Callable[[BaseHTTPRequestHandler, Any], None]], str]
RECEIPT = {
    "request_id": "a1",
    "outcome": "refused",
    "story": ["a1: low request of acme to tiny, refused after 4 ms.", "Refused (queue_full): the line was [full]."],
}


def answering(asked: list[tuple[str, str | None]]) -> Callable[[BaseHTTPRequestHandler, Any], None]:
    def answer(handler: BaseHTTPRequestHandler, _: Any) -> None:
        asked.append((handler.path, handler.headers["Authorization"]))
        known = handler.path == "/admin/requests/cmpl-a1"
        body = json.dumps(RECEIPT if known else {"error": {"message": "no receipt of 'x/y'"}}).encode()
        handler.send_response(200 if known else 404)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def test_the_story_is_printed_as_it_is(run: Run, serve: Serve) -> None:  # noqa: F811
    asked: list[tuple[str, str | None]] = []
    url = serve(answering(asked))
    result = run("explain", "cmpl-a1", "--url", url, "--key", KEY)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [RECEIPT["story"][0], "  " + RECEIPT["story"][1]]
    assert asked == [("/admin/requests/cmpl-a1", f"Bearer {KEY}")]


def test_json_has_every_figure(run: Run, serve: Serve) -> None:  # noqa: F811
    result = run("explain", "cmpl-a1", "--json", "--url", serve(answering([])), "--key", KEY)
    assert json.loads(result.stdout) == RECEIPT


def test_an_unknown_id_is_one_line_and_cannot_leave_its_path(run: Run, serve: Serve) -> None:  # noqa: F811
    asked: list[tuple[str, str | None]] = []
    result = run("explain", "x/y?z", "--url", serve(answering(asked)), "--key", KEY)
    assert result.exit_code == 2
    assert "no receipt of 'x/y'" in result.stderr
    assert asked[0][0] == "/admin/requests/x%2Fy%3Fz"


def test_without_an_instance_it_says_so(run: Run) -> None:  # noqa: F811
    result = run("explain", "a1")
    assert result.exit_code == 3
    assert "nothing runs" in result.stderr
