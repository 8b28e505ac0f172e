"""How the instance's Ray node is started: its environment and its arguments.

What listens where (Ray 2.60.0, every port looked at in a running instance): the node's address is 127.0.0.1, which Ray
and its agents then bind, and so do the router replicas and Serve's fallback proxy, by the host given to Serve; the
endpoint's own host is HAProxy's alone, whose statistics and metrics are moved from all interfaces to unix sockets. The
replicas' gRPC servers bind all interfaces whatever one sets, and ask for the token.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from serve_app.cluster.local.ports import PortBlock
from serve_app.names import MARK
from serve_app.system import common_environment

LOOPBACK = "127.0.0.1"
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


def node_environment(mark: str, token: str, run_dir: Path, block: PortBlock, host: str = LOOPBACK) -> dict[str, str]:
    """What `ray start`, and so every Serve process and engine, has in its environment beside the caller's own.

    Args:
        host: the endpoint's. Serve itself is given loopback, and so are the router replicas and its fallback proxy.
    """
    ports = {"stats_port": block.haproxy_stats, "metrics_port": block.haproxy_metrics}
    ours = common_environment(mark, run_dir, **ports, host=host)
    return ours | {
        "RAY_AUTH_TOKEN": token,
        **LOOPBACK_ENVIRONMENT,
        "DASHBOARD_METRIC_PORT": str(block.head_metrics),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # Serve is shut down first; 30 s of waiting for nothing otherwise
        "VLLM_HOST_IP": LOOPBACK,  # the ranks of an engine are all on this machine
        "GLOO_SOCKET_IFNAME": "lo",
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
