"""A PostgreSQL server of its own on a unix socket, for tests: the real one of Debian's packages."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import psycopg

from benchmarks.common.child import ends_with_us
from serve_app.store.sql import SqlStore
from serve_app.system import preflight
from tests.requires import requires
from tests.waiting import patient, wait_until

USER = "postgres"  # Debian's, and the name of the superuser: the server refuses to run as root
COMMAND_S = 120.0  # for a start or an end: a second on an idle machine
POLL_S = 0.05
STILL_S = 20.0  # above what a call takes that gives up


class PostgresServer:
    """A server that can be stopped and started again. It ends with this process, however that ends."""

    def __init__(self, folder: Path) -> None:
        programs = preflight.postgres_programs()
        assert programs is not None
        self._programs = programs
        self._folder = folder
        self._count = 0
        self._with_tables = ""  # the database that others are copies of
        command = [f"{programs}/initdb", "--auth=trust", f"--username={USER}", "--no-sync", f"{folder}/data"]
        with (folder / "initdb").open("wb") as log:
            subprocess.run(
                [*_as_user(), *command], check=True, stdout=log, stderr=log, timeout=patient(COMMAND_S), cwd="/"
            )

    def start(self) -> None:
        options = ("listen_addresses=", f"unix_socket_directories={self._folder}", "fsync=off", "max_connections=200")
        command = [str(self._programs / "postgres"), "-D", f"{self._folder}/data"]
        command += [part for option in options for part in ("-c", option)]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen([*_as_user(), *command], stdout=log, stderr=log, cwd="/")

        def answers() -> bool:
            assert self._process.poll() is None, self._last_words()
            try:
                self._connect().close()
            except psycopg.OperationalError:
                return False
            return True

        wait_until(answers, COMMAND_S, "PostgreSQL answers", seen=self._last_words, poll_s=POLL_S)

    def _last_words(self) -> str:
        return (self._folder / "log").read_text()[-2000:]

    def stop(self) -> None:
        """At once: connections break."""
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(patient(COMMAND_S))

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """With all its processes stopped, and their connections open; for `STILL_S` at most, so that a test fails
        whose calls wait for it."""
        stopped = [psutil.Process(self._process.pid)]

        def resume() -> None:
            for process in stopped:
                process.resume()

        late = threading.Timer(STILL_S, resume)
        late.start()
        try:
            stopped[0].suspend()  # first: it forks no more
            for process in stopped[0].children():
                process.suspend()
                stopped.append(process)
            yield
        finally:
            late.cancel()
            resume()

    def new_database(self) -> str:
        """The URL of an empty database."""
        return self._url(self._create("template1"))

    def new_store(self) -> str:
        """The URL of a database with the store's tables as the migrations make them: a copy of one."""
        if not self._with_tables:
            self._with_tables = self._create("template1")
            store = SqlStore(self._url(self._with_tables))
            store.keys()
            store.close()
        return self._url(self._create(self._with_tables))

    def _create(self, template: str) -> str:
        self._count += 1
        name = f"test_{self._count}"
        with self._connect() as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")  # type: ignore[arg-type]
        return name

    def _url(self, name: str) -> str:
        return f"postgresql+psycopg://{USER}@/{name}?host={self._folder}"

    def _connect(self) -> psycopg.Connection:
        return psycopg.connect(host=str(self._folder), user=USER, dbname="postgres", autocommit=True)


def _as_user() -> list[str]:
    return ends_with_us(signal.SIGQUIT, user=USER if os.geteuid() == 0 else "")


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """A running server."""
    requires("postgresql")
    folder = Path(tempfile.mkdtemp(prefix="serve-app-pg-"))  # short: the path of a socket has 107 bytes at most
    try:
        if os.geteuid() == 0:
            shutil.chown(folder, USER, USER)
        server = PostgresServer(folder)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder)
