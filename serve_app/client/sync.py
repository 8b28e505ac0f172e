"""Methods without `await`, made of those with it: they run in the client's own event loop, and the caller waits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from serve_app.client.loop_bridge import Link
from serve_app.client.streams import Stream, SyncStream

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Synchronous(Generic[T]):
    """What waits for the calls of `wrapped`.

    Works in any thread, in one whose event loop runs too (a notebook's cell; that loop waits meanwhile). Only the event
    loop of a Serve replica refuses, with a RuntimeError: there the calls themselves run in it.
    """

    def __init__(self, wrapped: T, link: Link) -> None:
        self._wrapped, self._link = wrapped, link


def blocking(
    method: Callable[Concatenate[T, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Synchronous[T], P], R]:
    """The same method without `await`."""

    @functools.wraps(method)
    def call(self: Synchronous[T], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._link.run(method(self._wrapped, *args, **kwargs))

    return call


def blocking_stream(
    method: Callable[Concatenate[T, P], Stream[R]],
) -> Callable[Concatenate[Synchronous[T], P], SyncStream[R]]:
    """The same method, whose stream is read without `await`."""

    @functools.wraps(method)
    def call(self: Synchronous[T], /, *args: P.args, **kwargs: P.kwargs) -> SyncStream[R]:
        return SyncStream(self._link, method(self._wrapped, *args, **kwargs).chunks)

    return call
