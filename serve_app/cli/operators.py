"""How operators' commands reach what runs: by HTTP with an operator's key, from anywhere.

The instance of this machine is asked through Ray where its endpoint does not answer, or has no key here that is an
operator's: who runs the machine may do everything. `--address` is a cluster through Ray, to repair it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rich.console import Console

from serve_app.cli.command_line import EndpointOptions
from serve_app.cli.deploy import find
from serve_app.cli.endpoint import CONNECT_S, UNKNOWN_URL, Endpoint, fetch
from serve_app.cli.layout import say
from serve_app.errors import DROPPED, NO_ROUTER, BadRequest, Forbidden, ServeAppError, Unauthorized

ADDRESS_VARIABLE = "RAY_ADDRESS"  # Ray's own
ANSWER_S = 30.0  # a router answers within ten, or says that its cluster does not
NOT_ASKED = (NO_ROUTER, DROPPED, UNKNOWN_URL)  # codes of an endpoint that has not taken the question

T = TypeVar("T")


def fetch_soon(endpoint: Endpoint, method: str, path: str, **options: Any) -> Any:
    """As `fetch`, of a route that answers soon."""
    return fetch(endpoint, method, path, timeout=(CONNECT_S, ANSWER_S), **options)


def ask(
    at: EndpointOptions,
    address: str | None,
    by_http: Callable[[Endpoint], T],
    by_ray: Callable[[Mapping[str, str]], T],
) -> T:
    """What the endpoint answers, or the cluster at `address`.

    Args:
        by_ray: gets the environment of a driver.

    Raises:
        BadRequest: both are named. ServeAppError: as `by_http` and `by_ray`.
    """
    elsewhere = at.elsewhere()
    if elsewhere is not None:
        require_one_place(address)
        return by_http(elsewhere)
    if address is None and ADDRESS_VARIABLE not in os.environ:
        endpoint = at.of_instance()
        try:
            return by_http(endpoint)
        except ServeAppError as error:
            if not is_not_asked(error):
                raise
            say(Console(stderr=True), f"asking Ray: {error}", "dim")
    return by_ray(find(address, at.state).environment)


def require_one_place(address: str | None) -> None:
    """Raises BadRequest: an endpoint is named, and a cluster, too."""
    if address is not None:
        raise BadRequest("--url and --address: give one of them", param="address")


def is_not_asked(error: ServeAppError) -> bool:
    """Whether the endpoint has not taken the question: it does not answer, or refuses the key."""
    return isinstance(error, Forbidden | Unauthorized) or error.code in NOT_ASKED
