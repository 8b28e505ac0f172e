"""A cluster that cannot be used is named as such within seconds, against servers of our own on loopback."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import grpc
import pytest

from serve_app.cluster.local import reachability
from serve_app.cluster.local.reachability import ALIVE, require_cluster
from serve_app.errors import Unavailable

TOKEN = "a-token"


@contextmanager
def gcs(known: dict[str, str]) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """What answers as Ray's GCS does to who shows its token; with its address, the metadata of each call."""
    seen: list[dict[str, str]] = []

    def alive(request: bytes, context: grpc.ServicerContext) -> bytes:
        seen.append({key: str(value) for key, value in context.invocation_metadata()})
        if not known.items() <= seen[-1].items():
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
        return b""

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(alive) if details.method == ALIVE else None

    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool, handlers=[Handler()])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}", seen
        finally:
            server.stop(None).wait()


def test_a_cluster_that_answers_and_takes_the_token_is_reached() -> None:
    bearer = {"authorization": f"Bearer {TOKEN}"}
    with gcs(bearer) as (address, seen):
        require_cluster(address, {"Authorization": f"Bearer {TOKEN}"})
        assert [bearer.items() <= one.items() for one in seen] == [True]
    with gcs({}) as (address, _):
        require_cluster(address, {})  # no authentication there


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer another"}])
def test_a_token_that_is_missing_or_wrong_is_named(headers: dict[str, str]) -> None:
    with gcs({"authorization": f"Bearer {TOKEN}"}) as (address, _):
        with pytest.raises(Unavailable, match=r"(?s)asks for its token.*RAY_AUTH_TOKEN") as reported:
            require_cluster(address, headers)
        assert reported.value.message.startswith(f"{address}: ")
        assert "another" not in reported.value.message.replace("another's", "")  # no token in an error


def test_where_nobody_listens_nobody_answers() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(Unavailable, match="no Ray cluster answers there"):
            require_cluster(f"127.0.0.1:{closed.getsockname()[1]}", {})


def test_who_listens_and_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        reachability, "REACH_S", 0.2
    )  # bound of the wait; production's is long enough for a loaded machine
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(Unavailable, match="no Ray cluster answers there"),
    ):
        require_cluster(f"127.0.0.1:{silent.getsockname()[1]}", {})


def test_another_server_is_no_ray_cluster() -> None:
    class Other(grpc.GenericRpcHandler):
        def service(self, details: Any) -> None:
            return None

    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool, handlers=[Other()])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            with pytest.raises(Unavailable, match="no Ray cluster"):
                require_cluster(f"127.0.0.1:{port}", {})
        finally:
            server.stop(None).wait()


def test_a_web_server_is_no_ray_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "REACH_S", 2.0)  # gRPC tries a server that speaks HTTP/1 again and again

    class Quiet(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Nothing into the test's output."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            with pytest.raises(Unavailable, match="no Ray cluster"):
                require_cluster(f"127.0.0.1:{server.server_port}", {})
        finally:
            server.shutdown()
