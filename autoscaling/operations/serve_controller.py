"""Calls of Serve's controller. Its client is private in Serve, and the only source of replica ids and nodes without
Ray's dashboard."""

from __future__ import annotations

from typing import Any

from ray.serve.context import _get_global_client


def serve_client() -> Any:
    """Serve's client. Raises RayServeException: Serve was never started."""
    return _get_global_client()


def answer_of(asked: Any, within_s: float | None) -> Any:
    """The answer to a call of an actor. `ray.get` would warn in a thread of a router that it blocks the router's loop,
    which it does not. Raises RayError, TimeoutError."""
    return asked.future().result(within_s)
