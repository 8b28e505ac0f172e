"""Operations on an instance's Serve: connect, deploy, status, shut down. The only module here that imports Ray.

A client uses it in its own process. The command line uses a child process (`serve_app.cluster.local.driver_process`),
so that Ray can neither block nor end the process that owns the instance.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray import serve
from ray._private import ray_constants, services
from ray._private import worker as ray_worker
from ray._private.state import available_resources_per_node
from ray._private.state import state as global_state
from ray._raylet import AuthenticationTokenLoader, Config, GcsClient  # type: ignore[attr-defined]
from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]
from ray.core.generated.gcs_pb2 import ActorTableData  # type: ignore[attr-defined]
from ray.exceptions import RayError
from ray.serve._private.common import DeploymentID
from ray.serve.context import _disconnect, _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ServeDeploySchema
from ray.util import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from serve_app.cluster.local import holders, status
from serve_app.cluster.local.drain_target import HEAD_RESOURCE, DrainTarget
from serve_app.cluster.local.drain_target import find as find_drain_target
from serve_app.cluster.local.quota_state import with_quota_figures
from serve_app.cluster.local.reachability import require_cluster
from serve_app.cluster.local.remote_driver import SERVE_SHUTDOWN_S
from serve_app.errors import ServeAppError, Unavailable
from serve_app.names import APPLICATION, MARK, NAMESPACE, QUOTA_ACTOR
from serve_app.ray_adapter import end_head_actors, existing, quiet_router_thread
from serve_app.settings import as_change, with_other_applications
from serve_app.system import LogFilter, LogPart, LogReader, writes_json

ANSWER_S = 5.0  # the controller answers within milliseconds; without its numbers the state is still reported
NO_DETAILS: dict[str, Any] = {"applications": {}, "proxies": {}}
LOGS_S = 30.0  # a reader's process starts within seconds
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


def declare(entry: Mapping[str, Any], *, is_repeat: bool = False, **serve_options: Any) -> dict[str, Any]:
    """Declare one application to Serve's controller, as `serve deploy` does, in addition to those declared before;
    returns once the controller has it. A running application of the same name is changed.

    Returns the details from before.

    Args:
        entry: as `serve_app.settings.serve_config.application` makes it.
        is_repeat: it was declared before, and is declared again as it was.
        serve_options: `http_options` and `proxy_location`, as in Serve's configuration; the running Serve keeps its
            own without them.

    Raises:
        RuntimeError: Serve refuses it; nothing has changed then.
    """
    logs = (entry.get("args") or {}).get("logs") or {}
    is_json = writes_json() or logs.get("format") == "json"
    logging_config = {"encoding": "JSON"} if is_json else None  # of Serve's controller and HAProxy's manager
    serve.start(**serve_options, logging_config=logging_config)
    client = _client()
    details = client.get_serve_details()
    if not is_repeat:
        entry = {**entry, "args": as_change(entry["args"], status.declared_models(details))}
    config = {"applications": with_other_applications(entry, details), **serve_options}
    client.deploy_apps(ServeDeploySchema.model_validate(config))
    return details  # type: ignore[no-any-return]


def details(within_s: float | None = None) -> dict[str, Any]:
    """The details of all applications from Serve's controller. Raises Unavailable: it does not answer in this time."""
    asked = _client()._controller.get_serve_instance_details.remote()
    try:
        return ray.get(asked, timeout=within_s)  # type: ignore[no-any-return]
    except RayError as error:
        raise Unavailable(f"Serve's controller does not answer: {error}", code="cluster_failed") from error


def declaration() -> dict[str, Any] | None:
    """The last declaration of the application; None: there was none, or Serve does not answer."""
    try:
        return status.declared(details(ANSWER_S))
    except (RayServeException, Unavailable):
        return None


def _client() -> Any:
    """Serve's client; private, and the only source of replica ids and nodes without Ray's dashboard. Raises
    RayServeException: Serve was never started."""
    return _get_global_client()


def deployed() -> dict[str, Any]:
    """What the cluster has and what is declared to it, as of `serve_app.cluster.local.status.deployed`."""
    try:
        devices = ask_quota("devices")
    except Unavailable:  # the first deploy starts the actor
        devices = {}
    try:
        found = details()
    except RayServeException:  # Serve was never started
        found = NO_DETAILS
    return status.deployed(found, ray.nodes(), devices)


def application_status(models: Sequence[str]) -> dict[str, Any]:
    """The application's state, as of `serve_app.cluster.local.status.describe`."""
    try:
        client = _client()
    except RayServeException:
        return status.describe(NO_DETAILS, models)  # Serve was never started
    details = client.get_serve_details()
    _explain(details)
    models = status.declared_models(details) or models
    state = status.describe(details, models, _reported_series(client, details))
    state |= {"other_applications": holders.other_applications(details), **_usage()}
    try:
        return with_quota_figures(state, ask_quota("figures"))
    except Unavailable:  # without the actor, waits for memory and deaths are unknown
        return state


def _usage() -> dict[str, Any]:
    groups = placement_group_table().values()
    return holders.usage(_actors(), groups, ray.cluster_resources(), ray.available_resources())


def _actors() -> list[ActorTableData]:
    """The living actors that hold resources outside of placement groups. Private in Ray; its public list needs the
    dashboard."""
    table = global_state._connect_and_get_accessor().get_actor_table(None, "ALIVE")
    actors = [ActorTableData.FromString(entry) for entry in table]
    return [actor for actor in actors if actor.required_resources and not actor.placement_group_id]


def _explain(details: Mapping[str, Any]) -> None:
    """Set the message of each deployment with unplaced replicas to the reason of their wait."""
    unplaced = status.unplaced(details)
    if unplaced:
        free = available_resources_per_node()
        nodes = [{**node, "Free": free.get(node["NodeID"], {})} for node in ray.nodes()]
        found = status.placement_waits(unplaced, placement_group_table().values(), nodes, time.time())
        for deployment, message in found.items():
            details["applications"][APPLICATION]["deployments"][deployment]["message"] = message


def _reported_series(client: Any, details: Mapping[str, Any]) -> status.ReportedSeries:
    """The latest metrics of autoscaled deployments' replicas that the controller has; empty while they change."""
    deployments = (details["applications"].get(APPLICATION) or {}).get("deployments", {})
    scaled = [one for one, detail in deployments.items() if detail["deployment_config"].get("autoscaling_config")]
    ask = client._controller._get_metrics_for_deployment_for_testing.remote  # the only access to them
    try:
        answers = ray.get([ask(DeploymentID(name=one, app_name=APPLICATION)) for one in scaled], timeout=ANSWER_S)
    except RayError:
        return {}
    return dict(zip(scaled, answers, strict=True))


def shut_down() -> None:
    """End Serve and its replicas within SERVE_SHUTDOWN_S, and disconnect."""
    try:
        _client().shutdown(timeout_s=SERVE_SHUTDOWN_S)  # serve.shutdown() is the same with 30 s
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


def announce_end(node_id: str, within_s: float) -> None:
    """Tell Ray that a node ends within this time: nothing new is placed there, Serve moves its replicas.

    Raises:
        Unavailable: the GCS refuses.
    """
    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    # private in Ray, as its `ray drain-node`; the other reason that there is takes idle nodes only
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, why = client.drain_node(node_id, reason, "the node is to stop", int((time.time() + within_s) * 1000))
    if not accepted:
        raise Unavailable(f"the node cannot be drained: {why}", code="cluster_failed")


def drain_target(name: str) -> DrainTarget:
    """What a name of `serve-app drain` stands for. Raises as `drain_target.find`."""
    try:
        found = details(ANSWER_S)
    except RayServeException:
        found = NO_DETAILS
    return find_drain_target(name, found, ray.nodes())


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


def addresses() -> dict[str, str]:
    """The address of each node that ever was, by id."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}


class NodeLogs:
    """Reads the log files of one node: an actor there."""

    def __init__(self, wanted: LogFilter) -> None:
        self._reader = LogReader(ray_worker._global_node.get_logs_dir_path(), wanted)  # type: ignore[attr-defined]

    def read(self, last: int | None) -> list[LogPart]:
        """The `last` lines of each file; None: the new ones."""
        return self._reader.new() if last is None else self._reader.last(last)


def log_readers(wanted: LogFilter) -> list[Any]:
    """A reader on each living node."""
    made: Any = ray.remote(NodeLogs)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    strategies = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    return [made.options(num_cpus=0, scheduling_strategy=strategy).remote(wanted) for strategy in strategies]


def read_logs(readers: Sequence[Any], last: int | None) -> list[LogPart]:
    """What the readers find; a node that does not answer in time is left out."""
    answers = [reader.read.remote(last) for reader in readers]
    done, _ = ray.wait(answers, num_returns=len(answers), timeout=LOGS_S)
    parts: list[LogPart] = []
    for answer in done:
        with contextlib.suppress(RayError):  # its node has left
            parts += ray.get(answer)
    return parts


def ask_quota(method: str, *args: Any) -> Any:
    """The answer of the cluster's quota actor.

    Raises:
        Unavailable: there is no actor, or it does not answer. ServeAppError: its own.
    """
    try:
        return ray.get(getattr(existing(QUOTA_ACTOR), method).remote(*args), timeout=ANSWER_S)
    except (ValueError, RayError) as error:
        if isinstance(cause := getattr(error, "cause", None), ServeAppError):
            raise cause from None
        raise Unavailable(f"the quota actor does not answer: {str(error).splitlines()[0]}", code="no_quota") from None
