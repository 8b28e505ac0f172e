"""The one module that touches Ray Serve's private and alpha interfaces (2.60.0).

It sends a call to a chosen replica, and tells a router replica which engine replicas Serve counts as running.

Invariant: a directed call reaches the named replica or fails; it is never answered by another one.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Any

from grpc import StatusCode
from grpc.aio import AioRpcError
from ray.exceptions import RayError
from ray.serve._private.default_impl import get_request_metadata
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve._private.request_router.request_router import RequestRouter
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from serve_app.errors import BodyTooLarge, EngineUnreachable

REPLICA_ID = "replica_id"  # the keyword argument that names the replica of a directed call
POPULATE_PERIOD_S = 0.05  # how often a new handle is asked whether Serve has told it the replicas

# What a directed call raises when its replica is gone, cannot be reached or refuses new calls. Serve's transport lets
# gRPC's own error through for everything but UNAVAILABLE.
CALL_ERRORS: tuple[type[BaseException], ...] = (RayError, RayServeException, AioRpcError, ConnectionError)

ReplicasChanged = Callable[[frozenset[str]], None]


def on_fast_path() -> bool:
    """Whether this process runs with the environment of the fast path (shared/design/FACTS.md)."""
    return all(os.environ.get(name) == "1" for name in ("RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_THROUGHPUT_OPTIMIZED"))


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


class EngineHandle:
    """A deployment handle whose calls name the replica they go to.

    Calls run in a context of their own: Serve cancels the handle calls of a request together with it, and reads the
    transport format of a reply from the request around it; ours must not depend on which request happened to make them.
    """

    def __init__(self, handle: DeploymentHandle) -> None:
        self._unary = handle.options(
            _by_reference=False, request_serialization="pickle", response_serialization="pickle"
        )
        self._stream = self._unary.options(stream=True)

    async def watch(self, listener: ReplicasChanged) -> None:
        """Tell `listener`, in this event loop, the running replicas now and after each change."""
        loop = asyncio.get_running_loop()
        while True:
            router = self._request_router()
            if router is not None:
                break
            await asyncio.sleep(POPULATE_PERIOD_S)

        def forward(names: frozenset[str]) -> None:
            loop.call_soon_threadsafe(listener, names)

        router.listener = forward  # type: ignore[attr-defined]
        forward(router.replica_names)

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

    async def stream(self, method: str, *arguments: Any, replica_id: str) -> AsyncIterator[Any]:
        """A streaming call of `method` on one replica; closing the iterator ends it there."""
        response = getattr(self._stream, method).remote(*arguments, **{REPLICA_ID: replica_id})
        try:
            async for item in response:
                yield item
        finally:
            response.cancel()


def in_fresh_context(coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
    """A task that does not belong to the request around it: it is not cancelled with it."""
    return asyncio.get_running_loop().create_task(coroutine, name=name, context=contextvars.Context())
