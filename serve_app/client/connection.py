"""Finds a client's cluster, application and key.

Invariant: an error leaves this process as it was.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from pathlib import Path

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from serve_app.client.client import Client
from serve_app.cluster.local import (
    DEFAULT_INSTANCE,
    LOOPBACK,
    LOOPBACK_ENVIRONMENT,
    Instance,
    InstanceState,
    driver,
)
from serve_app.errors import ConfigError, Unavailable
from serve_app.names import APPLICATION, ROUTER
from serve_app.ray_adapter import IngressHandle

METHOD = "exchange"  # of `serve_app.http.deployment.RouterReplica`
KEY_VARIABLE = "SERVE_APP_API_KEY"
ADDRESS_VARIABLE = "RAY_ADDRESS"  # Ray's own
SERVE_LOGGER = "ray.serve"


def connect(
    api_key: str | None = None,
    *,
    application: str = APPLICATION,
    instance: str | None = None,
    address: str | None = None,
    model: str | None = None,
) -> Client:
    """A client of a running application; sends only the requests that find the application.

    A process that Ray runs or that has called `ray.init` uses its present cluster. Any other process is connected to
    `instance`, to `address`, to the cluster in RAY_ADDRESS, or to the instance of `make serve` on this machine, until
    this client is closed.

    Args:
        api_key: decides tenant and rights, as over HTTP. Default: SERVE_APP_API_KEY, or the local instance's own key.
        application: its name in Serve.
        instance: the name of a local instance (`serve-app up --instance`).
        address: host:port of a cluster's GCS; its token, if required, is in the environment as Ray expects it.
        model: for calls that name no model. Default: the only model served.

    Raises:
        ConfigError: no cluster to connect to, no such application, or no key; the message says what to do.
    """
    with contextlib.ExitStack() as leaving:
        _join_cluster(leaving, instance, address)
        _require_application(application)
        key = api_key or os.environ.get(KEY_VARIABLE) or _local_key(instance)
        make = functools.partial(IngressHandle, ROUTER, application, METHOD)
        return Client(make, key, leaving.pop_all(), model=model)


def _join_cluster(leaving: contextlib.ExitStack, instance: str | None, address: str | None) -> None:
    """Connect this process if needed; `leaving` then disconnects it."""
    if instance is not None and address is not None:
        raise ConfigError("give `instance` or `address`, not both", param="address")
    if instance is None and address is None:
        if ray.is_initialized():
            return
        address = os.environ.get(ADDRESS_VARIABLE)
    environment = _instance_environment(instance or DEFAULT_INSTANCE) if address is None else _environment_of(address)
    ours = not ray.is_initialized()
    try:
        before = driver.connect(environment)
    except (Unavailable, RayError, RuntimeError, ConnectionError, ValueError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise ConfigError(
            f"the cluster at {environment[ADDRESS_VARIABLE]} cannot be joined: {reason}", param="address"
        ) from error
    if ours:
        logger = logging.getLogger(SERVE_LOGGER)
        leaving.callback(logger.setLevel, logger.level)
        logger.setLevel(max(logger.level, logging.WARNING))  # at INFO it writes internals to stderr
        leaving.callback(driver.restore, before)
        leaving.callback(driver.disconnect)


def _environment_of(address: str) -> dict[str, str]:
    host, _, _ = address.rpartition(":")
    return {ADDRESS_VARIABLE: address} | (LOOPBACK_ENVIRONMENT if host == LOOPBACK else {})


def _instance_environment(name: str) -> dict[str, str]:
    state = InstanceState(name)
    running = _running(state)
    environment = None if running is None else state.driver_environment(running)
    if environment is None:
        raise ConfigError(
            f"no instance {name!r} runs on this machine: start one (`serve-app up`), or say where the cluster is "
            f"(`address=`, or {ADDRESS_VARIABLE} in the environment)",
            param="instance",
        )
    return environment


def _running(state: InstanceState) -> Instance | None:
    found = state.read()
    return found if found is not None and found.address and state.owned_elsewhere() else None


def _require_application(application: str) -> None:
    try:
        name = serve.get_app_handle(application).deployment_name
    except RayServeException as error:
        raise ConfigError(
            f"there is no application {application!r} in this cluster: {error}", param="application"
        ) from None
    if name != ROUTER:
        raise ConfigError(f"the application {application!r} is not one of serve-app", param="application")


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
