"""The files of an instance: its record, its token, its API key.

    $SERVE_APP_STATE, or $XDG_STATE_HOME/serve-app, or ~/.local/state/serve-app
    └── <instance>/                0700
        ├── lock                   held (flock) by the process that owns the running instance
        ├── instance.json          while it runs, or if it was not stopped
        ├── status.json            the newest status, written by its owner
        ├── token                  0600, Ray's, new for each start
        ├── api_key                0600, generated once and reused
        ├── store.sqlite           0600, keys, use and batches (docs/how-to/manage-keys.md); made by the store's actor
        ├── configured_api_key     0600, while it runs: the key of the configuration, for `status` and `chat`
        ├── records/               0700, requests, history and events of all runs (docs/how-to/watch.md)
        └── logs/                  of the last run

Invariant: only the user can read these files, and a file is either the old or the new one, never partly written.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout
from pydantic import TypeAdapter, ValidationError

from serve_app.cluster.local.node import LOOPBACK, driver_environment
from serve_app.errors import ConfigError, Unavailable

DEFAULT_INSTANCE = "default"
STATE_VARIABLE = "SERVE_APP_STATE"
TOKEN_BYTES = 32  # Ray's own generator makes tokens of 256 bits
LOCK_WAIT_S = 0.3  # a check whether the instance is owned holds the lock for microseconds
LOCK_POLL_S = 0.02
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}")  # a folder's name, and in the processes' environment


@dataclass(frozen=True, slots=True)
class Instance:
    """The record of a running instance, enough to find, use and end it from another process."""

    name: str
    mark: str
    run_dir: str
    host: str
    http_port: int
    address: str = ""  # Ray's GCS, host:port; empty until Ray has started
    url: str = ""
    dashboard_url: str | None = None
    supervisor_pid: int | None = None  # the `up` command, which stops the instance on SIGTERM; None: owned by a program
    supervisor_ticks: int | None = None
    api_key_file: str | None = None
    certificate: str | None = None  # of the endpoint, if it has TLS
    models: tuple[str, ...] = ()

    def serve_options(self) -> dict[str, Any]:
        """Serve's own options: routers bind loopback, only HAProxy binds the host of the endpoint."""
        return {"http_options": {"host": LOOPBACK, "port": self.http_port}, "proxy_location": "HeadOnly"}


INSTANCE = TypeAdapter(Instance)
STATUS = TypeAdapter(dict[str, Any])
T = TypeVar("T")


def state_root(state_dir: str | os.PathLike[str] | None = None) -> Path:
    """The folder of all instances: the argument, else $SERVE_APP_STATE, else the user's state folder."""
    chosen = state_dir or os.environ.get(STATE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_STATE_HOME")
    if base and os.path.isabs(base):
        return Path(base) / "serve-app"
    home = os.environ.get("HOME")
    if not home:
        raise ConfigError(
            f"HOME is not set, so there is no place for the instance's state; set {STATE_VARIABLE} or use --state-dir",
            param="state_dir",
        )
    return Path(home) / ".local" / "state" / "serve-app"


def write_private(path: Path, text: str) -> None:
    """Write `text` to `path` atomically, readable by the user only."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        os.fchmod(fd, 0o600)
        file.write(text)
    os.replace(draft, path)


def make_private(folder: Path) -> None:
    """Make a folder with mode 0700."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)


def read_text(path: Path) -> str | None:
    """The file's text; None if there is no file."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return None


class InstanceState:
    """The folder of one instance."""

    def __init__(self, name: str = DEFAULT_INSTANCE, state_dir: str | os.PathLike[str] | None = None) -> None:
        if not NAME.fullmatch(name):
            raise ConfigError(f"instance: {name!r} is no name (letters, digits, '.', '_', '-')", param="instance")
        self.name = name
        self.folder = folder = state_root(state_dir) / name
        self.token_file = folder / "token"
        self.generated_key_file = folder / "api_key"
        self.configured_key_file = folder / "configured_api_key"
        self.store_file = folder / "store.sqlite"
        self.records = folder / "records"
        self.logs = folder / "logs"
        self._record = folder / "instance.json"
        self._status = folder / "status.json"
        self._lock = FileLock(folder / "lock", thread_local=False)

    def create(self) -> None:
        """Make the folder, mode 0700.

        Raises:
            ConfigError: it cannot be written; the message names the folder and the variable to set.
        """
        probe = self.folder / ".probe"
        try:
            make_private(self.folder)
            write_private(probe, "")
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"the state folder {self.folder} cannot be written ({error.strerror}); "
                f"set HOME or {STATE_VARIABLE} to a writable folder, or use --state-dir",
                param="state_dir",
            ) from None

    def acquire(self) -> None:
        """Become the owner until `release` or this process's end.

        Raises:
            Unavailable: another process owns the instance; code "already_running".
        """
        if self._lock.is_locked:
            return
        try:
            self._lock.acquire(LOCK_WAIT_S, LOCK_POLL_S)
        except Timeout:
            raise self._already_running() from None

    def release(self) -> None:
        self._lock.release()

    def require_unowned(self) -> None:
        """Raises Unavailable ("already_running") when a living process owns the instance; changes nothing."""
        if self.owned_elsewhere():
            raise self._already_running()

    def owned_elsewhere(self) -> bool:
        """Whether a living process other than this object's owner holds the instance."""
        if self._lock.is_locked or not Path(self._lock.lock_file).exists():
            return False
        try:
            with FileLock(self._lock.lock_file, LOCK_WAIT_S, poll_interval=LOCK_POLL_S):
                return False
        except Timeout:
            return True

    def read(self) -> Instance | None:
        """The record of the running instance; None if there is none, or its file has an unknown shape."""
        return _parsed(INSTANCE, self._record)

    def write(self, instance: Instance) -> None:
        write_private(self._record, INSTANCE.dump_json(instance, indent=1).decode())

    def read_status(self, within_s: float = math.inf) -> dict[str, Any] | None:
        """The newest status, if it was written within the last `within_s`."""
        with contextlib.suppress(FileNotFoundError):
            if time.time() - self._status.stat().st_mtime < within_s:
                return _parsed(STATUS, self._status)
        return None

    def write_status(self, status: Mapping[str, Any]) -> None:
        write_private(self._status, json.dumps(status))

    def clear(self) -> None:
        """Remove the running instance's record; the generated key and the logs stay."""
        for file in (self._record, self._status, self.token_file, self.configured_key_file):
            file.unlink(missing_ok=True)

    def new_token(self) -> str:
        """A new token for Ray: 64 hexadecimal digits, stored in the token file."""
        token = secrets.token_hex(TOKEN_BYTES)
        write_private(self.token_file, token)
        return token

    def driver_environment(self, instance: Instance) -> dict[str, str] | None:
        """The environment of a driver of the running instance; None: its Ray has not started."""
        token = read_text(self.token_file)
        if not instance.address or token is None:
            return None
        return driver_environment(instance.address, token, instance.mark)

    def keep_logs(self, sources: Iterable[Path]) -> None:
        """Move an ended run's logs (files and folders) to the logs folder, replacing those of the previous run."""
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir(mode=0o700)
        for source in sources:
            shutil.move(source, self.logs / ("ray" if source.is_dir() else source.name))

    def _already_running(self) -> Unavailable:
        running = self.read()
        where = f" at {running.url}" if running and running.url else ""
        return Unavailable(f"instance {self.name!r} is already running{where}", code="already_running")


def _parsed(shape: TypeAdapter[T], path: Path) -> T | None:
    """The file's content; None if there is no file, or its shape is unknown."""
    try:
        return shape.validate_json(path.read_text())
    except (FileNotFoundError, ValidationError):
        return None
