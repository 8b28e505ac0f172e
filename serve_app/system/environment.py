"""The environment of every `ray start` of this project, and so of every Serve process and engine below it.

`common_environment` is the same on one machine (`serve_app.cluster.local.node`) and on each machine of a cluster;
`machine_environment` adds the variables for a machine of a cluster. A test looks up every RAY_ name in the installed
Ray, since Ray ignores unknown names.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from serve_app.core.times import (
    HARD_STOP_S,
    MACHINE_ANSWER_S,
    MACHINE_CHECK_S,
    MACHINE_CHECKS,
    MIN_DRAINING_S,
    PROXY_CHECK_S,
)
from serve_app.errors import ConfigError
from serve_app.names import MARK
from serve_app.system.haproxy import (
    BINARY_VARIABLE,
    BUFFER_BYTES,
    CLIENT_S,
    MAX_CONNECTIONS,
    METRICS_PORT,
    RETRY,
    STATS_PORT,
    Sources,
    write_wrapper,
)
from serve_app.system.tls import Tls

MAX_CALL_BYTES = 64 * 2**20  # between router and engine; a request may exceed gRPC's 4 MiB
OBJECT_STORE_BYTES = 200 * 10**6  # requests use gRPC; Ray needs at least 75 MB and takes 30% of memory by default
HAPROXY_THREADS_PER_CORES = 4  # HAProxy costs 2% of a stream's CPU: one thread for four cores, two at most
SERVES_WAITS = {
    # For HAProxy to start: under a second on an idle machine. Serve ends a proxy that is not ready in time (its 5 s:
    # again and again on a slow machine), and the proxy gives up on a HAProxy that does not answer (its 30 s).
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S": "60",
    # Three checks that fail, and Serve replaces its HAProxy. At its 10 s that took half a minute, and as long as its
    # controller died more often than that, for ever: no router that started meanwhile got requests (seen, 90 s).
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": str(PROXY_CHECK_S),
    # How long a new controller waits for a replica that it finds loading (its 30 s): downloads take longer.
    # As long, one that it finds standing still; HAProxy and the quota actor see that sooner.
    "RAY_SERVE_SLOW_STARTUP_WARNING_S": "3600",
    # Its "slow __init__" warnings would replace a deployment's message; our own phases and waits say more: never.
    "RAY_SERVE_SLOW_STARTUP_WARNING_PERIOD_S": str(10**9),
}
# When a machine that does not answer is lost; then its requests go elsewhere.
LOST_MACHINE = {
    "RAY_health_check_period_ms": str(1000 * MACHINE_CHECK_S),
    "RAY_health_check_timeout_ms": str(1000 * MACHINE_ANSWER_S),
    "RAY_health_check_failure_threshold": str(MACHINE_CHECKS),
}

# The GCS records every call of an actor, for Ray's dashboard, and keeps so many: 37 MB. Nothing here reads them; Ray's
# 100,000 took 370 MB within a quarter of an hour under load. As many, at most, it remembers of those it has dropped.
TASK_EVENTS = {
    "RAY_task_events_max_num_task_in_gcs": "10000",
    "RAY_task_events_max_dropped_task_attempts_tracked_per_job_in_gcs": "10000",
}

# The same on every machine: Serve's controller sends the head's paths of HAProxy to all machines.
RUN_DIR = Path("/tmp/serve-app-node")

ANYWHERE = "192.0.2.1"  # of a block that no network uses (RFC 5737): the route there is the default route

# Variables that the launcher sets for each command. Inherited, they would give engines one thread, and make Ray report
# usage statistics.
LAUNCHERS_OWN = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "RAY_USAGE_STATS_ENABLED": "1"}


def common_environment(mark: str, run_dir: Path, *, host: str | None = None, tls: Tls | None = None) -> dict[str, str]:
    """The variables of any node: token authentication, Serve's fast path, HAProxy without open statistics.

    Args:
        mark: identifies the node's processes, to find and end them.
        run_dir: private, with a path short enough for unix sockets; the HAProxy wrapper is written there.
        host: the endpoint's address, if not the host given to Serve.
        tls: of the endpoint; None: what this process's environment says.
    """
    folder = run_dir / "h"
    tls = tls or Tls.of(os.environ)
    wrapper = write_wrapper(run_dir, host=host, sources=Sources.of(os.environ), tls=tls)
    threads = 1 if len(os.sched_getaffinity(0)) <= HAPROXY_THREADS_PER_CORES else 2
    return ({} if tls is None else tls.environment()) | {
        MARK: mark,
        "SPT_NOENV": "1",  # setproctitle would overwrite the environment in /proc, with the mark
        "RAY_AUTH_MODE": "token",
        "RAY_START_HOOK": "serve_app.system.environment.prepare",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_RPC_BASE_PATH": str(run_dir),  # sockets, which a killed engine would leave in /tmp
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",  # at Serve's 0.1 s the idle controller takes 2% of a core
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",  # each replica wakes up for it; no scrape needs Serve's 100
        **SERVES_WAITS,
        **TASK_EVENTS,
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",  # one that stands still cannot drain
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",  # at the fast path's 1000 log lines come hours later
        "RAY_worker_niceness": "0",  # Ray's default of 15 starves replicas and engines on a shared machine
        "RAY_SERVE_ENABLE_HA_PROXY": "1",  # with the next one the fast path
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        BINARY_VARIABLE: str(wrapper),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_LOG_TARGET": str(run_dir / "log.sock"),  # no listener: no access logs in a local syslog
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(METRICS_PORT),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(STATS_PORT),
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(MAX_CALL_BYTES),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(threads),
        "RAY_SERVE_HAPROXY_MAXCONN": str(MAX_CONNECTIONS),
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(CLIENT_S),
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(BUFFER_BYTES),
        "RAY_SERVE_HAPROXY_RETRY_ON": RETRY,
        "RAY_SERVE_HAPROXY_RETRIES": "1",
        # Serve does not reuse the port of an ended router replica for 30 s longer than this: see ports.INGRESS_PORTS
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(HARD_STOP_S),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(MIN_DRAINING_S),
    }


def machine_environment(
    inherited: Mapping[str, str], *, mark: str, token_file: Path, run_dir: Path, ip: str
) -> dict[str, str]:
    """The complete environment of `ray start` on a machine of a cluster.

    Variables of the cluster's configuration (`inherited`) override the defaults here, except the token, the mark and
    the folder of this run.

    Raises:
        ConfigError: no interface has the address `ip`.
    """
    ours = common_environment(mark, run_dir)
    interface = interface_of(ip)
    ours |= {"VLLM_HOST_IP": ip, "GLOO_SOCKET_IFNAME": interface}  # the addresses of an engine's ranks
    ours |= {"RAY_AUTH_TOKEN_PATH": str(token_file), **LOST_MACHINE}
    given = usable(inherited)
    fixed = {name: value for name, value in ours.items() if not name.startswith("RAY_") or value.startswith("/")}
    return {**ours, **given, **fixed, "RAY_AUTH_MODE": "token", "RAY_START_HOOK": ours["RAY_START_HOOK"]}


def new_run_dir(path: Path) -> Path:
    """Make an empty folder with mode 0700; files of an earlier run are removed.

    Raises:
        ConfigError: it belongs to another user.
    """
    with contextlib.suppress(FileNotFoundError):
        if path.is_symlink() or path.lstat().st_uid != os.getuid():
            raise ConfigError(f"{path} belongs to another user: one node per machine, of one user", param="run_dir")
        shutil.rmtree(path)
    path.mkdir(mode=0o700)
    return path


def usable(inherited: Mapping[str, str]) -> dict[str, str]:
    """The launcher's environment without its own variables and another cluster's address, token and mark."""
    return {
        name: value
        for name, value in inherited.items()
        if name not in ("RAY_ADDRESS", MARK) and not name.startswith("RAY_AUTH_") and LAUNCHERS_OWN.get(name) != value
    }


def client_environment(address: str, token_file: Path) -> dict[str, str]:
    """The environment of a command that connects to the cluster, without the node's RAY_SERVE_ variables: see
    `serve_app.cluster.local.node.driver_environment`."""
    return {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file)}


def outgoing_address(destination: str) -> str:
    """This machine's IPv4 address on the route to `destination`; nothing is sent.

    Raises:
        ConfigError: there is no route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((destination, 9))
        except OSError as error:
            raise ConfigError(
                f"this machine has no route to {destination} ({error.strerror}); name its own address with "
                "--node-ip-address",
                param="node-ip-address",
            ) from None
        return str(probe.getsockname()[0])


def interface_of(ip: str) -> str:
    """The network interface that has this IPv4 address.

    Raises:
        ConfigError: no interface has it.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if ip in (one.address for one in addresses):
            return name
    raise ConfigError(f"no network interface of this machine has the address {ip}", param="node-ip-address")


def prepare(params: Any, head: bool) -> None:
    """Called by `ray start` before it starts anything (RAY_START_HOOK): disables the Ray Client server, which is not
    used here and which no flag disables."""
    params.ray_client_server_port = None
