"""The exposition of this node's HAProxy: HAProxy itself, Serve's own template, our wrapper."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.router.metrics import haproxy_families
from serve_app.router.metrics.haproxy_table import HaproxyFigure
from serve_app.system import exposition_here
from serve_app.system.haproxy import BINARY_VARIABLE
from serve_app.system.haproxy_exporter import EXPORTER_S
from tests.requires import requires
from tests.system.real_haproxy import Edge, edge, routers
from tests.waiting import patient

requires("linux")

SOON_S = 1.0  # above EXPORTER_S


@pytest.fixture
def front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Edge]:
    with edge(tmp_path) as edge_process:
        monkeypatch.setenv(BINARY_VARIABLE, str(tmp_path / "haproxy"))  # as in Serve's processes, not before
        yield edge_process


def test_every_row_of_the_table_is_there_with_what_clients_and_routers_did(front: Edge) -> None:
    with routers("a", "b") as two:
        front.start(*two)
        assert [front.ask()[0] for _ in range(3)] == [200] * 3
        text = exposition_here()
        assert text is not None
        assert "haproxy_server_" not in text
    families = haproxy_families({"node-1": text, "node-2": None}).collect()
    found = {sample.name: sample.labels for family in families for sample in family.samples}
    assert found.keys() == {figure.value.sample_name for figure in HaproxyFigure}
    assert all(labels["node"] == "node-1" for labels in found.values())
    samples = {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}
    assert samples["haproxy_backend_http_responses_total", "node-1", "http-app", "2xx"] == 3
    assert samples["haproxy_backend_status", "node-1", "http-app", "UP"] == 1
    assert samples["haproxy_backend_active_servers", "node-1", "http-app"] == 2
    assert samples["haproxy_frontend_http_requests_total", "node-1", "http_frontend"] >= 3


def test_a_node_without_haproxy_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BINARY_VARIABLE, str(tmp_path / "haproxy"))
    assert exposition_here() is None
    monkeypatch.delenv(BINARY_VARIABLE)
    assert exposition_here() is None


def test_a_haproxy_that_stands_still_is_given_up_in_time(front: Edge) -> None:
    process = front.start()
    os.kill(process.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(OSError, match="timed out"):
        exposition_here()
    assert EXPORTER_S <= time.monotonic() - began < patient(SOON_S)
