"""A terminal in which `serve-app up` runs, with stand-ins for Ray and for the driver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.cli import up as module
from serve_app.cluster.local import node
from tests.cli.up_lab import LOADING, FakeDriver, Terminal, status
from tests.fakes import ray_node


@pytest.fixture(autouse=True)
def _no_contexts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Commands go where a test says, whatever its user's environment and contexts say."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for variable in ("SERVE_APP_URL", "SERVE_APP_CONTEXT", "SERVE_APP_API_KEY"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[FakeDriver]]:
    class Driver(FakeDriver):
        events = [*LOADING, status("running")]
        made: list[FakeDriver] = []

    monkeypatch.setattr(module, "RemoteDriver", Driver)
    monkeypatch.setattr(node, "ray_command", ray_node.command("run", tmp_path))
    yield Driver
    for item in Driver.made:
        item.close()


@pytest.fixture
def terminal(tmp_path: Path) -> Terminal:
    return Terminal(tmp_path)
