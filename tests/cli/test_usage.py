"""`serve-app usage` with a server of the tests: a table for people, CSV and JSON for programs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from typer.testing import Result

from serve_app.cli.usage import show
from tests.cli.test_chat import KEY, run, serve  # noqa: F401 - fixtures
from tests.cli.test_layout import piped, terminal
from tests.requires import requires

requires("linux")

Run = Callable[..., Result]
Serve = Callable[[Callable[[BaseHTTPRequestHandler, Any], None]], str]
ROW = {
    "day": "2026-11-25",
    "tenant": "acme, inc",
    "requests": 3,
    "prompt_tokens": 120,
    "cached_tokens": 64,
    "output_tokens": 30,
    "kv_token_ms": 123_456,
    "wait_ms": 1_250,
    "cost_micro": 12_000_345,
    "unsettled": 1,
}
REPORT: dict[str, Any] = {"object": "list", "by": ["day", "tenant"], "from": None, "to": None, "data": [ROW]}


def answering(asked: list[str], report: dict[str, Any] | None = None) -> Callable[[BaseHTTPRequestHandler, Any], None]:
    def answer(handler: BaseHTTPRequestHandler, _: Any) -> None:
        asked.append(handler.path)
        refused = {"error": {"message": "`from` must be a day, as 2026-11-25"}}
        body = json.dumps(refused if "from=x" in handler.path else report or REPORT).encode()
        handler.send_response(400 if "from=x" in handler.path else 200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def test_it_asks_for_the_groups_and_days_that_are_given(run: Run, serve: Serve) -> None:  # noqa: F811
    asked: list[str] = []
    url = serve(answering(asked))
    assert run("usage", "--url", url, "--key", KEY).exit_code == 0
    given = ("--by", "key", "--by", "day", "--from", "2026-11-01", "--to", "2026-11-30")
    assert run("usage", *given, "--url", url, "--key", KEY).exit_code == 0
    assert [parse_qs(urlsplit(path).query) for path in asked] == [
        {"by": ["tenant"]},
        {"by": ["key,day"], "from": ["2026-11-01"], "to": ["2026-11-30"]},
    ]
    assert run("usage", "--by", "week", "--url", url, "--key", KEY).exit_code == 2


def test_csv_has_the_same_columns_always_and_exact_numbers(run: Run, serve: Serve) -> None:  # noqa: F811
    result = run("usage", "--csv", "--url", serve(answering([])), "--key", KEY)
    head, line = csv.reader(io.StringIO(result.stdout))
    assert head[:2] == ["day", "tenant"]
    assert dict(zip(head, line, strict=True)) == {
        name: str(value) for name, value in ROW.items() if name != "cost_micro"
    } | {"cost": "12.000345"}


def test_json_is_the_answer_of_the_endpoint(run: Run, serve: Serve) -> None:  # noqa: F811
    result = run("usage", "--json", "--url", serve(answering([])), "--key", KEY)
    assert json.loads(result.stdout) == REPORT


def test_a_wrong_day_is_one_line(run: Run, serve: Serve) -> None:  # noqa: F811
    result = run("usage", "--from", "x", "--url", serve(answering([])), "--key", KEY)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "`from` must be a day" in result.stderr


def test_a_terminal_shows_the_cost_where_there_is_any() -> None:
    head, line = terminal(show, REPORT, 120)
    assert head.split()[-1] == "cost"
    assert line.split("  ")[:2] == ["2026-11-25", "acme, inc"]
    assert line.split()[-5:] == ["30", "123", "1.2", "1", "12.000345"]
    head, line = terminal(show, REPORT | {"data": [ROW | {"cost_micro": 0}]}, 120)
    assert (head.split()[-1], line.split()[-1]) == ("unsettled", "1")
    assert terminal(show, REPORT | {"data": []}) == ["Nothing was used."]


def test_in_a_pipe_every_line_has_the_same_columns() -> None:
    found = piped(show, REPORT | {"data": [ROW, ROW | {"cost_micro": 0}]})
    assert [len(line) for line in found] == [11, 11]
    assert found[1] == ["usage", "2026-11-25", "acme, inc", "3", "120", "64", "30", "123", "1.2", "1", "0.000000"]
    assert piped(show, REPORT | {"data": []}) == []
