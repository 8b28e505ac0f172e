"""The handle that carries the calls of clients inside the cluster to a router replica.

Invariant: a call that ends here, however it ends, ends on the replica too; one that waits for a replica says so.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

from grpc import StatusCode
from grpc.aio import AioRpcError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from serve_app.errors import DROPPED, NO_ROUTER, BodyTooLarge, Unavailable
from serve_app.ray_adapter.handles import CALL_ERRORS, GRPC, home_loop, running_replicas

logger = logging.getLogger("ray.serve")

ACCEPT_S = 30.0  # for a router replica to accept a call; a crashed one restarts within ten
TELL_S = 5.0  # after which a call that no router has taken says in the log what it waits for


class IngressHandle:
    """Calls one streaming method of an application's ingress by gRPC: when this process dies, its calls end.

    Everything runs in `loop`. Serve's own path from a driver passes every message between threads by a task, which
    costs two thirds more CPU time here.
    """

    def __init__(self, deployment: str, application: str, method: str) -> None:
        self.loop = home_loop()
        self._application = application
        self._method = method
        self._handle: DeploymentHandle[Any] = DeploymentHandle(deployment, application)
        self._open_results: set[Any] = set()  # results being read

    @functools.cached_property
    def _remote(self) -> Callable[..., Any]:
        self._handle._init(_run_router_in_separate_loop=False)
        return self._handle.options(method_name=self._method, stream=True, **GRPC).remote

    async def stream(self, *arguments: Any, accept_s: float | None = None) -> AsyncGenerator[Any, None]:
        """The values that the method yields; closing the iterator ends the call on the replica.

        Args:
            accept_s: time for a replica to accept the call; Serve would retry for ever. Default: `ACCEPT_S`.

        Raises:
            Unavailable: no replica accepted the call, or its replica has ended; the request may have run then.
            BodyTooLarge: more than gRPC can carry to a replica.
        """
        accept_s = ACCEPT_S if accept_s is None else accept_s
        result = None
        begun = False
        try:
            result = await self._accepted(arguments, accept_s)
            self._open_results.add(result)
            async for item in result:
                begun = True
                yield item
        except TimeoutError as error:
            message = f"no router of the application {self._application!r} took the call within {accept_s:g} s"
            raise Unavailable(message, code=NO_ROUTER) from error
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise  # cancelled here; else it happened on the router, or on a closed client
            raise Unavailable("the call was dropped", code=DROPPED) from None
        except CALL_ERRORS as error:
            if isinstance(error, AioRpcError) and error.code() is StatusCode.RESOURCE_EXHAUSTED and not begun:
                raise BodyTooLarge("the request is larger than what a router can be handed", param="body") from None
            reason = str(error).strip().split("\n", 1)[0]
            code = NO_ROUTER if isinstance(error, RayServeException) else DROPPED
            raise Unavailable(f"the call did not reach its end: {reason}", code=code) from error
        finally:
            if result is not None:
                self._open_results.discard(result)
                result.cancel()

    async def _accepted(self, arguments: tuple[Any, ...], accept_s: float) -> Any:
        """The result of a call that a replica has accepted."""
        response = self._remote(*arguments)
        assigned = response._replica_result_future
        telling = self.loop.call_later(TELL_S, self._tell, accept_s)
        try:
            async with asyncio.timeout(accept_s):
                return await response._fetch_future_result_async()
        except BaseException:
            assigned.cancel()
            assigned.add_done_callback(_cancel_assigned)  # `response.cancel()` misses one assigned in this turn
            raise
        finally:
            telling.cancel()

    def _tell(self, accept_s: float) -> None:
        """Log what a call waits for."""
        running = len(running_replicas(self._handle))
        why = f"none of its {running} routers took it" if running else "no router runs (see `ray status`)"
        logger.warning(
            "Application %r left a call waiting for %g s: %s; the call fails after %g s",
            self._application,
            TELL_S,
            why,
            accept_s,
        )

    async def close(self) -> None:
        """End the open calls, and free Serve's resources of the handle."""
        for result in list(self._open_results):
            result.cancel()
        await self._handle.shutdown_async()


def _cancel_assigned(assigned: asyncio.Future[Any] | concurrent.futures.Future[Any]) -> None:
    if not assigned.cancelled() and assigned.exception() is None:
        assigned.result().cancel()
