"""`serve-app logs` on the files of an instance, during its life and after it, and by HTTP: piped and on a terminal."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from autoscaling.operations import LogLevel, LogLine, wanted_lines
from serve_app.cli import logs
from serve_app.cli.commands import app
from serve_app.cluster.local import InstanceState
from serve_app.errors import BadRequest
from serve_app.system import LogFilter
from tests.cli.test_chat import reply, serve  # noqa: F401 - a fixture
from tests.cli.test_endpoint import error_body
from tests.requires import requires

requires("linux")

REQUEST = "5d0c6f0e9c7b4f0f8a4f5f7d1c2b3a49"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command, with the logs of an ended instance."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    state = InstanceState("default", tmp_path)
    (state.logs / "ray/serve").mkdir(parents=True)
    (state.logs / "ray/serve/replica_serve_app_Router_r1.log").write_text(f"INFO one\nINFO {REQUEST} two\n")
    (state.logs / "ray/serve/replica_serve_app_engine-org--m_x1.log").write_text("INFO ready\n")
    return lambda *arguments: CliRunner().invoke(app, ["logs", *arguments], env={"SERVE_APP_STATE": str(tmp_path)})


def test_of_an_ended_instance_each_piped_line_has_source_and_replica(run: Callable[..., Result]) -> None:
    assert sorted(run().stdout.splitlines()) == [
        "engine-org--m\tx1\t-\tINFO ready",
        "router\tr1\t-\tINFO 5d0c6f0e9c7b4f0f8a4f5f7d1c2b3a49 two",
        "router\tr1\t-\tINFO one",
    ]
    assert run("org/m").stdout == "engine-org--m\tx1\t-\tINFO ready\n"
    assert run("router", "--lines", "1", "-f").stdout == f"router\tr1\t-\tINFO {REQUEST} two\n", "-f ends with it"


def test_a_request_is_found_by_any_of_its_ids_and_else_its_receipt_is_named(run: Callable[..., Result]) -> None:
    assert run("--request", f"chatcmpl-{REQUEST}").stdout == f"router\tr1\t-\tINFO {REQUEST} two\n"
    missing = run("--request", "00000000")
    assert missing.exit_code == 1
    assert "serve-app explain 00000000" in missing.stderr
    assert run("--request", "cmpl-00").exit_code == 2


def test_without_logs_it_says_where_it_looked(run: Callable[..., Result]) -> None:
    result = run("--instance", "another")
    assert result.exit_code == 1
    assert "another/logs/ray" in result.stderr


def test_names_of_models_and_of_other_sources() -> None:
    assert wanted_lines("org/m", "x", "") == LogFilter("engine-org--m", "x", "")
    assert wanted_lines("quota", level=LogLevel.ERROR, since=7.0) == LogFilter("quota", level="ERROR", since=7.0)
    with pytest.raises(BadRequest, match="whole id"):
        wanted_lines("", "", "resp_1")


def at(hour: int, second: int = 0) -> float:
    return datetime(2026, 11, 25, hour, 0, second).timestamp()


@pytest.fixture
def night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command, with the logs of a router and an engine that were written in turn."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    folder = InstanceState("default", tmp_path).logs / "ray/serve"
    folder.mkdir(parents=True)
    router = "INFO 2026-11-25 01:00:00,000 r -- one\nERROR 2026-11-25 03:00:00,000 r -- three\nTraceback\n"
    (folder / "replica_serve_app_Router_r1.log").write_text(router)
    engine = "WARNING 2026-11-25 02:00:00,500 e -- two\nINFO 2026-11-25 04:00:00,000 e -- four\n"
    (folder / "replica_serve_app_engine-m_x1.log").write_text(engine)
    return lambda *arguments: CliRunner().invoke(app, ["logs", *arguments], env={"SERVE_APP_STATE": str(tmp_path)})


def words(result: Result) -> list[str]:
    return [line.split()[-1] for line in result.stdout.splitlines()]


def test_lines_of_all_files_stand_in_order_of_time_and_a_traceback_stays_with_its_record(
    night: Callable[..., Result],
) -> None:
    assert words(night()) == ["one", "two", "three", "Traceback", "four"]
    assert words(night("--lines", "3")) == ["three", "Traceback", "four"]
    first = night().stdout.splitlines()[0].split("\t")
    assert datetime.fromisoformat(first[2]).timestamp() == at(1)
    assert datetime.fromisoformat(first[2]).tzinfo is not None


def test_a_level_and_a_time_restrict_the_records(night: Callable[..., Result]) -> None:
    assert words(night("--level", "warning")) == ["two", "three", "Traceback"]
    assert words(night("--level", "error")) == ["three", "Traceback"]
    assert words(night("--since", "2026-11-25T02:30")) == ["three", "Traceback", "four"]
    assert words(night("--since", "2026-11-25T02:30", "--level", "info", "engine-none")) == []
    assert night("--since", "yesterday").exit_code == 2


def test_json_has_an_object_a_line(night: Callable[..., Result]) -> None:
    first = json.loads(night("--json").stdout.splitlines()[0])
    assert (first["source"], first["replica"], first["line"]) == (
        "router",
        "r1",
        "INFO 2026-11-25 01:00:00,000 r -- one",
    )
    assert datetime.fromisoformat(first["time"]).timestamp() == at(1)


def test_a_duration_counts_back_from_now() -> None:
    now = datetime(2026, 11, 25, 12, tzinfo=UTC)
    assert logs.since_of("10m", now) == (now - timedelta(minutes=10)).timestamp()
    assert logs.since_of("2026-11-25T11:00:00+00:00", now) == (now - timedelta(hours=1)).timestamp()


def test_on_a_terminal_each_line_has_its_time_and_place() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, no_color=True)
    assert logs.show([[LogLine(at(1), "router", "r1", "/logs/a", "[one]")]], console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.endswith(" router r1  [one]\n")
    assert datetime.fromisoformat(shown.split()[0]).timestamp() == at(1)


def line(time: str, text: str, replica: str = "r1") -> dict[str, Any]:
    return {"time": time, "source": "router", "replica": replica, "path": "/a", "line": text}


def test_by_http_the_parameters_are_given_and_new_lines_are_shown_once(
    run: Callable[..., Result],  # the instance is not asked
    serve: Callable[..., str],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = line("2026-11-25T01:00:00.000+00:00", "one")
    late = line("2026-11-25T01:00:00.000+00:00", "late", "r2")
    looks = [[first], [first, late], None, [first, first, late, line("2026-11-25T01:00:03.000+00:00", "two")]]
    asked: list[dict[str, list[str]]] = []

    def answer(request: BaseHTTPRequestHandler, _: Any) -> None:
        asked.append(parse_qs(urlsplit(request.path).query))
        found = looks.pop(0)
        if found is None:
            reply(request, 503, error_body("away", "no_controller"))
        else:
            reply(request, 200, json.dumps({"object": "list", "data": found}).encode())

    def sleep(_: float) -> None:
        if not looks:
            raise KeyboardInterrupt

    monkeypatch.setattr(logs.time, "sleep", sleep)
    given = ("--level", "info", "--since", "2026-11-24T00:00:00+00:00", "--lines", "7", "--url", serve(answer))
    result = run("org/m", "-f", "--request", f"cmpl-{REQUEST}", *given)
    assert result.exit_code == 130
    assert words(result) == ["one", "late", "one", "two"], "the same line twice, once it is there twice"
    assert asked[0] == {
        "source": ["org/m"],
        "request": [REQUEST],
        "level": ["info"],
        "since": ["2026-11-24T00:00:00.000+00:00"],
        "lines": ["7"],
    }
    assert asked[1]["since"] == ["2026-11-25T00:59:55.000+00:00"]
