"""Where a client's cluster, application and key come from, and what is said when they come from nowhere."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RaySystemError
from ray.serve.exceptions import RayServeException

from serve_app.client import connect
from serve_app.client import connection as connections
from serve_app.cluster.local import Instance, InstanceState
from serve_app.errors import ConfigError, Unavailable
from serve_app.names import APPLICATION, ROUTER

KEY = "sk-connection-0123456789"


class Ray:
    """What stands in for Ray, Serve and `driver`, and what was done to them."""

    def __init__(self) -> None:
        self.joined: dict[str, str] | None = None  # the environment this process was connected with
        self.left = 0
        self.restored: Mapping[str, Any] | None = None
        self.gcs = ""
        self.initialized = False
        self.failure: Exception | None = None
        self.ingress: dict[str, str] = {APPLICATION: ROUTER}

    def connect(self, environment: Mapping[str, str]) -> dict[str, str | None]:
        if self.failure is not None:
            raise self.failure
        self.joined = dict(environment)
        self.gcs = environment["RAY_ADDRESS"]
        if self.initialized:
            return {}
        self.initialized = True
        return {"BEFORE": "value"}

    def disconnect(self) -> None:
        self.left += 1

    def get_app_handle(self, name: str) -> Any:
        if name not in self.ingress:
            raise RayServeException(f"Application '{name}' does not exist.")
        return SimpleNamespace(deployment_name=self.ingress[name])


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ray:
    fake = Ray()
    context = SimpleNamespace(gcs_address=property(lambda _: fake.gcs))
    monkeypatch.setattr(connections.ray, "is_initialized", lambda: fake.initialized)
    monkeypatch.setattr(
        connections.ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=fake.gcs, context=context)
    )
    monkeypatch.setattr(connections.serve, "get_app_handle", fake.get_app_handle)
    monkeypatch.setattr(connections.driver, "connect", fake.connect)
    monkeypatch.setattr(connections.driver, "disconnect", fake.disconnect)
    monkeypatch.setattr(connections.driver, "restore", lambda before: setattr(fake, "restored", before))
    monkeypatch.setenv("SERVE_APP_STATE", str(tmp_path))
    monkeypatch.delenv("SERVE_APP_API_KEY", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return fake


@pytest.fixture
def listener() -> Iterator[str]:
    """host:port where something listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def instance(ray: Ray, listener: str, tmp_path: Path) -> Iterator[InstanceState]:
    """A running instance named `default`, with its key."""
    state = InstanceState()
    state.create()
    state.acquire()
    token = state.new_token()
    key_file = tmp_path / "key"
    key_file.write_text(f"{KEY}\n")
    state.write(Instance("default", "mark", "", "127.0.0.1", 1, address=listener, api_key_file=str(key_file)))
    assert state.token_file.read_text() == token
    yield state
    state.release()


def test_a_fresh_process_joins_what_make_serve_runs(ray: Ray, instance: InstanceState, listener: str) -> None:
    found = connect()
    assert found.openai.api_key == KEY
    assert ray.joined is not None
    assert ray.joined["RAY_ADDRESS"] == listener
    assert ray.joined["RAY_AUTH_TOKEN"] == instance.token_file.read_text()
    level = logging.getLogger("ray.serve").level
    assert level >= logging.WARNING, "Serve writes about its insides"
    found.close()
    assert (ray.left, ray.restored) == (1, {"BEFORE": "value"})
    assert logging.getLogger("ray.serve").level < level


def test_a_process_in_a_cluster_stays_there(ray: Ray, instance: InstanceState, listener: str) -> None:
    ray.initialized = True
    ray.gcs = listener
    found = connect()
    assert found.openai.api_key == KEY, "it is the instance's cluster, so its key will do"
    assert ray.joined is None
    found.close()
    assert ray.left == 0
    ray.gcs = "10.0.0.1:6379"
    with pytest.raises(ConfigError, match="SERVE_APP_API_KEY"):
        connect()
    assert connect(api_key="sk-given").openai.api_key == "sk-given"


def test_an_address_is_joined_with_what_loopback_needs(
    ray: Ray, listener: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(address=listener, api_key=KEY)
    assert ray.joined == {"RAY_ADDRESS": listener, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    ray.initialized = False
    monkeypatch.setenv("RAY_ADDRESS", listener)
    monkeypatch.setenv("SERVE_APP_API_KEY", KEY)
    assert connect().openai.api_key == KEY
    assert ray.joined["RAY_ADDRESS"] == listener


def test_the_keys_come_in_this_order(ray: Ray, instance: InstanceState, monkeypatch: pytest.MonkeyPatch) -> None:
    assert connect().openai.api_key == KEY
    monkeypatch.setenv("SERVE_APP_API_KEY", "sk-environment")
    assert connect().openai.api_key == "sk-environment"
    assert connect(api_key="sk-argument").openai.api_key == "sk-argument"


@pytest.mark.parametrize(
    ("given", "reported", "param"),
    [
        ({"instance": "a", "address": "b:1"}, "not both", "address"),
        ({"instance": "nobody"}, "no instance 'nobody' runs", "instance"),
        ({}, "serve-app up", "instance"),
        ({"instance": "no name!"}, "is no name", "instance"),
    ],
)
def test_what_is_not_there_is_named(ray: Ray, given: dict[str, Any], reported: str, param: str) -> None:
    with pytest.raises(ConfigError, match=reported) as raised:
        connect(api_key=KEY, **given)
    assert raised.value.param == param
    assert ray.joined is None


def test_an_instance_whose_owner_died_is_not_joined(ray: Ray, instance: InstanceState) -> None:
    instance.release()
    with pytest.raises(ConfigError, match="no instance 'default' runs"):
        connect()


@pytest.mark.parametrize(
    "failure",
    [
        RuntimeError("RAY_SERVE_THROUGHPUT_OPTIMIZED=1: synchronous handle calls would fail; unset it"),
        ConnectionError("told\nand a long trace"),
        RaySystemError("told"),
        Unavailable("no Ray cluster answers there", code="cluster_failed"),
    ],
)
def test_a_cluster_that_cannot_be_joined_is_an_error_of_one_line(ray: Ray, listener: str, failure: Exception) -> None:
    ray.failure = failure
    with pytest.raises(ConfigError) as raised:
        connect(address=listener, api_key=KEY)
    assert "cannot be joined" in raised.value.message
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"application": "other"}, "not one of serve-app"),
        ({"application": "none"}, "no application 'none'"),
        ({}, "key"),
    ],
)
def test_what_fails_after_joining_leaves_again(ray: Ray, listener: str, changes: dict[str, Any], reported: str) -> None:
    ray.ingress["other"] = "SomethingElse"
    with pytest.raises(ConfigError, match=reported):
        connect(address=listener, **changes)
    assert (ray.left, ray.restored) == (1, {"BEFORE": "value"})


def test_a_key_file_that_cannot_be_read_is_named(ray: Ray, instance: InstanceState, tmp_path: Path) -> None:
    (tmp_path / "key").unlink()
    with pytest.raises(ConfigError, match="key: the API key cannot be read"):
        connect()


def test_a_connection_shows_no_key(ray: Ray, instance: InstanceState) -> None:
    assert KEY not in repr(connect())
