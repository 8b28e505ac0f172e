"""Blocking versions of async methods: they run in the client's own event loop, and the caller waits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from serve_app.client.loop_bridge import LoopBridge
from serve_app.client.streams import Stream, SyncStream

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Synchronous(Generic[T]):
    """Waits for the calls of `wrapped`.

    It works in any thread, also in one with a running event loop (a notebook's cell; that loop is blocked meanwhile).
    Only the event loop of a Serve replica raises a RuntimeError: the calls themselves run in that loop.
    """

    def __init__(self, wrapped: T, bridge: LoopBridge) -> None:
        self._wrapped, self._bridge = wrapped, bridge


def blocking(
    method: Callable[Concatenate[T, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Synchronous[T], P], R]:
    """The blocking version of a method."""

    @functools.wraps(method)
    def call(self: Synchronous[T], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._bridge.run(method(self._wrapped, *args, **kwargs))

    return call


def blocking_stream(
    method: Callable[Concatenate[T, P], Stream[R]],
) -> Callable[Concatenate[Synchronous[T], P], SyncStream[R]]:
    """The version of a method whose stream is read without `await`."""

    @functools.wraps(method)
    def call(self: Synchronous[T], /, *args: P.args, **kwargs: P.kwargs) -> SyncStream[R]:
        return SyncStream(self._bridge, method(self._wrapped, *args, **kwargs).chunks)

    return call
