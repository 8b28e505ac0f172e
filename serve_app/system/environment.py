"""What every `ray start` of ours, and so every Serve process and engine below it, has in its environment.

`common_environment` is the same on one machine (`serve_app.cluster.local.node`) and on each machine of a cluster;
`machine_environment` adds what the machine of a cluster needs. Every RAY_ name here is looked up in the installed Ray
by a test, since Ray ignores a name it does not know.
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

from serve_app.errors import ConfigError
from serve_app.names import MARK
from serve_app.system.haproxy import BUFFER_BYTES, CLIENT_S, MAX_CONNECTIONS, RETRY, Sources, write_wrapper

MAX_CALL_BYTES = 64 * 2**20  # between router and engine; gRPC's 4 MiB is less than a request may have
OBJECT_STORE_BYTES = 200 * 10**6  # requests travel by gRPC; Ray wants 75 MB at least and takes 30% of memory by itself
HARD_STOP_S = 3600  # HAProxy cuts what a replaced worker still carries then: as long as a router drains (app.py)
# A router replica that leaves goes on answering for so long: HAProxy has taken it out of its list after about a second.
MIN_DRAINING_S = 2.0
HAPROXY_THREADS_PER_CORES = 4  # HAProxy costs 2% of a stream's CPU: one thread for four cores, two at most
STATS_PORT, METRICS_PORT = 8404, 9101  # Serve's defaults; never opened, since the wrapper makes unix sockets of them

# A machine that does not answer is lost after 30 s (4 checks of 5 s, 3 s apart): what waits for it goes elsewhere then.
# Ray's own 63 s is longer than a request may wait. After a shorter silence everything on the machine goes on.
LOST_MACHINE = {"RAY_health_check_timeout_ms": "5000", "RAY_health_check_failure_threshold": "4"}

# The same on every machine: Serve's controller hands HAProxy's paths, as it has them on the head, to all of them.
RUN_DIR = Path("/tmp/serve-app-node")

ANYWHERE = "192.0.2.1"  # of a block that no network uses (RFC 5737): the way there is the way out

# What the launcher puts before each of its commands. Inherited by engines it would give them one thread, and Ray would
# call home.
LAUNCHERS_OWN = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "RAY_USAGE_STATS_ENABLED": "1"}


def haproxy_threads() -> int:
    return 1 if len(os.sched_getaffinity(0)) <= HAPROXY_THREADS_PER_CORES else 2


def common_environment(
    mark: str, run_dir: Path, *, stats_port: int, metrics_port: int, host: str | None = None
) -> dict[str, str]:
    """What any node has: token authentication, Serve's fast path, HAProxy without open statistics.

    Args:
        mark: by which the node's processes are found and ended.
        run_dir: private, with a path short enough for unix sockets; the HAProxy wrapper is written there.
        stats_port, metrics_port: of HAProxy; never opened.
        host: where the endpoint listens, if not at the host given to Serve.
    """
    folder = run_dir / "h"
    ports = {"stats_port": stats_port, "metrics_port": metrics_port}
    wrapper = write_wrapper(run_dir, **ports, host=host, sources=Sources.of(os.environ))
    return {
        MARK: mark,
        "SPT_NOENV": "1",  # setproctitle would overwrite the environment in /proc, and with it the mark
        "RAY_AUTH_MODE": "token",
        "RAY_START_HOOK": "serve_app.system.environment.prepare",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_RPC_BASE_PATH": str(run_dir),  # sockets that a killed engine would leave in /tmp
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",  # at Serve's 0.1 s the idle controller takes 2% of a core
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",  # each replica wakes up for it; Serve's 100 is no use to a scrape
        "RAY_worker_niceness": "0",  # Ray's default of 15 starves replicas and engines beside anything else that runs
        # the fast path (shared/design/FACTS.md, 'Ray Serve')
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(wrapper),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_LOG_TARGET": str(run_dir / "log.sock"),  # nobody's: access logs leave to no local syslog
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(MAX_CALL_BYTES),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(haproxy_threads()),
        "RAY_SERVE_HAPROXY_MAXCONN": str(MAX_CONNECTIONS),
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(CLIENT_S),
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(BUFFER_BYTES),
        "RAY_SERVE_HAPROXY_RETRY_ON": RETRY,
        "RAY_SERVE_HAPROXY_RETRIES": "1",
        # Serve keeps the port of a router replica that left back for 30 s longer than this: see ports.INGRESS_PORTS
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(HARD_STOP_S),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(MIN_DRAINING_S),
    }


def machine_environment(
    inherited: Mapping[str, str], *, mark: str, token_file: Path, run_dir: Path, ip: str
) -> dict[str, str]:
    """The whole environment of `ray start` on a machine of a cluster.

    What the cluster's configuration exported (`inherited`) wins over our defaults, but for the token, the mark and
    where this run keeps its files.

    Raises:
        ConfigError: no interface has the address `ip`.
    """
    ours = common_environment(mark, run_dir, stats_port=STATS_PORT, metrics_port=METRICS_PORT)
    interface = interface_of(ip)
    ours |= {"VLLM_HOST_IP": ip, "GLOO_SOCKET_IFNAME": interface}  # where the ranks of an engine find each other
    ours |= {"RAY_AUTH_TOKEN_PATH": str(token_file), **LOST_MACHINE}
    given = usable(inherited)
    fixed = {name: value for name, value in ours.items() if not name.startswith("RAY_") or value.startswith("/")}
    return {**ours, **given, **fixed, "RAY_AUTH_MODE": "token", "RAY_START_HOOK": ours["RAY_START_HOOK"]}


def new_run_dir(path: Path) -> Path:
    """An empty folder for our user alone; what another run left there is gone.

    Raises:
        ConfigError: it belongs to somebody else.
    """
    with contextlib.suppress(FileNotFoundError):
        if path.is_symlink() or path.lstat().st_uid != os.getuid():
            raise ConfigError(f"{path} belongs to another user: one node a machine, of one user", param="run_dir")
        shutil.rmtree(path)
    path.mkdir(mode=0o700)
    return path


def usable(inherited: Mapping[str, str]) -> dict[str, str]:
    """The launcher's environment without another cluster's address, token and mark, and without the launcher's own."""
    return {
        name: value
        for name, value in inherited.items()
        if name not in ("RAY_ADDRESS", MARK) and not name.startswith("RAY_AUTH_") and LAUNCHERS_OWN.get(name) != value
    }


def client_environment(address: str, token_file: Path) -> dict[str, str]:
    """What a command on a machine of the cluster needs to talk to it. None of the node's RAY_SERVE_ variables: see
    `serve_app.cluster.local.node.driver_environment`."""
    return {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file)}


def outgoing_address(destination: str) -> str:
    """This machine's IPv4 address on the way to `destination`; nothing is sent.

    Raises:
        ConfigError: there is no way.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((destination, 9))
        except OSError as error:
            raise ConfigError(
                f"this machine has no way to {destination} ({error.strerror}); name its own address with "
                "--node-ip-address",
                param="node-ip-address",
            ) from None
        return str(probe.getsockname()[0])


def interface_of(ip: str) -> str:
    """The network interface that has this IPv4 address.

    Raises:
        ConfigError: none has.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if ip in (one.address for one in addresses):
            return name
    raise ConfigError(f"no network interface of this machine has the address {ip}", param="node-ip-address")


def prepare(params: Any, head: bool) -> None:
    """Called by `ray start` before it starts anything (RAY_START_HOOK): no Ray Client server, which nobody here uses
    and which no flag switches off."""
    params.ray_client_server_port = None
