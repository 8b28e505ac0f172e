"""The one module that touches Ray Serve's private and alpha interfaces (2.60.0).

It sends a call to a chosen replica, tells a router replica which engine replicas Serve counts as running, gives each
deployment a version of its own, asks all replicas of one the same, and carries the calls of clients inside the cluster
to a router replica.

Invariant: a directed call reaches the named replica or fails; it is never answered by another one.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

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
from ray.serve.handle import DeploymentHandle

from serve_app.errors import BodyTooLarge, EngineUnreachable

REPLICA_ID = "replica_id"  # the keyword argument that names the replica of a directed call
POPULATE_PERIOD_S = 0.05  # how often a new handle is asked whether Serve has told it the replicas

QUIET_S = 5.0  # for tasks that are cancelled to end; they take milliseconds
ACCEPT_S = 30.0  # for a router replica to take a call: one that crashed is back in ten

# What a directed call raises when its replica is gone, cannot be reached or refuses new calls. Serve's transport lets
# gRPC's own error through for everything but UNAVAILABLE.
CALL_ERRORS: tuple[type[BaseException], ...] = (RayError, RayServeException, AioRpcError, ConnectionError)
NO_ANSWER: tuple[type[BaseException], ...] = (TimeoutError, *CALL_ERRORS)  # of a call that is waited for only so long
T = TypeVar("T")

ReplicasChanged = Callable[[frozenset[str]], None]


def on_fast_path() -> bool:
    """Whether this process runs with the environment of the fast path (shared/design/FACTS.md)."""
    return all(os.environ.get(name) == "1" for name in ("RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_THROUGHPUT_OPTIMIZED"))


class _VersionedConfig(DeploymentConfig):
    """A deployment's configuration that goes to the controller with our version in place of the application's."""

    _version_of_ours: str = PrivateAttr("")

    def to_proto(self) -> Any:
        message = super().to_proto()  # type: ignore[no-untyped-call]
        message.version = self._version_of_ours
        return message


def pin_version(deployment: Deployment, version: str) -> Deployment:
    """The deployment with this version: its replicas are restarted when the version changes (or what Ray places them
    by), and never because something else in the application did. Returns the same object."""
    config = deployment._deployment_config
    pinned = _VersionedConfig.model_construct(config.model_fields_set, **dict(config))
    pinned._version_of_ours = version
    deployment._deployment_config = pinned
    return deployment


def deployment_handle(name: str, application: str) -> DeploymentHandle[Any]:
    """A handle of the caller's own to a deployment that exists or is about to.

    `serve.get_deployment_handle` keeps one handle per name: closing that of a model that left would end that of the
    same model back again, too.
    """
    return DeploymentHandle(name, application)


class DirectedRequestRouter(RequestRouter):
    """Serve's request router for engine deployments: each call names its replica."""

    by_name: Mapping[str, RunningReplica] = MappingProxyType({})

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return []
        wanted = pending_request.kwargs.get(REPLICA_ID)
        if wanted is None:  # calls that any replica can answer
            return [candidate_replicas]
        return [[replica for replica in candidate_replicas if replica.replica_id.unique_id == wanted]]

    @property
    def replica_names(self) -> frozenset[str]:
        """Unique ids of the replicas Serve counts as running."""
        return frozenset(replica_id.unique_id for replica_id in self._replica_id_set)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self.by_name = {replica.replica_id.unique_id: replica for replica in replicas}
        listener: ReplicasChanged | None = getattr(self, "listener", None)
        if listener is not None:
            listener(self.replica_names)


class Handle(Protocol):
    """How a router reaches the replicas of one engine deployment: `serve_app.transport.tcp.WiredHandle`, or a
    test's."""

    async def watch(self, listener: ReplicasChanged) -> None:
        """Tell `listener`, in this event loop, the running replicas now and after each change."""
        ...

    async def call(self, method: str, *arguments: Any, replica_id: str) -> Any:
        """A unary call of `method` on one replica; cancelling it cancels it there."""
        ...

    async def attach(self, router_id: str, on_message: Callable[[bytes], None], *, replica_id: str) -> None:
        """The channel to one replica, until it ends; cancelling this ends it there.

        Args:
            on_message: called with each message (an encoded `Batch`) in the turn of the loop in which it came.

        Raises:
            CALL_ERRORS, EngineUnreachable: it ended, or could not be opened.
        """
        ...

    async def ring(self) -> None:
        """A call that any replica answers; it waits for the first one."""
        ...

    async def close(self) -> None:
        """Follow the replica set no more, and free what Serve keeps for the handle."""
        ...


class EngineHandle:
    """A deployment handle whose calls name the replica they go to.

    Calls run in a context of their own: Serve cancels the handle calls of a request together with it, and reads the
    transport format of a reply from the request around it; ours must not depend on which request happened to make them.
    """

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._unary = handle.options(
            _by_reference=False, request_serialization="pickle", response_serialization="pickle"
        )
        self._closed = False

    async def watch(self, listener: ReplicasChanged) -> None:
        """Tell `listener`, in this event loop, the running replicas now and after each change, until `close`."""
        loop = asyncio.get_running_loop()
        while not self._closed:
            router = self._request_router()
            if router is not None:
                break
            await asyncio.sleep(POPULATE_PERIOD_S)
        else:
            return  # closed before Serve ever told

        def forward(names: frozenset[str]) -> None:
            loop.call_soon_threadsafe(listener, names)

        router.listener = forward  # type: ignore[attr-defined]
        forward(router.replica_names)

    async def close(self) -> None:
        """Follow the replica set no more, and free what Serve keeps for the handle."""
        self._closed = True
        router = self._request_router()
        if router is not None:
            router.listener = None  # type: ignore[attr-defined]
        await self._unary.shutdown_async()

    def _asyncio_router(self) -> Any:
        router = self._unary._init_router()
        return getattr(router, "_asyncio_router", router)

    def _request_router(self) -> DirectedRequestRouter | None:
        return self._asyncio_router().request_router  # type: ignore[no-any-return]

    async def call(self, method: str, *arguments: Any, replica_id: str) -> Any:
        """A unary call of `method` on one replica; cancelling it cancels it there."""
        try:
            if self._unary._is_router_running_in_separate_loop():
                return await self._call_by_handle(method, arguments, replica_id)
            return await self._call_directly(method, arguments, replica_id)
        except AioRpcError as error:
            if error.code() is StatusCode.RESOURCE_EXHAUSTED:  # the request's fault, not the replica's
                raise BodyTooLarge("the request is larger than what an engine can be handed", param="body") from None
            raise

    async def _call_by_handle(self, method: str, arguments: tuple[Any, ...], replica_id: str) -> Any:
        response = getattr(self._unary, method).remote(*arguments, **{REPLICA_ID: replica_id})
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()
            raise

    async def _call_directly(self, method: str, arguments: tuple[Any, ...], replica_id: str) -> Any:
        """The same without Serve's choosing of a replica, which takes a dozen turns of a busy event loop: the wrapper
        that the choice would end with sends the call, and the handle's count of running calls is kept as Serve does."""
        router = self._asyncio_router()
        request_router = router.request_router
        replica = None if request_router is None else request_router.by_name.get(replica_id)
        if replica is None:
            raise EngineUnreachable(f"engine replica {replica_id} has left")
        metadata = get_request_metadata(self._unary.init_options, self._unary.handle_options)
        metadata.call_method = method
        request = PendingRequest(args=list(arguments), kwargs={REPLICA_ID: replica_id}, metadata=metadata)
        counts = router._metrics_manager
        counts.inc_num_running_requests_for_replica(replica.replica_id)
        result = replica.try_send_request(request, with_rejection=False)
        try:
            return await result.get_async()
        except asyncio.CancelledError:
            result.cancel()
            raise
        finally:
            counts.dec_num_running_requests_for_replica(replica.replica_id)

    async def ring(self) -> None:
        """A call to no replica in particular: where none runs it waits, and Serve counts it as queued, which starts
        one; it returns once a replica has answered. Cancelling it takes it out."""
        response = self._unary.info.remote("")
        try:
            await response
        except asyncio.CancelledError:
            response.cancel()  # type: ignore[no-untyped-call]
            raise


class EveryReplica:
    """One method of all replicas of a deployment, this one among them."""

    def __init__(self, deployment: str, application: str, method: str) -> None:
        self._deployment, self._application, self._method = deployment, application, method
        # made when first needed: it follows the replicas from then on
        self._handle: DeploymentHandle[Any] | None = None

    async def __call__(self, *arguments: Any) -> list[Coroutine[Any, Any, Any]]:
        """Call it on all of them; their answers, to be awaited one by one. Both raise CALL_ERRORS.

        Serve's own way of reading them waits for the last one, which may never come.
        """
        if self._handle is None:
            self._handle = deployment_handle(self._deployment, self._application).options(
                _by_reference=False, request_serialization="pickle", response_serialization="pickle"
            )
        response = self._handle.broadcast(self._method, *arguments)
        return [result.get_async() for result in await response._fetch_replica_results_async()]


def in_fresh_context(coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """A task that does not belong to the request around it: it is not cancelled with it."""
    return asyncio.get_running_loop().create_task(coroutine, name=name, context=contextvars.Context())


def home_loop() -> asyncio.AbstractEventLoop:
    """The event loop that handles of this process may live in, for Serve never lets go of a handle's loop: that of the
    replica around us where Serve itself would use it, else that of Serve's own router thread."""
    if _get_internal_replica_context() is not None and not RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP:
        with contextlib.suppress(RuntimeError):  # called in a thread without a loop
            return asyncio.get_running_loop()
    loop = SingletonThreadRouter._get_singleton_asyncio_loop(EventLoopMonitor.COMPONENT_UNKNOWN)
    loop.set_exception_handler(asyncio_grpc_exception_handler)  # as Serve does where it makes the loop
    return loop


def quiet_router_thread() -> None:
    """End what Serve's own router thread does for the handles of this process; to be called before Ray is left.

    It pushes numbers for autoscaling, and a call of Ray's without Ray starts a cluster of its own in this process.
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


class IngressHandle:
    """Calls of one streaming method of an application's ingress, by gRPC: when this process dies, they end with it.

    All of it runs in `loop`. Serve's own way from a driver hands every message from thread to thread by a task, which
    costs two thirds more CPU time here.
    """

    def __init__(self, deployment: str, application: str, method: str) -> None:
        self.loop = home_loop()
        self._handle = deployment_handle(deployment, application)
        self._method = method
        self._stream: DeploymentHandle[Any] | None = None
        self._open: set[Any] = set()  # results being read

    def _opened(self) -> DeploymentHandle[Any]:
        if self._stream is None:
            self._handle._init(_run_router_in_separate_loop=False)
            self._stream = self._handle.options(
                method_name=self._method,
                stream=True,
                _by_reference=False,
                request_serialization="pickle",
                response_serialization="pickle",
            )
        return self._stream

    async def stream(self, *arguments: Any, accept_s: float = ACCEPT_S) -> AsyncGenerator[Any, None]:
        """What the method yields; closing the iterator ends the call on the replica.

        Raises:
            TimeoutError: no replica took the call in `accept_s`; Serve would go on trying for ever.
        """
        response = self._opened().remote(*arguments)
        assigned = response._replica_result_future
        try:
            async with asyncio.timeout(accept_s):
                result = await response._fetch_future_result_async()
        except BaseException:
            assigned.cancel()
            assigned.add_done_callback(_cancel_assigned)  # `response.cancel()` forgets one assigned in this very turn
            raise
        self._open.add(result)
        try:
            while True:
                try:
                    item = await result.__anext__()
                except StopAsyncIteration:
                    return
                yield item
        finally:
            self._open.discard(result)
            result.cancel()

    async def close(self) -> None:
        """End the open calls, and free what Serve keeps for the handle."""
        for result in list(self._open):
            result.cancel()
        await self._handle.shutdown_async()


def _cancel_assigned(assigned: asyncio.Future[Any] | concurrent.futures.Future[Any]) -> None:
    if not assigned.cancelled() and assigned.exception() is None:
        assigned.result().cancel()
