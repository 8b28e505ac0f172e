"""Sends requests to an application's router replicas over Serve, and maps Serve's failures to `serve_app.errors`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from grpc import StatusCode
from grpc.aio import AioRpcError
from ray.serve.exceptions import RayServeException

from serve_app.errors import BodyTooLarge, Unavailable
from serve_app.http import DROPPED, NO_ROUTER, AnswerPiece, HttpRequest
from serve_app.ray_adapter import ACCEPT_S, CALL_ERRORS, IngressHandle

METHOD = "exchange"  # of `serve_app.http.deployment.RouterReplica`


class RouterCalls:
    """Implements `serve_app.client.loop_bridge.Calls`.

    Args:
        deployment: the application's ingress.
    """

    def __init__(self, deployment: str, application: str) -> None:
        self._handle = IngressHandle(deployment, application, METHOD)
        self._application = application
        self.loop = self._handle.loop

    async def exchange(self, asked: HttpRequest, accept_s: float | None = None) -> AsyncGenerator[AnswerPiece, None]:
        """The answer as it arrives; closing the generator ends the request on the router.

        Raises:
            Unavailable: no router accepted the call, or its router has ended; the request may have run then.
            BodyTooLarge: more than gRPC can carry to a router.
        """
        begun = False
        accept_s = ACCEPT_S if accept_s is None else accept_s
        request = asked.method, asked.path, asked.headers, asked.body
        try:
            async with aclosing(self._handle.stream(*request, accept_s=accept_s)) as pieces:
                async for piece in pieces:
                    begun = True
                    yield piece
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
            what = str(error).strip().split("\n", 1)[0]
            code = NO_ROUTER if isinstance(error, RayServeException) else DROPPED
            raise Unavailable(f"the call did not reach its end: {what}", code=code) from error

    async def close(self) -> None:
        """End the running calls."""
        await self._handle.close()
