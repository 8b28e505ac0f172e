"""A real Prometheus, of Debian's package, that scrapes a stack, or one answer of ours again and again."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.common.child import ends_with_us
from tests.requires import requires
from tests.waiting import wait_until

COMMAND_S = 60.0  # for a start, a first scrape or an end: a second on an idle machine
POLL_S = 0.1
JOB = "serve-app"
CONFIGURATION = """
global: {{scrape_interval: 2s, scrape_timeout: 2s}}  # a busy machine needs above half a second for 200 KB
scrape_configs:
  - job_name: {job}
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""
ENDPOINT = """
global: {{scrape_interval: {scrape_s}s, scrape_timeout: {scrape_s}s, evaluation_interval: {evaluate_s}s}}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: {job}
    authorization: {{credentials: {key}}}
    static_configs: [{{targets: ["{target}"]}}]
"""


def endpoint_configuration(url: str, key: str, rules: Path, scrape_s: int, evaluate_s: int) -> str:
    """The configuration of a Prometheus that scrapes an endpoint with a key, and evaluates a file of rules.

    Args:
        url: of the endpoint, without a path.
        rules: the last part may be a pattern.
        scrape_s, evaluate_s: between two scrapes, and between two evaluations.
    """
    target = url.removeprefix("http://")
    return ENDPOINT.format(scrape_s=scrape_s, evaluate_s=evaluate_s, rules=rules, job=JOB, key=key, target=target)


class PrometheusServer:
    """Answers queries once it has scraped."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._first_at = 0.0  # of the first scrape, in seconds since 1970
        self._at: dict[str, str] = {}  # a parameter of queries

    def pin(self) -> None:
        """Answer with what the first scrape found: a later one that fails would make each series stale."""
        self._at = {"time": str(self._first_at)}

    def get(self, path: str, **query: str) -> Any:
        """The data of an answer of its API."""
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=COMMAND_S) as answer:
            return json.load(answer)["data"]

    def samples(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each sample of an instant query."""
        found = self.get("query", query=expression, **self._at)["result"]
        return [(one["metric"], float(one["value"][1])) for one in found]

    def history(
        self, expression: str, begin: float, end: float, step_s: float
    ) -> list[tuple[dict[str, str], list[float]]]:
        """Labels and values of each series of a range query; the times are seconds since 1970."""
        found = self.get("query_range", query=expression, start=str(begin), end=str(end), step=str(step_s))["result"]
        return [(one["metric"], [float(value) for _, value in one["values"]]) for one in found]

    def wait_scraped(self, process: subprocess.Popen[bytes], log: Path) -> None:
        """Until a scrape has succeeded."""

        def look() -> bool:
            assert process.poll() is None, log.read_text()[-2000:]
            try:
                scrapes = self.samples(f'timestamp(up{{job="{JOB}"}} == 1)')
            except urllib.error.URLError:  # it does not listen yet, or is not ready
                return False
            if scrapes:
                self._first_at = scrapes[0][1]
            return bool(scrapes)

        wait_until(look, COMMAND_S, "a scrape has succeeded", poll_s=POLL_S)


@contextmanager
def prometheus_of(content_type: str, text: bytes, folder: Path) -> Iterator[PrometheusServer]:
    """A Prometheus that has scraped this text."""
    with (
        _serving(content_type, text) as target,
        running_prometheus(CONFIGURATION.format(job=JOB, port=target), folder) as server,
    ):
        server.pin()
        yield server


@contextmanager
def running_prometheus(configuration: str, folder: Path) -> Iterator[PrometheusServer]:
    """A Prometheus with this configuration, once it has scraped a target of `JOB`."""
    requires("prometheus")
    (folder / "prometheus.yml").write_text(configuration)
    port = _free_port()
    options = {
        "config.file": folder / "prometheus.yml",
        "storage.tsdb.path": folder / "data",
        "web.listen-address": f"127.0.0.1:{port}",
        "enable-feature": "exemplar-storage",
    }
    command = ["prometheus", *(f"--{name}={value}" for name, value in options.items())]
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen([*ends_with_us(), *command], stdout=file, stderr=file)
    server = PrometheusServer(port)
    try:
        server.wait_scraped(process, log)
        yield server
    finally:
        process.terminate()
        process.wait(COMMAND_S)


@contextmanager
def _serving(content_type: str, text: bytes) -> Iterator[int]:
    """An HTTP server with this answer to every request; its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
