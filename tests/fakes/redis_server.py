"""A Redis server of its own on a free port of loopback, for tests: the real one of Debian's packages."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from benchmarks.common.child import ends_with_us
from tests.requires import requires
from tests.waiting import patient, wait_until

COMMAND_S = 60.0  # for a start or an end: a tenth of a second on an idle machine


class RedisServer:
    """A server that can be killed and started again, with all it has acknowledged. It ends with this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = _free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        options = {"bind": "127.0.0.1", "port": self.port, "dir": self._folder, "save": "", "appendonly": "yes"}
        command = ["redis-server", *(str(part) for name, value in options.items() for part in (f"--{name}", value))]
        command += ["--appendfsync", "always"]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen([*ends_with_us(), *command], stdout=log, stderr=log)

        def answers() -> bool:
            assert self._process.poll() is None, self._last_words()
            try:
                with self.client() as client:
                    client.ping()
            except redis.ConnectionError:  # a server that loads its data is one, too
                return False
            return True

        wait_until(answers, COMMAND_S, "Redis answers", seen=self._last_words)

    def _last_words(self) -> str:
        return (self._folder / "log").read_text()[-2000:]

    def kill(self) -> None:
        """At once: connections break."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(patient(COMMAND_S))

    def client(self) -> redis.Redis:
        """A blocking client for the test itself."""
        return redis.Redis(port=self.port, protocol=2, retry=None)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def redis_server() -> Iterator[RedisServer]:
    """A running server."""
    requires("redis-server")
    folder = Path(tempfile.mkdtemp(prefix="serve-app-redis-"))
    server = RedisServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder)
