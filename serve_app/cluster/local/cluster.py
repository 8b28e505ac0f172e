"""A separate Ray cluster on this machine: start, run an application, stop.

It runs beside a user's Ray and other such clusters: own ports, own temporary folder, own token, and a mark in the
environment of each process. Processes are found and ended by the mark only.

Invariant: after `stop`, and after a `start` that raised, no process carries the mark and the temporary folder is gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from serve_app.cluster.local import node
from serve_app.cluster.local.ports import require_free, reserved_block
from serve_app.cluster.local.state import DEFAULT_INSTANCE, Instance, InstanceState, read_text
from serve_app.errors import ConfigError, Unavailable
from serve_app.names import LOG_FORMAT, RECORDS_FOLDER, STORE_FILE
from serve_app.system import (
    Listener,
    Tls,
    await_start,
    end_marked,
    listening_ports,
    marked,
    may_start_again,
    spawn,
    start_ticks,
)

SUPERVISOR = "serve_app.cluster.local.supervisor"
NODE_START_S = 90.0  # 5 s on an idle machine with two cores; ten times that when it is loaded
SUPERVISOR_STOP_S = 15.0  # above the supervisor's own bounds for the node and for leftovers
TERM_GRACE_S = 3.0  # when the supervisor is gone and this process ends the others


class LocalCluster:
    """A running cluster, made by `start`. Any number of clusters can exist."""

    def __init__(self, state: InstanceState, instance: Instance, token: str) -> None:
        self.state = state
        self.instance = instance
        self._token = token
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._log_format: dict[str, str] = {}
        self._resources = contextlib.ExitStack()

    @classmethod
    def start(
        cls,
        instance: str = DEFAULT_INSTANCE,
        http_port: int | None = None,
        *,
        host: str = node.LOOPBACK,
        num_cpus: int | None = None,
        dashboard: bool = False,
        state_dir: str | os.PathLike[str] | None = None,
        models: Sequence[str] = (),
        extra_environment: Mapping[str, str] | None = None,
        supervised: bool = False,
        api_key_file: str | None = None,
        tls: Tls | None = None,
    ) -> LocalCluster:
        """Start Ray; Serve follows with the first application.

        Args:
            instance: its name; a stale instance of this name, whose owner has died, is stopped first.
            http_port: of the endpoint; None takes a free one.
            host, tls: the endpoint's; 0.0.0.0 to be reached from outside; None: TLS as the environment says.
            num_cpus: logical, for Ray's placement; None lets Ray count.
            dashboard: Ray's dashboard on loopback, which Serve's REST interface (`serve deploy`, `serve status`) needs.
            extra_environment: for the node and everything on it, over ours.
            supervised: this process stops the cluster on SIGTERM, which `down` then sends.
            models, api_key_file: the configured names, and the key of clients on this machine: for `status` and `chat`.

        Raises:
            ConfigError: the state folder cannot be written, the port is taken, or the certificate is wrong.
            Unavailable: the instance is owned by a living process, or Ray did not start (with the end of its log).
        """
        state = InstanceState(instance, state_dir)
        state.create()
        state.acquire()
        try:
            clean_up(state)
            if http_port is not None:
                require_free(host, http_port)
        except BaseException:
            state.release()
            raise
        pid = os.getpid() if supervised else None
        record = Instance(
            name=instance,
            mark=f"{instance}-{secrets.token_hex(8)}",
            run_dir="",
            host=host,
            http_port=http_port or 0,
            supervisor_pid=pid,
            supervisor_ticks=None if pid is None else start_ticks(pid),
            api_key_file=api_key_file,
            models=tuple(models),
        )
        cluster = cls(state, record, state.new_token())
        try:
            cluster._start(extra_environment or {}, num_cpus, dashboard, tls)
        except BaseException:
            cluster.stop()
            raise
        return cluster

    @property
    def address(self) -> str:
        """Ray's GCS, host:port."""
        return self.instance.address

    @property
    def url(self) -> str:
        """The endpoint's base, without a path."""
        return self.instance.url

    @property
    def mark(self) -> str:
        return self.instance.mark

    @property
    def alive(self) -> bool:
        """Whether the supervisor, and so the node, still runs."""
        return self._supervisor is not None and self._supervisor.poll() is None

    def environment(self) -> dict[str, str]:
        """The environment with which another process connects by `ray.init()`; that process must not have the node's
        RAY_SERVE_* variables. A process with this environment is ended with the cluster."""
        return node.driver_environment(self.address, self._token, self.mark) | self._log_format

    def serve_order(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """The order for a `RemoteDriver` to serve an application (of `serve_app.settings.serve_config.application`)
        here."""
        return {
            "do": "serve",
            "environment": self.environment(),
            "application": dict(entry),
            "serve": self.instance.serve_options(),
            "models": list(self.instance.models),
        }

    def watch_order(self) -> dict[str, Any]:
        """The order for a `RemoteDriver` to follow the application that runs here, in place of one that has ended."""
        return {"do": "watch", "environment": self.environment(), "models": list(self.instance.models)}

    def pids(self) -> list[int]:
        """Every living process of this cluster except this one."""
        return marked(self.mark, spare=(os.getpid(),))

    def listeners(self) -> list[Listener]:
        """Every TCP socket this cluster's processes listen on."""
        return listening_ports(self.pids())

    def stop(self) -> None:
        """Stop the cluster; no effect if nothing is left."""
        if self._supervisor is not None:
            self._close_pipe(self._supervisor)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._supervisor.wait(SUPERVISOR_STOP_S)
        self.kill()
        _forget(self.state, self.instance)
        self._resources.close()
        self.state.release()

    def kill(self) -> None:
        """End every process of this cluster now."""
        end_marked(self.mark, 0.0)
        if self._supervisor is not None:
            self._close_pipe(self._supervisor)
            self._supervisor.wait()

    @staticmethod
    def _close_pipe(supervisor: subprocess.Popen[bytes]) -> None:
        """Close the pipe, which ends the supervisor."""
        assert supervisor.stdin is not None
        supervisor.stdin.close()

    def _start(
        self, extra_environment: Mapping[str, str], num_cpus: int | None, dashboard: bool, tls: Tls | None
    ) -> None:
        """Start Ray under its supervisor, again after a transient error."""
        host = self.instance.host
        self._log_format = {name: value for name, value in extra_environment.items() if name == LOG_FORMAT}
        tls = tls or Tls.of(os.environ)
        reachable = node.LOOPBACK if host in ("0.0.0.0", "::") else host  # from this machine
        for attempts in itertools.count(1):
            block = self._resources.enter_context(reserved_block(host))
            run_dir = _new_run_dir()
            log = run_dir / "start.log"
            port = self.instance.http_port or block.http
            self.instance = dataclasses.replace(
                self.instance,
                run_dir=str(run_dir),
                http_port=port,
                url=f"{'http' if tls is None else 'https'}://{reachable}:{port}",
                certificate=None if tls is None else str(tls.certificate),
                dashboard_url=f"http://{node.LOOPBACK}:{block.dashboard}" if dashboard else None,
            )
            self.state.write(self.instance)
            command = node.ray_command(run_dir, block, num_cpus=num_cpus, dashboard=dashboard)
            environment = node.usable_environment(os.environ) | {STORE_FILE: str(self.state.store_file)}
            environment[RECORDS_FOLDER] = str(self.state.records)
            environment |= node.node_environment(
                self.mark, self._token, run_dir, block, host, tls, dashboard=dashboard
            ) | dict(extra_environment)
            supervisor = spawn(SUPERVISOR, *command, log=log, stdin=subprocess.PIPE, env=environment)
            self._supervisor = supervisor
            try:
                address = await_start(supervisor, functools.partial(_address, run_dir), log, NODE_START_S)
            except Unavailable:
                if not may_start_again(attempts, log.read_text(errors="replace")):
                    raise
                self.kill()
                shutil.rmtree(run_dir, ignore_errors=True)
            else:
                self.instance = dataclasses.replace(self.instance, address=address)
                self.state.write(self.instance)
                return


def _address(run_dir: Path) -> str | None:
    """The node's address, which `ray start` writes last."""
    return (read_text(run_dir / "ray" / "ray_current_cluster") or "").strip() or None


def _new_run_dir() -> Path:
    """A private temporary folder with a path short enough for unix sockets in it."""
    base = tempfile.gettempdir()
    if len(base) + len("/sa-12345678") > node.RUN_DIR_LENGTH:
        base = "/tmp"
    try:
        return Path(tempfile.mkdtemp(prefix="sa-", dir=base))
    except OSError as error:
        raise ConfigError(f"no temporary folder can be made in {base}: {error.strerror}", param="TMPDIR") from None


def _forget(state: InstanceState, instance: Instance) -> None:
    """Move the logs to the state folder, remove the run's folder, clear the record."""
    if instance.run_dir:
        run_dir = Path(instance.run_dir)
        state.keep_logs([*run_dir.glob("*.log"), *run_dir.glob("ray/session_2*/logs")])
        shutil.rmtree(run_dir, ignore_errors=True)
    state.clear()


def clean_up(state: InstanceState, grace_s: float = TERM_GRACE_S) -> None:
    """End the remaining processes of an instance without owner, and remove its record. The caller owns the instance."""
    instance = state.read()
    if instance is not None:
        end_marked(instance.mark, grace_s)
        _forget(state, instance)
