"""Finds a client's cluster, application and key.

Invariant: an error leaves this process as it was.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from serve_app.client.ingress import RouterCalls
from serve_app.client.loop_bridge import Calls
from serve_app.cluster.local import (
    DEFAULT_INSTANCE,
    LOOPBACK,
    LOOPBACK_ENVIRONMENT,
    Instance,
    InstanceState,
    driver,
    driver_environment,
)
from serve_app.errors import ConfigError, Unavailable
from serve_app.names import ROUTER
from serve_app.ray_adapter import quiet_router_thread

KEY_VARIABLE = "SERVE_APP_API_KEY"
ADDRESS_VARIABLE = "RAY_ADDRESS"  # Ray's own
SERVE_LOGGER = "ray.serve"


@dataclass(frozen=True)
class Connection:
    """How a client opens its calls, its key, and how it disconnects if it connected this process."""

    open: Callable[[], Calls]
    api_key: str = field(repr=False)
    leave: Callable[[], None]


def connection(application: str, *, instance: str | None, address: str | None, api_key: str | None) -> Connection:
    """Find cluster, application and key; connect this process if it is not connected. See `serve_app.connect`.

    Raises:
        ConfigError: names what is missing and the remedy.
    """
    leave = _attach(instance, address)
    try:
        deployment = _ingress(application)
        key = api_key or os.environ.get(KEY_VARIABLE) or _local_key(instance)
    except BaseException:
        leave()
        raise
    return Connection(functools.partial(RouterCalls, deployment, application), key, leave)


def _attach(instance: str | None, address: str | None) -> Callable[[], None]:
    """Connect this process if needed; returns the function that disconnects it."""
    if instance is not None and address is not None:
        raise ConfigError("give `instance` or `address`, not both", param="address")
    if instance is None and address is None and ray.is_initialized():
        return _do_nothing
    if instance is None and address is None:
        address = os.environ.get(ADDRESS_VARIABLE)
    if address is not None:
        return _join(_environment_of(address))
    name = instance or DEFAULT_INSTANCE
    state = InstanceState(name)
    running = _running(state)
    if running is None:
        raise ConfigError(
            f"no instance {name!r} runs on this machine: start one (`make serve`), or say where the cluster is "
            f"(`address=`, or {ADDRESS_VARIABLE} in the environment)",
            param="instance",
        )
    return _join(driver_environment(running.address, state.token() or "", running.mark))


def _join(environment: Mapping[str, str]) -> Callable[[], None]:
    address = environment[ADDRESS_VARIABLE]
    ours = not ray.is_initialized()
    try:
        before = driver.connect(environment)
    except (Unavailable, RayError, RuntimeError, ConnectionError, ValueError) as error:
        said = str(error).strip().split("\n", 1)[0]
        raise ConfigError(f"the cluster at {address} cannot be joined: {said}", param="address") from error
    if not ours:
        return _do_nothing
    logger = logging.getLogger(SERVE_LOGGER)
    level = logger.level
    logger.setLevel(max(level, logging.WARNING))  # at INFO it writes internals to stderr
    return functools.partial(_disconnect, before, level)


def _disconnect(before: Mapping[str, str | None], level: int) -> None:
    quiet_router_thread()
    driver.disconnect()
    driver.restore(before)
    logging.getLogger(SERVE_LOGGER).setLevel(level)


def _do_nothing() -> None:
    """The disconnect of a process that was connected before."""


def _environment_of(address: str) -> dict[str, str]:
    host, _, _ = address.rpartition(":")
    return {ADDRESS_VARIABLE: address} | (LOOPBACK_ENVIRONMENT if host == LOOPBACK else {})


def _running(state: InstanceState) -> Instance | None:
    found = state.read()
    return found if found is not None and found.address and state.owned_elsewhere() else None


def _ingress(application: str) -> str:
    """The name of the application's ingress deployment."""
    try:
        name = serve.get_app_handle(application).deployment_name
    except RayServeException as error:
        raise ConfigError(
            f"there is no application {application!r} in this cluster: {error}", param="application"
        ) from None
    if name != ROUTER:
        raise ConfigError(f"the application {application!r} is not one of serve-app", param="application")
    return name


def _local_key(instance: str | None) -> str:
    """The key that the local instance keeps for clients here, if this process is connected to that instance."""
    state = InstanceState(instance or DEFAULT_INSTANCE)
    found = _running(state)
    if found is not None and found.api_key_file and found.address == ray.get_runtime_context().gcs_address:
        try:
            return Path(found.api_key_file).read_text().strip()
        except OSError as error:
            raise ConfigError(
                f"{found.api_key_file}: the API key cannot be read: {error.strerror}", param="api_key"
            ) from None
    raise ConfigError(f"no API key: give `api_key`, or set {KEY_VARIABLE}", param="api_key")
