"""`serve-app logs` on the files of an instance: piped and on a terminal, during its life and after it."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from serve_app.cli import logs
from serve_app.cli.commands import app
from serve_app.cluster.local import InstanceState
from serve_app.errors import BadRequest
from serve_app.system import LogFilter, LogPart
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
        "engine-org--m\tx1\tINFO ready",
        "router\tr1\tINFO 5d0c6f0e9c7b4f0f8a4f5f7d1c2b3a49 two",
        "router\tr1\tINFO one",
    ]
    assert run("org/m").stdout == "engine-org--m\tx1\tINFO ready\n"
    assert run("router", "--lines", "1", "-f").stdout == f"router\tr1\tINFO {REQUEST} two\n", "-f ends with it"


def test_a_request_is_found_by_any_of_its_ids_and_else_its_receipt_is_named(run: Callable[..., Result]) -> None:
    assert run("--request", f"chatcmpl-{REQUEST}").stdout == f"router\tr1\tINFO {REQUEST} two\n"
    missing = run("--request", "00000000")
    assert missing.exit_code == 1
    assert "serve-app explain 00000000" in missing.stderr
    assert run("--request", "cmpl-00").exit_code == 2


def test_without_logs_it_says_where_it_looked(run: Callable[..., Result]) -> None:
    result = run("--instance", "another")
    assert result.exit_code == 1
    assert "another/logs/ray" in result.stderr


def test_names_of_models_and_of_other_sources() -> None:
    assert logs.wanted_lines("org/m", "x", "") == LogFilter("engine-org--m", "x", "")
    assert logs.wanted_lines("quota", "", "") == LogFilter("quota")
    with pytest.raises(BadRequest, match="whole id"):
        logs.wanted_lines("", "", "resp_1")


def test_a_terminal_shows_a_heading_where_the_file_changes() -> None:
    first = LogPart("router", "r1", "/logs/a", ("one",))
    second = LogPart("engine-m", "x1", "/logs/b", ("[two]",))
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, no_color=True)
    assert logs.show([[first], [first, second]], console)
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        *("==> router r1 /logs/a <==", "one", "one"),
        *("==> engine-m x1 /logs/b <==", "[two]"),
    ]
