"""What Serve's controller, Ray and the quota actor know of the running application, for a driver of its cluster and for
a router.

Invariant: Serve's controller is asked once for each state, however many replicas there are.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray._private.state import state as global_state
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]
from ray.core.generated.gcs_pb2 import ActorTableData  # type: ignore[attr-defined]
from ray.exceptions import RayError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import RayServeException
from ray.util import placement_group_table

from autoscaling.operations import holders, scraped, status
from autoscaling.operations.drain_target import DrainTarget
from autoscaling.operations.drain_target import find as find_drain_target
from autoscaling.operations.quota_state import with_quota_figures
from autoscaling.operations.serve_controller import answer_of, serve_client
from serve_app.errors import ServeAppError, Unavailable
from serve_app.names import APPLICATION, QUOTA_ACTOR
from serve_app.ray_adapter import existing

ANSWER_S = 5.0  # the controller answers within milliseconds; without its numbers the state is still reported
NO_DETAILS: dict[str, Any] = {"applications": {}, "proxies": {}}


def details(within_s: float | None = None) -> dict[str, Any]:
    """The details of all applications from Serve's controller. Raises Unavailable: it does not answer in this time."""
    asked = serve_client()._controller.get_serve_instance_details.remote()
    try:
        return answer_of(asked, within_s)  # type: ignore[no-any-return]
    except (RayError, TimeoutError) as error:
        raise Unavailable("Serve's controller does not answer", code="no_controller", reason=str(error)) from error


def application_status(models: Sequence[str], within_s: float | None = None) -> dict[str, Any]:
    """The application's state, as of `autoscaling.operations.status.describe`, with what the quota actor knows.

    Args:
        models: the configured names, for a declaration that cannot be read.
        within_s: for the answer of Serve's controller; None: as long as it takes.

    Raises:
        Unavailable: the controller does not answer in this time.
    """
    try:
        found = details(within_s)
    except RayServeException:
        return status.describe(NO_DETAILS, models)  # Serve was never started
    _explain(found)
    models = status.declared_models(found) or models
    state = status.describe(found, models, _reported_series(found), _decisions(found))
    state |= {"other_applications": holders.other_applications(found), **_usage()}
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


def _explain(found: Mapping[str, Any]) -> None:
    """Set the message of each deployment with unplaced replicas to the reason of their wait."""
    unplaced = status.unplaced(found)
    if unplaced:
        free = available_resources_per_node()
        nodes = [{**node, "Free": free.get(node["NodeID"], {})} for node in ray.nodes()]
        waits = status.placement_waits(unplaced, placement_group_table().values(), nodes, time.time())
        for deployment, message in waits.items():
            found["applications"][APPLICATION]["deployments"][deployment]["message"] = message


def _reported_series(found: Mapping[str, Any]) -> status.ReportedSeries:
    """The latest metrics of autoscaled deployments' replicas that the controller has; empty while they change."""
    deployments = (found["applications"].get(APPLICATION) or {}).get("deployments", {})
    scaled = [one for one, detail in deployments.items() if detail["deployment_config"].get("autoscaling_config")]
    ask = serve_client()._controller._get_metrics_for_deployment_for_testing.remote  # the only access to them
    try:
        asked = [ask(DeploymentID(name=one, app_name=APPLICATION)) for one in scaled]
        answers = [answer_of(one, ANSWER_S) for one in asked]
    except (RayError, TimeoutError):
        return {}
    return dict(zip(scaled, answers, strict=True))


def _decisions(found: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """The last decisions of scaling, by deployment; empty: the controller does not say."""
    if APPLICATION not in found["applications"]:
        return {}
    try:
        return scraped.scaling_decisions(ANSWER_S)
    except (RayError, RayServeException, TimeoutError):
        return {}


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
        raise Unavailable(f"the node cannot be drained: {why}", code="node_not_drained")


def drain_target(name: str) -> DrainTarget:
    """What a name of `serve-app drain` stands for. Raises as `drain_target.find`."""
    try:
        found = details(ANSWER_S)
    except RayServeException:
        found = NO_DETAILS
    return find_drain_target(name, found, ray.nodes())


def addresses() -> dict[str, str]:
    """The address of each node that ever was, by id."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}


def ask_quota(method: str, *args: Any) -> Any:
    """The answer of the cluster's quota actor.

    Raises:
        Unavailable: there is no actor, or it does not answer. ServeAppError: its own.
    """
    try:
        return answer_of(getattr(existing(QUOTA_ACTOR), method).remote(*args), ANSWER_S)
    except (ValueError, RayError, TimeoutError) as error:
        if isinstance(cause := getattr(error, "cause", None), ServeAppError):
            raise cause from None
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise Unavailable(f"the quota actor does not answer: {why}", code="no_quota") from None
