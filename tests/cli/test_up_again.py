"""What `serve-app up` starts again: the driver, and with --restart everything."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from serve_app.cli import up as module
from serve_app.cluster.local import InstanceState
from serve_app.settings import Settings
from serve_app.system import marked
from tests.cli.up_lab import FakeDriver, Terminal, interrupt, status
from tests.requires import requires

requires("linux")


@pytest.mark.parametrize("last", [[], [{"event": "error", "message": "RayActorError: the controller died"}]])
def test_a_driver_that_dies_while_it_serves_is_followed_by_one_that_finds_what_runs(
    terminal: Terminal, driver: type[FakeDriver], last: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DRIVER_RETRY_S", 0.01)
    nodes: list[str] = []

    def kill_driver() -> None:
        nodes.append(terminal.mark)
        driver.events = [status("running", "seen by the next one")]
        driver.made[0].die(*last)

    def end() -> None:
        nodes.append(terminal.mark)
        interrupt()

    acts = [("Ctrl-C ends everything", kill_driver), ("seen by the next one", end)]
    assert terminal.run(Settings(), *acts) == 0
    first, second = driver.made
    assert (first.order["do"], second.order["do"]) == ("serve", "watch")
    assert second.order["environment"] == first.order["environment"]
    assert second.sent == [{"do": "shutdown"}]
    assert nodes[0] == nodes[1]
    assert "has ended" in terminal.text
    assert marked(terminal.mark) == []


def test_a_driver_that_dies_again_and_again_is_awaited_twice_as_long_each_time(
    terminal: Terminal, driver: type[FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DRIVER_RETRY_S", 0.001)
    monkeypatch.setattr(module, "MAX_DRIVER_RETRY_S", 0.004)

    def kill_drivers() -> None:
        driver.events = [{"event": "end"}]
        driver.made[0].die()

    def end() -> None:
        driver.events = []
        interrupt()

    assert terminal.run(Settings(), ("Ctrl-C ends everything", kill_drivers), ("in 0.004 s", end)) == 0
    waits = [line.split(" in ")[1] for line in terminal.text.splitlines() if "Another starts" in line]
    assert waits[:3] == ["0.001 s.", "0.002 s.", "0.004 s."]
    assert marked(terminal.mark) == []


def no_memory(driver: type[FakeDriver], order: str, times: float, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """So many processes with this order cannot be forked; returns a list that has an entry for each."""
    failed: list[str] = []

    def make(given: dict[str, Any], log: Path | None = None) -> FakeDriver:
        if given["do"] == order and len(failed) < times:
            failed.append(order)
            raise (OSError(12, "Cannot allocate memory") if len(failed) % 2 else RuntimeError("can't start new thread"))
        return driver(given, log)

    monkeypatch.setattr(module, "RemoteDriver", make)
    return failed


def test_a_driver_for_which_there_is_no_memory_is_tried_again_while_the_application_serves(
    terminal: Terminal, driver: type[FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DRIVER_RETRY_S", 0.001)
    failed = no_memory(driver, "watch", 2, monkeypatch)

    def kill_driver() -> None:
        driver.events = [status("running", "seen by the next one")]
        driver.made[0].die()

    assert terminal.run(Settings(), ("Ctrl-C ends everything", kill_driver), ("seen by the next one", interrupt)) == 0
    assert len(failed) == 2
    assert "The process that watches the application cannot be started ([Errno 12]" in terminal.text
    assert [one.order["do"] for one in driver.made] == ["serve", "watch"]
    assert driver.made[1].sent == [{"do": "shutdown"}]
    assert marked(terminal.mark) == []


def test_ray_ends_though_there_is_no_memory_for_a_driver_that_ends_the_application(
    terminal: Terminal, driver: type[FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = no_memory(driver, "watch", math.inf, monkeypatch)
    acts = [("Ctrl-C ends everything", lambda: driver.made[0].die()), ("cannot be started", interrupt)]
    assert terminal.run(Settings(), *acts) == 0
    assert failed
    assert "The application is not ended in order" in terminal.text
    assert marked(terminal.mark) == []


def test_a_first_driver_for_which_there_is_no_memory_is_a_failed_start(
    terminal: Terminal, driver: type[FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_memory(driver, "serve", 1, monkeypatch)
    assert terminal.run(Settings(), ("Everything of 'one' has ended", lambda: None)) == 1
    assert "error: the process that deploys the application cannot be started" in terminal.text
    assert marked(terminal.mark) == []


@pytest.mark.parametrize("ends_in_order", [True, False], ids=["ended in order", "killed"])
def test_an_error_that_nobody_expects_leaves_no_process(
    ends_in_order: bool, terminal: Terminal, driver: type[FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(InstanceState, "write_status", fails)
    if not ends_in_order:
        monkeypatch.setattr(driver, "send", fails)
    with pytest.raises(OSError, match="No space left"):
        terminal.run(Settings(), ("Deploying", lambda: None))
    assert terminal.mark
    assert marked(terminal.mark) == []
    assert terminal.state.read() is None


def test_a_cluster_that_dies_is_started_again_with_its_keys_where_that_is_wanted(
    terminal: Terminal, driver: type[FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RESTART_S", 0.01)
    seen: list[tuple[str, str]] = []

    def look() -> None:
        seen.append((terminal.mark, terminal.state.generated_key_file.read_text()))

    def kill_all() -> None:
        look()
        terminal.state.store_file.write_text("keys, use and batches")
        for pid in marked(terminal.mark):
            os.kill(pid, signal.SIGKILL)

    def second_is_up() -> None:
        terminal.wait_for("Ctrl-C ends everything", 2)
        instance = terminal.state.read()
        terminal.mark = instance.mark if instance else ""
        look()
        interrupt()

    acts = [("Ctrl-C ends everything", kill_all), ("is started again", second_is_up)]
    assert terminal.run(Settings(), *acts, restart=True) == 0
    (first_mark, first_key), (second_mark, second_key) = seen
    assert first_mark != second_mark
    assert first_key == second_key
    assert terminal.state.store_file.read_text() == "keys, use and batches"
    assert [one.order["do"] for one in driver.made] == ["serve", "serve"]
    assert marked(terminal.mark) == []


def test_a_cluster_that_dies_again_and_again_is_given_up(
    terminal: Terminal, driver: type[FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RESTART_S", 0.001)
    monkeypatch.setattr(module, "RESTARTS", 2)

    def kill_each() -> None:
        for number in range(3):
            terminal.wait_for("Ctrl-C ends everything", number + 1)
            instance = terminal.state.read()
            for pid in marked(instance.mark) if instance else ():
                os.kill(pid, signal.SIGKILL)

    assert terminal.run(Settings(), ("Ctrl-C ends everything", kill_each), restart=True) == 1
    assert "(2 of 2)" in terminal.text
    assert len(driver.made) == 3
    assert terminal.state.read() is None
