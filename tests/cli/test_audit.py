"""`serve-app audit` with a server of the tests: a table for people, JSON lines for an export."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from typer.testing import Result

from serve_app.cli.audit import start_of
from serve_app.errors import BadRequest
from tests.cli.test_chat import KEY, reply, run, serve  # noqa: F401 - fixtures
from tests.requires import requires

requires("linux")

Run = Callable[..., Result]
Serve = Callable[[Callable[[BaseHTTPRequestHandler, Any], None]], str]
MADE = {
    "id": "1",
    "time": "2026-11-25T09:00:00Z",
    "author": "ops",
    "tenant": "platform",
    "action": "key.update",
    "target": "key_1",
    "digest_before": None,
    "digest_after": None,
    "details": {"name": "laptop", "tenant": "acme", "changed": {"max_class": ["high", "low"]}},
}
DEPLOYED = {
    **MADE,
    "id": "2",
    "author": "machine",
    "tenant": None,
    "action": "deploy",
    "target": "serve_app",
    "digest_after": "ab" * 32,
    "details": {"user": "root"},
}


def answering(asked: list[dict[str, list[str]]]) -> Callable[[BaseHTTPRequestHandler, Any], None]:
    """A record of two entries, one a page."""

    def answer(handler: BaseHTTPRequestHandler, _: Any) -> None:
        query = parse_qs(urlsplit(handler.path).query)
        asked.append(query)
        is_second = "cursor" in query
        page = {"data": [DEPLOYED if is_second else MADE], "has_more": not is_second, "next_cursor": "1"}
        reply(handler, 200, json.dumps(page).encode())

    return answer


def test_piped_each_entry_is_a_line(run: Run, serve: Serve) -> None:  # noqa: F811
    asked: list[dict[str, list[str]]] = []
    done = run("audit", "--url", serve(answering(asked)), "--key", KEY, "--since", "2026-11-01")
    assert done.exit_code == 0, done.output
    assert [line.split("\t") for line in done.stdout.splitlines()] == [
        ["audit", MADE["time"], "ops (platform)", "key.update", "key_1", "laptop max_class"],
        ["audit", MADE["time"], "machine", "deploy", "serve_app", "nothing -> abababababab"],
    ]
    assert [(query["since"], query.get("cursor")) for query in asked] == [
        (["2026-11-01T00:00:00+00:00"], None),
        (["2026-11-01T00:00:00+00:00"], ["1"]),
    ]


def test_the_export_has_one_object_a_line(run: Run, serve: Serve) -> None:  # noqa: F811
    done = run("audit", "--url", serve(answering([])), "--key", KEY, "--json")
    assert [json.loads(line) for line in done.stdout.splitlines()] == [MADE, DEPLOYED]


def test_since_is_a_date_a_time_or_a_duration() -> None:
    now = datetime(2026, 11, 29, 12, tzinfo=UTC)
    assert start_of("12h", now) == "2026-11-29T00:00:00+00:00"
    assert start_of("2026-11-01", now) == "2026-11-01T00:00:00+00:00"
    assert start_of("2026-11-01T10:00:00+02:00", now) == "2026-11-01T10:00:00+02:00"
    with pytest.raises(BadRequest, match="--since"):
        start_of("yesterday", now)
