"""Fetches the media behind links in requests, in place of vLLM's own connection: only from addresses that
`core.media_hosts` allows.

vLLM compares the host of a link with `media_domains` and fetches it. Here a name leads to its allowed addresses alone,
which are those that are connected to: no later answer of the DNS counts. An address in a link is in the list itself.

vLLM's renderer for pooling fetches in a thread: the same code runs there, in an event loop of that thread.

Invariant: no redirect is followed, whatever vLLM's environment says: its target would be in no list. Nor is a proxy of
the environment asked: it would look up the name, so nothing here would check the address.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from vllm.connections import HTTPConnection
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

from serve_app.core.media_hosts import Network, may_be_fetched_from, named_networks
from serve_app.engine.vllm_adapter.private_names import MEDIA_NAMES, missing
from serve_app.errors import ConfigError

logger = logging.getLogger("ray.serve")

HTTP = "http"  # vLLM's name of the connector, unless the operator names another one in VLLM_MEDIA_CONNECTOR


def install(hosts: Collection[str]) -> None:
    """Fetch media in this process so. `hosts`: `models[].media_domains`.

    Raises:
        ConfigError: this vLLM fetches in another way, which nothing here would check.
    """
    lacking = missing(MEDIA_NAMES)
    if lacking and hosts:
        raise ConfigError(f"this vLLM has changed how it fetches media: {lacking}", param="models.media_domains")
    _use(CheckedConnection(named_networks(hosts)))


def install_none() -> None:
    """Fetch no link in this process."""
    _use(NoConnection())


def _use(connection: HTTPConnection) -> None:
    MEDIA_CONNECTOR_REGISTRY.register(HTTP)(functools.partial(MediaConnector, connection=connection))


class NoConnection(HTTPConnection):
    """Refuses every link."""

    async def get_async_client(self) -> Any:
        """Raises VLLMValidationError."""
        raise self._error()

    def get_sync_client(self) -> Any:
        """Raises VLLMValidationError."""
        raise self._error()

    def _error(self) -> VLLMValidationError:
        return VLLMValidationError("links are not fetched here; send the data in a data URL", parameter="image_url")


class CheckedConnection(HTTPConnection):
    """vLLM's connection, to allowed addresses alone. `networks`: those allowed besides public ones."""

    def __init__(self, networks: tuple[Network, ...]) -> None:
        super().__init__()
        self._networks = networks
        self._session: aiohttp.ClientSession | None = None

    async def get_async_client(self) -> aiohttp.ClientSession:
        """The one session of this process."""
        if self._session is None:
            connector = aiohttp.TCPConnector(resolver=CheckedResolver(self._networks))
            none = aiohttp.DummyCookieJar()  # what one tenant's link has set would go with another's
            self._session = aiohttp.ClientSession(trust_env=False, connector=connector, cookie_jar=none)
        return self._session

    async def get_async_response(
        self,
        url: str,
        *,
        timeout: float | None = None,
        extra_headers: Mapping[str, str] | None = None,
        allow_redirects: bool = False,
    ) -> Any:
        """As vLLM's, without redirects."""
        return await super().get_async_response(
            url, timeout=timeout, extra_headers=extra_headers, allow_redirects=False
        )

    def get_bytes(
        self,
        url: str,
        *,
        timeout: float | None = None,
        allow_redirects: bool = False,
        max_bytes: int | None = None,
    ) -> bytes:
        """As vLLM's, without redirects. Holds up its thread, and waits for no other event loop."""

        async def fetched() -> bytes:
            connection = CheckedConnection(self._networks)
            try:
                return await connection.async_get_bytes(url, timeout=timeout, max_bytes=max_bytes)
            finally:
                await connection.close()

        with ThreadPoolExecutor(1, "media") as thread:  # of its own: vLLM's may have an event loop that runs
            return thread.submit(asyncio.run, fetched()).result()

    async def close(self) -> None:
        """Close the session."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def get_sync_client(self) -> Any:
        """The connector does not ask for it."""
        raise RuntimeError("media are fetched by an event loop")


class CheckedResolver(AbstractResolver):
    """The addresses of a name that may be fetched from."""

    def __init__(self, networks: tuple[Network, ...]) -> None:
        self._networks = networks
        self._resolver = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Raises VLLMValidationError: no address of the name is allowed. The client is not told which it has."""
        found = await self._resolver.resolve(host, port, family)
        allowed = [one for one in found if may_be_fetched_from(one["host"], self._networks)]
        if not allowed:
            addresses = ", ".join(sorted({one["host"] for one in found}))
            logger.warning("vLLM gets no media from host %s, which is inside the network: %s", host, addresses)
            raise VLLMValidationError(
                f"the host {host!r} leads to an address inside the network, which models[].media_domains does not have",
                parameter="image_url",
            )
        return allowed

    async def close(self) -> None:
        """Nothing is kept open."""
        await self._resolver.close()
