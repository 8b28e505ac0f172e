"""`serve-app audit` with a server of the tests: a table for people, JSON lines for an export."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from typer.testing import Result

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
        (["2026-11-01T00:00:00.000+00:00"], None),
        (["2026-11-01T00:00:00.000+00:00"], ["1"]),
    ]


def test_the_export_has_one_object_a_line(run: Run, serve: Serve) -> None:  # noqa: F811
    done = run("audit", "--url", serve(answering([])), "--key", KEY, "--json")
    assert [json.loads(line) for line in done.stdout.splitlines()] == [MADE, DEPLOYED]


def test_since_is_a_date_a_time_or_a_duration(run: Run, serve: Serve) -> None:  # noqa: F811
    asked: list[dict[str, list[str]]] = []
    url = serve(answering(asked))
    before = datetime.now(UTC)
    for since in ("12h", "2026-11-01", "2026-11-01T10:00:00+02:00"):
        assert run("audit", "--url", url, "--key", KEY, "--since", since).exit_code == 0
    ago, day, time = [datetime.fromisoformat(query["since"][0]) for query in asked if "cursor" not in query]
    assert timedelta(0) <= ago - (before - timedelta(hours=12)) < timedelta(minutes=5)  # bound: of a slow machine
    assert (day, time) == (datetime(2026, 11, 1, tzinfo=UTC), datetime(2026, 11, 1, 8, tzinfo=UTC))
    wrong = run("audit", "--url", url, "--key", KEY, "--since", "yesterday")
    assert (wrong.exit_code, "--since yesterday" in wrong.stderr) == (2, True)
