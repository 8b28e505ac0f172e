"""HAProxy itself behind our wrapper, configured by Serve's own template, in front of routers of a few lines. No Ray.

Invariant: nothing is left after the block.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions

from benchmarks.common.arms import free_port
from serve_app.system import Tls, haproxy
from serve_app.system.tls import ADMIN_SOCKETS
from tests.waiting import patient, wait_until

WITHIN_S = 20.0  # a HAProxy is up in a tenth of a second, and answers in less


class Router(ThreadingHTTPServer):
    """Answers each request with its own name and the length of the body; under /lost it is gone instead, once it has
    all of the request; under /late it takes half a second; under /500 it fails, with the content type of the query."""

    daemon_threads = True

    def __init__(self, name: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name = name
        self.seen = list[str]()
        self.lost = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Router

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path == "/-/healthz":
            self._answer(b"success")
            return
        self.server.seen.append(self.path)
        if self.path.endswith("/lost") and not self.server.lost.is_set():
            self.close_connection = True
        elif self.path == "/late":
            time.sleep(patient(0.5))  # far above what HAProxy needs to see what its client does
            self._answer(b"{}")
        elif self.path.startswith("/500?"):
            self._answer(b'{"error": {"code": "its own"}}', 500, self.path.partition("?")[2])
        elif self.path == "/quiet":
            self.send_response(200)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for _ in range(2):
                time.sleep(2.5)  # above the client's timeout in the test that asks for this
                self.wfile.write(b"3\r\nabc\r\n")
            self.wfile.write(b"0\r\n\r\n")
        else:
            self._answer(json.dumps({"router": self.server.name, "bytes": len(body)}).encode())

    do_POST = do_OPTIONS = do_GET

    def _answer(self, body: bytes, status: int = 200, content_type: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


class Edge:
    """What a manager of Serve's does on a node, and a client."""

    def __init__(self, folder: Path, sources: haproxy.Sources | None, tls: Tls | None) -> None:
        self.folder = folder
        self.port = free_port()
        self.stand_in = haproxy.FallbackHaproxy(folder)
        self._wrapper = haproxy.write_wrapper(folder, sources=sources, tls=tls)
        admin = folder / ADMIN_SOCKETS.replace("*", "0")
        admin.parent.mkdir(parents=True)
        self.config = HAProxyConfig(
            socket_path=str(admin),
            server_state_base=str(folder),
            server_state_file=str(folder / "state"),
            metrics_socket_path=str(folder / "metrics.sock"),
            http_options=HTTPOptions(host="127.0.0.1", port=self.port),
            bufsize=haproxy.BUFFER_BYTES,
            retry_on=haproxy.RETRY,
            retries=1,
            nbthread=1,
            timeout_client_s=haproxy.CLIENT_S,
            log_target=str(folder / "log.sock"),
            is_head=True,
            has_received_routes=True,
            health_check_inter="250ms",
            stats_port=haproxy.STATS_PORT,
            metrics_port=haproxy.METRICS_PORT,
        )
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *routers: Router, app: bool = True, reload: subprocess.Popen[bytes] | None = None) -> Any:
        """Write the configuration with these routers and start the wrapper, as a new manager does, or one that has
        the HAProxy `reload`."""
        servers = [ServerConfig(one.name, "127.0.0.1", one.port) for one in routers]
        backends = {"http-app": BackendConfig("http-app", "/", servers=servers, app_name="app")} if app else {}
        path = self.folder / "haproxy.cfg"
        HAProxyApi(self.config, backends, str(path))._generate_config_file_internal()
        order = [self._wrapper, "-db", "-f", str(path), "-dR"]
        order += ["-sf", str(reload.pid), "-x", self.config.socket_path] if reload else []
        process = subprocess.Popen(order, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.started.append(process)
        wait_until(lambda: f"Pid: {process.pid}\n" in self._info(), WITHIN_S, "HAProxy answers Serve")
        return process

    def _info(self) -> str:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as admin:
            admin.connect(self.config.socket_path)
            admin.sendall(b"show info\n")
            return "".join(part.decode() for part in iter(lambda: admin.recv(65_536), b""))
        return ""

    def front(self) -> int:
        """The process that has the endpoint's port."""
        return int((self.folder / haproxy.FRONT).read_text())

    def ask(
        self, path: str = "/", body: bytes | None = None, method: str | None = None, **headers: str
    ) -> tuple[int, dict[str, str], Any]:
        """Status, headers and decoded body of one request on a connection of its own; 0 where there was none."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WITHIN_S)
        try:
            return self.asked(connection, path, body, method, **headers)
        finally:
            connection.close()

    def asked(
        self,
        connection: http.client.HTTPConnection,
        path: str,
        body: bytes | None = None,
        method: str | None = None,
        **headers: str,
    ) -> tuple[int, dict[str, str], Any]:
        """The same on this connection."""
        try:
            connection.request(method or ("GET" if body is None else "POST"), path, body, headers)
            response = connection.getresponse()
            return response.status, dict(response.headers.items()), json.loads(response.read())
        except (OSError, http.client.HTTPException):
            return 0, {}, None

    @contextlib.contextmanager
    def asking(self) -> Iterator[list[int]]:
        """The statuses that a client gets during the block, who asks without a pause, on a new connection each time."""
        over = threading.Event()
        statuses = list[int]()

        def ask() -> None:
            while not over.is_set():
                statuses.append(self.ask()[0])

        clients = [threading.Thread(target=ask) for _ in range(4)]
        for client in clients:
            client.start()
        try:
            yield statuses
        finally:
            over.set()
            for client in clients:
                client.join()

    def raw(self, sent: bytes, source: str = "127.0.0.1") -> socket.socket:
        """A connection from this address on which these bytes were sent."""
        connection = socket.create_connection(("127.0.0.1", self.port), WITHIN_S, (source, 0))
        connection.sendall(sent)
        return connection


@contextlib.contextmanager
def edge(folder: Path, sources: haproxy.Sources | None = None, tls: Tls | None = None) -> Iterator[Edge]:
    made = Edge(folder, sources, tls)
    try:
        yield made
    finally:
        for pid in {one.pid for one in made.started} | {made.front()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        for process in made.started:
            process.wait()
        (folder / haproxy.LAST).unlink(missing_ok=True)
        made.stand_in.check()


@contextlib.contextmanager
def routers(*names: str) -> Iterator[list[Router]]:
    running = [Router(name) for name in names]
    try:
        yield running
    finally:
        for router in running:
            router.shutdown()
            router.server_close()
