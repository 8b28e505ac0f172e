"""What this node's HAProxy says of itself: the answer of its own exporter for Prometheus, on a unix socket.

Invariant: `exposition_here` waits `EXPORTER_S` at most for each part of the answer, and takes `MAX_EXPOSITION` bytes.
"""

from __future__ import annotations

import http.client
import os
import socket
from http import HTTPStatus
from pathlib import Path

from serve_app.system.haproxy import BINARY_VARIABLE, METRICS_SOCKET

EXPORTER_S = 0.5  # HAProxy answers within milliseconds
MAX_EXPOSITION = 1_000_000  # bytes: some 30 KB, and 5 KB more for each application that Serve has
PATH = "/metrics?scope=global&scope=frontend&scope=backend"  # without servers: routers come and go


class _ExporterConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("haproxy", timeout=EXPORTER_S)
        self._path = path

    def connect(self) -> None:
        """To the unix socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(EXPORTER_S)
        self.sock.connect(str(self._path))


def exposition_here(proxy: object = None) -> str | None:
    """The exposition of this node's HAProxy; None: this node has none, since Serve uses its own proxy. Blocks.

    Args:
        proxy: Serve's actor on this node, inside which this runs.

    Raises:
        OSError: HAProxy does not answer, or not with metrics.
    """
    binary = os.environ.get(BINARY_VARIABLE)
    path = None if binary is None else Path(binary).parent / METRICS_SOCKET
    if path is None or not path.exists():
        return None
    connection = _ExporterConnection(path)
    try:
        connection.request("GET", PATH)
        answer = connection.getresponse()
        if answer.status != HTTPStatus.OK:
            raise OSError(f"HAProxy's exporter answers with status {answer.status}")
        return answer.read(MAX_EXPOSITION).decode()
    except http.client.HTTPException as error:
        raise OSError(f"HAProxy's exporter does not answer in HTTP: {error!r}") from error
    finally:
        connection.close()
