"""Every private or alpha interface of Ray Serve (2.60.0) that the application's processes use.

Decides: nothing; translates Ray's failures into the errors of `errors`.
In: deployments, handles, bodies of requests. Out: calls of chosen replicas, of all replicas of a deployment, and of the
routers by clients inside the cluster; what is read of a body ahead of the application.
Never: knows models or requests.
"""

from serve_app.ray_adapter.handles import (
    AWAY,
    CALL_ERRORS,
    NO_ANSWER,
    DirectedRequestRouter,
    Handle,
    NamedReplicas,
    in_fresh_context,
    on_fast_path,
    pin_version,
    quiet_router_thread,
)
from serve_app.ray_adapter.head_actor import HeadActor, claimed, end_head_actors, existing, restart_as
from serve_app.ray_adapter.heap import freeze_heap
from serve_app.ray_adapter.ingress_handle import ACCEPT_S, IngressHandle
from serve_app.ray_adapter.loading import keep_while_loading
from serve_app.ray_adapter.nodes import draining_nodes, live_nodes, session_folder
from serve_app.ray_adapter.request_bodies import bound_bodies
from serve_app.ray_adapter.sigterm import end_on_sigterm

__all__ = [
    "ACCEPT_S",
    "AWAY",
    "CALL_ERRORS",
    "NO_ANSWER",
    "DirectedRequestRouter",
    "Handle",
    "HeadActor",
    "IngressHandle",
    "NamedReplicas",
    "bound_bodies",
    "claimed",
    "draining_nodes",
    "end_head_actors",
    "end_on_sigterm",
    "existing",
    "freeze_heap",
    "in_fresh_context",
    "keep_while_loading",
    "live_nodes",
    "on_fast_path",
    "pin_version",
    "quiet_router_thread",
    "restart_as",
    "session_folder",
]
