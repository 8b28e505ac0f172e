"""Calls between the deployments of an application: a handle that sends a call to a chosen replica and knows which
engine replicas Serve counts as running, and calls of all replicas of a deployment; deployments with a version of their
own.

Invariant: a directed call reaches the named replica or fails; no other replica ever answers it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from grpc import StatusCode
from grpc.aio import AioRpcError
from pydantic import PrivateAttr
from ray.exceptions import RayError
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.constants import RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP
from ray.serve._private.default_impl import get_request_metadata
from ray.serve._private.event_loop_monitoring import EventLoopMonitor
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve._private.request_router.request_router import RequestRouter
from ray.serve._private.router import SingletonThreadRouter
from ray.serve._private.utils import asyncio_grpc_exception_handler
from ray.serve.context import _get_internal_replica_context
from ray.serve.deployment import Deployment
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentBroadcastResponse, DeploymentHandle

from serve_app.errors import BodyTooLarge, EngineUnreachable

REPLICA_ID = "replica_id"  # the keyword argument that names the replica of a directed call
POPULATE_PERIOD_S = 0.05  # between checks whether Serve has sent the replicas to a new handle

QUIET_S = 5.0  # for cancelled tasks to end; they take milliseconds

# What a directed call raises when its replica is gone, cannot be reached or refuses new calls. Serve's transport passes
# gRPC's own error through for every status but UNAVAILABLE.
CALL_ERRORS: tuple[type[BaseException], ...] = (RayError, RayServeException, AioRpcError, ConnectionError)
AWAY = (RayError, TimeoutError)  # what calls of the quota actor raise while it is away
NO_ANSWER: tuple[type[BaseException], ...] = (TimeoutError, *CALL_ERRORS)  # of a call with a timeout
T = TypeVar("T")

ReplicasChanged = Callable[[frozenset[str]], None]

# Options of a handle for gRPC, also from a driver.
GRPC: dict[str, Any] = {
    "_by_reference": False,
    "request_serialization": "pickle",
    "response_serialization": "pickle",
}


def on_fast_path() -> bool:
    """Whether this process runs with the environment of the fast path."""
    return all(os.environ.get(name) == "1" for name in ("RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_THROUGHPUT_OPTIMIZED"))


class _VersionedConfig(DeploymentConfig):
    """A deployment's configuration that sends our version to the controller instead of the application's."""

    _pinned_version: str = PrivateAttr("")

    def to_proto(self) -> Any:
        message = super().to_proto()  # type: ignore[no-untyped-call]
        message.version = self._pinned_version
        return message


def pin_version(deployment: Deployment, version: str) -> Deployment:
    """Give the deployment this version: its replicas restart if the version or Ray's placement options change, and not
    because anything else in the application does. Returns the same object."""
    config = deployment._deployment_config
    pinned = _VersionedConfig.model_construct(config.model_fields_set, **dict(config))
    pinned._pinned_version = version
    deployment._deployment_config = pinned
    return deployment


class DirectedRequestRouter(RequestRouter):
    """Serve's request router for engine deployments: each call names its replica."""

    by_name: Mapping[str, RunningReplica] = MappingProxyType({})
    listener: ReplicasChanged | None = None

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return []
        wanted = pending_request.kwargs.get(REPLICA_ID)
        if wanted is None:  # any replica may answer the call
            return [candidate_replicas]
        return [[replica for replica in candidate_replicas if replica.replica_id.unique_id == wanted]]

    @property
    def replica_names(self) -> frozenset[str]:
        """Unique ids of the replicas Serve counts as running."""
        return frozenset(replica_id.unique_id for replica_id in self._replica_id_set)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self.by_name = {replica.replica_id.unique_id: replica for replica in replicas}
        if self.listener is not None:
            self.listener(self.replica_names)


class Handle:
    """How a router calls the replicas of one engine deployment: each call names the replica it goes to.

    Calls run in a context of their own: Serve cancels the handle calls of a request together with the request, and
    takes the transport format of a reply from the calling request; our calls must not depend on the calling request.

    The handle is made here: `serve.get_deployment_handle` keeps one handle per name, so that closing the handle of a
    removed model would also close that of the same model added again.
    """

    def __init__(self, deployment: str, application: str) -> None:
        self._unary: DeploymentHandle[Any] = DeploymentHandle(deployment, application).options(**GRPC)
        self._closed = False

    async def watch(self, listener: ReplicasChanged) -> None:
        """Call `listener`, in this event loop, with the running replicas now and after each change, until `close`."""
        loop = asyncio.get_running_loop()
        while not self._closed:
            router = self._request_router()
            if router is not None:
                break
            await asyncio.sleep(POPULATE_PERIOD_S)
        else:
            return  # closed before Serve sent the replicas

        def forward(names: frozenset[str]) -> None:
            loop.call_soon_threadsafe(listener, names)

        router.listener = forward
        forward(router.replica_names)

    async def close(self) -> None:
        """Stop following the replica set, and free Serve's resources of the handle."""
        self._closed = True
        router = self._request_router()
        if router is not None:
            router.listener = None
        await self._unary.shutdown_async()

    def _request_router(self) -> DirectedRequestRouter | None:
        return _asyncio_router(self._unary).request_router  # type: ignore[no-any-return]

    async def call(self, method: str, *arguments: Any, replica_id: str) -> Any:
        """A unary call of `method` on one replica; cancelling it cancels it there."""
        try:
            if self._unary._is_router_running_in_separate_loop():
                response = getattr(self._unary, method).remote(*arguments, **{REPLICA_ID: replica_id})
                return await _answer(response, response)
            return await self._call_directly(method, arguments, replica_id)
        except AioRpcError as error:
            if error.code() is StatusCode.RESOURCE_EXHAUSTED:  # the request's fault, not the replica's
                raise BodyTooLarge("the request is larger than an engine accepts", param="body") from None
            raise

    async def _call_directly(self, method: str, arguments: tuple[Any, ...], replica_id: str) -> Any:
        """A call without Serve's replica choice, which takes a dozen turns of a busy event loop: uses the chosen
        replica's wrapper directly, and maintains the handle's count of running calls as Serve does."""
        router = _asyncio_router(self._unary)
        request_router = router.request_router
        replica = None if request_router is None else request_router.by_name.get(replica_id)
        if replica is None:
            raise EngineUnreachable(f"engine replica {replica_id} has left")
        request = _request(self._unary, method, arguments, {REPLICA_ID: replica_id})
        counts = router._metrics_manager
        counts.inc_num_running_requests_for_replica(replica.replica_id)
        result = replica.try_send_request(request, with_rejection=False)
        try:
            return await _answer(result, result.get_async())
        finally:
            counts.dec_num_running_requests_for_replica(replica.replica_id)

    async def call_any_replica(self) -> None:
        """Call any replica. While none runs, the call waits and Serve counts it as queued, which starts a replica;
        returns once a replica has answered. Cancelling this removes the call."""
        response = self._unary.info.remote("")
        await _answer(response, response)


async def _answer(call: Any, answer: Awaitable[Any]) -> Any:
    """The answer of a call; cancelling this cancels the call."""
    try:
        return await answer
    except asyncio.CancelledError:
        call.cancel()
        raise


def _request(handle: Any, method: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> PendingRequest:
    """A call of the handle's deployment, for a replica's wrapper."""
    metadata = get_request_metadata(handle.init_options, handle.handle_options)
    metadata.call_method = method
    return PendingRequest(args=list(arguments), kwargs=named, metadata=metadata)


def _asyncio_router(handle: DeploymentHandle[Any]) -> Any:
    router: Any = handle._init_router()
    return getattr(router, "_asyncio_router", router)


class NamedReplicas:
    """Calls one or all replicas of a deployment, the calling one included, whose other calls Serve spreads over
    them."""

    def __init__(self, deployment: str, application: str) -> None:
        self._deployment = deployment
        self._application = application

    @functools.cached_property
    def _handle(self) -> DeploymentHandle[Any]:
        """Created at the first call; follows the replicas from then on."""
        return DeploymentHandle(self._deployment, self._application).options(**GRPC)

    def names(self) -> frozenset[str]:
        """Unique ids of the replicas that accept calls, the calling one included; empty until Serve has sent them."""
        return frozenset(running_replicas(self._handle))

    async def call_all(self, method: str, *arguments: Any) -> list[Coroutine[Any, Any, Any]]:
        """Call all replicas; returns their answers, to be awaited one by one. The call and the answers raise
        CALL_ERRORS.

        Serve's own reading of the answers waits for the last one, which may never come.
        """
        response = self._handle.broadcast(method, *arguments)
        return [result.get_async() for result in await response._fetch_replica_results_async()]

    async def call(self, replica_id: str, method: str, *arguments: Any) -> Any:
        """A unary call; cancelling it cancels it there. Raises CALL_ERRORS."""
        replica = running_replicas(self._handle).get(replica_id)
        if replica is None:
            raise ConnectionError(f"replica {replica_id} has left")
        handle: Any = self._handle
        request = _request(handle, method, arguments, {})

        async def send() -> list[Any]:
            return [replica.try_send_request(request, with_rejection=False)]

        # runs `send` in the loop of the handle
        sent = DeploymentBroadcastResponse(send(), handle._router.event_loop)
        (result,) = await sent._fetch_replica_results_async()
        return await _answer(result, result.get_async())


def running_replicas(handle: DeploymentHandle[Any]) -> dict[str, RunningReplica]:
    """By unique id, the replicas that accept calls of the handle; empty until Serve has sent them."""
    request_router = _asyncio_router(handle).request_router
    found = {} if request_router is None else request_router.curr_replicas
    return {replica_id.unique_id: replica for replica_id, replica in found.items()}


def in_fresh_context(coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """A task that does not belong to the calling request and is not cancelled with it."""
    return asyncio.get_running_loop().create_task(coroutine, name=name, context=contextvars.Context())


def home_loop() -> asyncio.AbstractEventLoop:
    """The event loop for handles of this process, since Serve never releases a handle's loop: the loop of this Serve
    replica if Serve itself would use it, else the loop of Serve's router thread."""
    if _get_internal_replica_context() is not None and not RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP:
        with contextlib.suppress(RuntimeError):  # called in a thread without a loop
            return asyncio.get_running_loop()
    loop = SingletonThreadRouter._get_singleton_asyncio_loop(EventLoopMonitor.COMPONENT_UNKNOWN)
    loop.set_exception_handler(asyncio_grpc_exception_handler)  # as Serve does where it makes the loop
    return loop


def quiet_router_thread() -> None:
    """End the tasks of Serve's router thread for the handles of this process; call this before `ray.shutdown`.

    The thread pushes autoscaling metrics, and a Ray call after the shutdown would start a new cluster in this process.
    """
    loop = SingletonThreadRouter._asyncio_loop
    if loop is None:
        return

    async def cancel_all() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=QUIET_S)

    asyncio.run_coroutine_threadsafe(cancel_all(), loop).result(2 * QUIET_S)
