"""The environment and the arguments of the instance's Ray node.

Listening addresses (Ray 2.60.0, every port checked in a running instance): the node's address is 127.0.0.1, which Ray
and its agents bind; the router replicas and Serve's fallback proxy bind it, too, by the host given to Serve; only
HAProxy binds the endpoint's own host, and its statistics and metrics are moved from all interfaces to unix sockets. The
replicas' gRPC servers bind all interfaces whatever the settings, and require the token.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from serve_app.cluster.local.ports import PortBlock
from serve_app.names import MARK
from serve_app.system import Tls, environment

LOOPBACK = "127.0.0.1"
# HAProxy takes 97 bytes for a unix socket's path, and adds 72 (`h`, Serve's id of the node, `metrics.sock`) to the
# folder's; Ray adds up to 77, of the 107 that Linux has.
RUN_DIR_LENGTH = 25

# Without these, Ray (ray._private.services.resolve_ip_for_localhost) replaces `127.0.0.1` by the outer address,
# in the driver and in the node. The variable's name mentions other systems; it means "is this cluster local".
LOOPBACK_ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# What Ray gathers for its dashboard alone: each call of an actor, and the CPU time and memory of each process.
WITHOUT_DASHBOARD = {"RAY_task_events_report_interval_ms": "0", "REPORTER_UPDATE_INTERVAL_MS": "60000"}
RAY_START = (
    "start --head --block --disable-usage-stats --no-monitor --include-log-monitor false --log-style record "
    f"--log-color false --node-ip-address {LOOPBACK} --object-store-memory {environment.OBJECT_STORE_BYTES} "
    "--port 0 --min-worker-port 0 --max-worker-port 0 --dashboard-agent-listen-port 0"
)


def usable_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment without variables of another Ray cluster: its address, token and tuning."""
    return {name: value for name, value in inherited.items() if not name.startswith("RAY_") and name != MARK}


def driver_environment(address: str, token: str, mark: str) -> dict[str, str]:
    """The environment of a process that connects as a driver.

    It must not have the node's RAY_SERVE_THROUGHPUT_OPTIMIZED: that makes synchronous handle calls fail in the process
    that has it (RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP=0). The controller and the replicas read
    RAY_SERVE_ENABLE_HA_PROXY, which they inherit from the node.
    """
    return {
        "RAY_ADDRESS": address,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        MARK: mark,
        **LOOPBACK_ENVIRONMENT,
    }


def node_environment(
    mark: str,
    token: str,
    run_dir: Path,
    block: PortBlock,
    host: str = LOOPBACK,
    tls: Tls | None = None,
    *,
    dashboard: bool = False,
) -> dict[str, str]:
    """Variables of `ray start`, and so of every Serve process and engine, in addition to the caller's own.

    Args:
        dashboard: whether Ray's dashboard runs.
        host, tls: the endpoint's. Serve itself, the router replicas and the fallback proxy use loopback.
    """
    return environment.common_environment(mark, run_dir, host=host, tls=tls) | {
        "RAY_AUTH_TOKEN": token,
        **LOOPBACK_ENVIRONMENT,
        **({} if dashboard else WITHOUT_DASHBOARD),
        "DASHBOARD_METRIC_PORT": str(block.head_metrics),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # Serve is shut down first; otherwise Ray waits 30 s for nothing
        "VLLM_HOST_IP": LOOPBACK,  # the ranks of an engine are all on this machine
        "GLOO_SOCKET_IFNAME": "lo",
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(block.ingress.start),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(block.ingress.stop),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(block.fallback_http),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(block.fallback_grpc),
    }


def ray_command(run_dir: Path, block: PortBlock, *, num_cpus: int | None, dashboard: bool) -> list[str]:
    """`ray start` in the foreground for the only node. The kernel chooses ports given as 0."""
    command = [sys.executable, "-m", "ray.scripts.scripts", *RAY_START.split(), "--temp-dir", str(run_dir / "ray")]
    command += ["--include-dashboard", str(dashboard).lower()]
    if dashboard:
        command += ["--dashboard-host", LOOPBACK, "--dashboard-port", str(block.dashboard)]
    if num_cpus is not None:
        command += ["--num-cpus", str(num_cpus)]
    return command
