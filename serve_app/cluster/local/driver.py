"""A driver of an instance's Serve: connect, deploy, shut down. The only module here that imports Ray.

A client uses it in its own process. The command line uses a child process (`serve_app.cluster.local.driver_process`),
so that Ray can neither block nor end the process that owns the instance.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import ray
from ray._private import ray_constants, services
from ray._raylet import AuthenticationTokenLoader, Config, GcsClient  # type: ignore[attr-defined]
from ray.serve.context import _disconnect
from ray.serve.exceptions import RayServeException

from autoscaling.operations import HEAD_RESOURCE, application, serve_controller, status
from serve_app.cluster.local.reachability import require_cluster
from serve_app.cluster.local.remote_driver import SERVE_SHUTDOWN_S
from serve_app.errors import Unavailable
from serve_app.names import MARK, NAMESPACE
from serve_app.ray_adapter import end_head_actors, quiet_router_thread

RELEASE_S = 10.0  # the GCS asks all nodes in parallel
FORBIDDEN = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1",
}  # and the harmless value


def connect(environment: Mapping[str, str]) -> dict[str, str | None]:
    """Connect this process as a driver; `environment` is `LocalCluster.environment()`.

    Returns the previous values of these variables, for `restore`.

    Raises:
        RuntimeError: this process is connected to another cluster, or has a variable that a driver must not have.
        Unavailable: no cluster answers there, or it refuses the token; raised within seconds.
    """
    for name, wanted in FORBIDDEN.items():
        if os.environ.get(name, wanted) != wanted:
            raise RuntimeError(
                f"{name}={os.environ[name]}: synchronous handle calls would fail in this process; unset it"
            )
    address = environment["RAY_ADDRESS"]
    # without the mark: processes that this one starts must not end with the cluster
    ours = {name: value for name, value in environment.items() if name not in ("RAY_ADDRESS", MARK)}
    if ray.is_initialized():
        if ray.get_runtime_context().gcs_address == address:
            return {}
        raise RuntimeError("this process is connected to another Ray cluster; call ray.shutdown() first")
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    _read_environment_again()
    try:
        address = _reachable(address)
        ray.init(address=address, namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=False)
    except BaseException:
        restore(before)
        raise
    return before


def _reachable(address: str) -> str:
    """The GCS's host:port; `auto` is the newest cluster on this machine."""
    if address == "local" or "://" in address:  # `local` starts a cluster; a Ray Client is no driver
        raise Unavailable(f"{address}: give host:port of the cluster's GCS, or auto", code="cluster_failed")
    try:
        found = services.canonicalize_bootstrap_address(address)
    except (ConnectionError, ValueError) as error:
        raise Unavailable(str(error), code="cluster_failed") from None
    assert found is not None  # None stands for `local`
    if os.environ.get("RAY_USE_TLS", "0") == "0":
        require_cluster(found, AuthenticationTokenLoader.instance().get_token_for_http_header())
    return found


def restore(before: Mapping[str, str | None]) -> None:
    """Restore the environment from before `connect`."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _read_environment_again()


def _read_environment_again() -> None:
    """Make Ray read these variables again: it reads them on import, and the token once."""
    ray_constants.ENABLE_RAY_CLUSTER = os.environ.get(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR) != "0"
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def deployed() -> dict[str, Any]:
    """What the cluster has and what is declared to it, as of `autoscaling.operations.status.deployed`."""
    try:
        devices = application.ask_quota("devices")
    except Unavailable:  # the first deploy starts the actor
        devices = {}
    try:
        found = application.details()
    except RayServeException:  # Serve was never started
        found = application.NO_DETAILS
    return status.deployed(found, ray.nodes(), devices)


def shut_down() -> None:
    """End Serve and its replicas within SERVE_SHUTDOWN_S, and disconnect."""
    try:
        serve_controller.serve_client().shutdown(timeout_s=SERVE_SHUTDOWN_S)  # serve.shutdown() is the same with 30 s
        end_head_actors()  # they outlive the application
    except RayServeException:
        return  # Serve was never started
    finally:
        disconnect()


def release_others() -> list[str]:
    """Ask the GCS to end every node except the head; returns their addresses. Private in Ray; its autoscaler ends nodes
    the same way."""
    others = {
        node["NodeID"]: node["NodeManagerAddress"]
        for node in ray.nodes()
        if node["Alive"] and HEAD_RESOURCE not in node["Resources"]
    }
    if others:
        client = GcsClient(address=ray.get_runtime_context().gcs_address)
        client.drain_nodes(node_ids=[bytes.fromhex(node_id) for node_id in others], timeout=RELEASE_S)
    return sorted(others.values())


def node_at(ip: str) -> str:
    """The id of the living node with this address.

    Raises:
        Unavailable: there is none.
    """
    for node in ray.nodes():
        if node["Alive"] and node["NodeManagerAddress"] == ip:
            return str(node["NodeID"])
    raise Unavailable(f"{ip}: no node of the cluster has this address", code="cluster_failed")


def disconnect() -> None:
    """Disconnect from a cluster that is gone, without a call to it."""
    quiet_router_thread()
    _disconnect()
    ray.shutdown()
