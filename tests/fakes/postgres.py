"""A PostgreSQL server of its own on a unix socket, for tests: the real one of Debian's packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from serve_app.system import preflight
from tests.requires import requires

USER = "postgres"  # Debian's, and the name of the superuser: the server refuses to run as root
COMMAND_S = 120.0  # a second on an idle machine


class PostgresServer:
    """A server that can be stopped and started again; its data go with the test session."""

    def __init__(self, folder: Path) -> None:
        programs = preflight.postgres_programs()
        assert programs is not None
        self._programs, self._folder, self._count = programs, folder, 0
        self._run("initdb", "--auth=trust", f"--username={USER}", "--no-sync", f"{folder}/data")

    def start(self) -> None:
        options = ("listen_addresses=", f"unix_socket_directories={self._folder}", "fsync=off", "max_connections=200")
        server = " ".join(f"-c {option}" for option in options)
        self._run("pg_ctl", "start", "--wait", "-D", f"{self._folder}/data", "-l", f"{self._folder}/log", "-o", server)

    def stop(self) -> None:
        """At once: connections break."""
        self._run("pg_ctl", "stop", "--wait", "--mode=immediate", "-D", f"{self._folder}/data")

    def new_database(self) -> str:
        """The URL of an empty database."""
        self._count += 1
        name = f"test_{self._count}"
        with psycopg.connect(host=str(self._folder), user=USER, dbname="postgres", autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")  # type: ignore[arg-type]
        return f"postgresql+psycopg://{USER}@/{name}?host={self._folder}"

    def _run(self, program: str, *arguments: str) -> None:
        other_user: dict[str, Any] = {"user": USER, "group": USER, "extra_groups": []} if os.geteuid() == 0 else {}
        command = [self._programs / program, *arguments]
        with (self._folder / "commands").open("ab") as log:
            subprocess.run(
                command,
                check=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=COMMAND_S,
                cwd="/",
                **other_user,
            )


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
