"""`serve-app up` from start to end, with stand-ins for Ray and for the driver; signals and processes are real."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from serve_app.cli import up as module
from serve_app.cli.up import with_kept_logs
from serve_app.cluster.local import Instance, InstanceState, node
from serve_app.errors import Unavailable
from serve_app.settings import Settings, parse
from serve_app.system import marked
from tests.cli.up_lab import LOADING, SEEN_S, FakeDriver, Terminal, interrupt, status
from tests.fakes import ray_node
from tests.requires import requires
from tests.waiting import wait_until

requires("linux")

DIGEST = "ab" * 32


def test_it_starts_announces_and_ends_on_ctrl_c(terminal: Terminal, driver: type[FakeDriver]) -> None:
    written: list[dict[str, Any] | None] = []

    def look_and_interrupt() -> None:
        written.append(terminal.state.read_status())
        interrupt()

    assert terminal.run(Settings(), ("Ctrl-C ends everything", look_and_interrupt)) == 0
    order = driver.made[0].order
    key = terminal.state.generated_key_file.read_text().strip()
    assert f"API key   in {terminal.state.generated_key_file}" in terminal.text
    assert key not in terminal.text  # it is no terminal: the lines may be kept in a log
    url = f"http://127.0.0.1:{order['serve']['http_options']['port']}"
    assert f"Serving tiny at {url}" in terminal.text
    bearer = f'"Authorization: Bearer $(cat {terminal.state.generated_key_file})"'
    assert f"curl {url}/v1/chat/completions -H {bearer}" in terminal.text
    phases = [
        "Starting a Ray of its own",
        "Deploying",
        "Loading tiny",
        "Opening the endpoint",
        "Ending the application",
    ]
    positions = [terminal.text.index(phase) for phase in phases]
    assert positions == sorted(positions)
    assert order["application"]["import_path"] == "serve_app.app:build"
    assert key not in str(order)
    assert written[0] is not None
    assert written[0]["state"] == "running"
    assert driver.made[0].sent == [{"do": "shutdown"}]
    assert terminal.mark
    assert marked(terminal.mark) == []
    assert terminal.state.read() is None


def test_a_generated_key_is_shown_on_a_terminal(terminal: Terminal, driver: type[FakeDriver]) -> None:
    terminal.is_real = True
    assert terminal.run(Settings(), ("Ctrl-C ends everything", interrupt)) == 0
    key = terminal.state.generated_key_file.read_text().strip()
    assert f"API key   {key}  (kept in {terminal.state.generated_key_file})" in terminal.text
    assert f"-H 'Authorization: Bearer {key}'" in terminal.text


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_configured_key_is_never_shown(terminal: Terminal, driver: type[FakeDriver], is_terminal: bool) -> None:
    terminal.is_real = is_terminal
    key = "sk-configured-0123456789"
    kept: list[str] = []

    def look_and_interrupt() -> None:
        kept.append(terminal.state.configured_key_file.read_text().strip())
        interrupt()

    assert terminal.run(parse({"auth": {"keys": [{"key": key}]}}), ("Ctrl-C ends", look_and_interrupt)) == 0
    assert kept == [key]
    assert key not in terminal.text
    assert f"API key   in {terminal.state.configured_key_file}  (from the configuration)" in terminal.text
    assert f'"Authorization: Bearer $(cat {terminal.state.configured_key_file})"' in terminal.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_of_the_system_ends_it_in_order_too(
    terminal: Terminal, driver: type[FakeDriver], number: signal.Signals
) -> None:
    assert terminal.run(Settings(), ("Ctrl-C ends everything", lambda: os.kill(os.getpid(), number))) == 0
    assert driver.made[0].sent == [{"do": "shutdown"}]
    assert marked(terminal.mark) == []


def test_ctrl_c_while_ray_starts_leaves_nothing(
    terminal: Terminal, driver: type[FakeDriver], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(node, "ray_command", ray_node.command("silent", tmp_path))

    def interrupt_started_node() -> None:
        wait_until((tmp_path / "attempts").exists, SEEN_S, "the node is started")
        instance = terminal.state.read()
        assert instance is not None
        terminal.mark = instance.mark
        interrupt()

    assert terminal.run(Settings(), ("Starting a Ray", interrupt_started_node)) == 130
    assert driver.made == []
    assert "interrupted after" in terminal.text
    assert marked(terminal.mark) == []
    assert terminal.state.read() is None
    assert not terminal.state.owned_elsewhere()


def test_ctrl_c_while_the_model_loads_ends_the_application_first(terminal: Terminal, driver: type[FakeDriver]) -> None:
    driver.events = LOADING
    assert terminal.run(Settings(), ("tiny 0/1 (starting)", interrupt)) == 130
    assert driver.made[0].sent == [{"do": "shutdown"}]
    assert marked(terminal.mark) == []


def test_a_second_ctrl_c_does_not_wait_for_the_application(terminal: Terminal, driver: type[FakeDriver]) -> None:
    driver.end_s = 300.0  # longer than this test may take
    acts = [("Ctrl-C ends everything", interrupt), ("Ending the application", interrupt)]
    began = time.monotonic()
    assert terminal.run(Settings(), *acts) == 130
    assert time.monotonic() - began < driver.end_s
    assert "Killing what is left" in terminal.text
    assert marked(terminal.mark) == []
    assert terminal.state.read() is None


def test_an_application_that_fails_is_reported_and_cleaned_up(terminal: Terminal, driver: type[FakeDriver]) -> None:
    driver.events = [*LOADING, status("failed", "engine-tiny: ValueError: the weights are missing", "STARTING")]
    assert terminal.run(Settings(), ("Loading", lambda: None)) == 1
    assert "error: the application did not start: engine-tiny: ValueError: the weights are missing" in terminal.text
    assert "✗ Loading tiny" in terminal.text
    assert marked(terminal.mark) == []


def test_a_log_is_named_by_the_place_where_it_will_be_kept(tmp_path: Path) -> None:
    state = InstanceState("one", tmp_path)
    state.create()
    reported = "failed; log: /tmp/sa-1/ray/session_2026-11-25_1/logs/worker-7.err"
    assert with_kept_logs(reported, state) == reported
    state.write(Instance("one", "mark", "/tmp/sa-1", "127.0.0.1", 8000))
    assert with_kept_logs(reported, state) == f"failed; log: {state.logs}/ray/worker-7.err"


@pytest.mark.parametrize(
    ("event", "reported"),
    [
        ({"event": "error", "message": "ConfigError: models: none"}, "error: ConfigError: models: none"),
        ({"event": "end"}, "ended unexpectedly"),
    ],
)
def test_a_driver_that_ends_is_reported(
    terminal: Terminal, driver: type[FakeDriver], event: dict[str, Any], reported: str
) -> None:
    driver.events = [event]
    assert terminal.run(Settings(), ("Deploying", lambda: None)) == 1
    assert reported in terminal.text
    assert marked(terminal.mark) == []


def test_a_cluster_that_dies_while_it_serves_is_reported(terminal: Terminal, driver: type[FakeDriver]) -> None:
    def kill_all() -> None:
        for pid in marked(terminal.mark):
            os.kill(pid, signal.SIGKILL)

    assert terminal.run(Settings(), ("Ctrl-C ends everything", kill_all)) == 1
    assert "the local cluster ended unexpectedly" in terminal.text
    assert terminal.state.read() is None


def test_an_endpoint_that_never_gets_ready_is_a_failure(
    terminal: Terminal, driver: type[FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.ready = 503
    monkeypatch.setattr(module, "READY_S", 0.2)  # not to wait out the real bound
    assert terminal.run(Settings(), ("Opening", lambda: None)) == 1
    assert "/ready still answers 503" in terminal.text


def test_with_digests_only_a_refusal_shows_that_the_router_runs(terminal: Terminal, driver: type[FakeDriver]) -> None:
    driver.ready = 401
    settings = parse({"auth": {"keys": [{"key_sha256": DIGEST}]}})
    assert terminal.run(settings, ("Ctrl-C ends everything", interrupt)) == 0
    assert "only digests are known here" in terminal.text
    assert '-H "Authorization: Bearer $API_KEY"' in terminal.text


def test_a_second_one_of_the_same_name_is_refused(terminal: Terminal, driver: type[FakeDriver]) -> None:
    refused: list[str] = []

    def again() -> None:
        other = InstanceState("one", terminal.state.folder.parent)
        try:
            other.acquire()
        except Unavailable as error:
            refused.append(error.message)
        interrupt()

    assert terminal.run(Settings(), ("Ctrl-C ends everything", again)) == 0
    assert len(refused) == 1
    assert "already running at http://127.0.0.1:" in refused[0]
