"""Links in requests are fetched from allowed addresses alone, without redirects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest

from tests.requires import requires

requires("vllm")

from vllm.exceptions import VLLMUnprocessableEntityError, VLLMValidationError  # noqa: E402
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector  # noqa: E402

from serve_app.engine.vllm_adapter import media_connector, render_process  # noqa: E402
from serve_app.engine.vllm_adapter.private_names import MEDIA_NAMES, missing  # noqa: E402
from serve_app.errors import ConfigError  # noqa: E402
from tests.e2e.images import MOVED_PATH, data_url, picture, serving  # noqa: E402

LOOPBACK = "127.0.0.1"
NAME = "localhost"  # it leads to loopback


Fetch = Callable[[str, Collection[str]], Any]


async def by_the_loop(connector: MediaConnector, url: str) -> Any:
    return await connector.fetch_image_async(url)


async def in_a_thread(connector: MediaConnector, url: str) -> Any:
    """As the renderer for pooling does."""
    return await asyncio.to_thread(connector.fetch_image, url)


async def on_the_loops_thread(connector: MediaConnector, url: str) -> Any:
    return connector.fetch_image(url)


@pytest.fixture(params=[by_the_loop, in_a_thread, on_the_loops_thread])
def fetch(request: pytest.FixtureRequest) -> Fetch:
    """The picture behind a link, as an engine with these `media_domains` fetches it."""
    return lambda url, hosts: asyncio.run(fetched(url, hosts, request.param))


async def fetched(url: str, hosts: Collection[str], way: Callable[[MediaConnector, str], Awaitable[Any]]) -> Any:
    connection: Any = None
    before = dict(MEDIA_CONNECTOR_REGISTRY.name2class)
    try:
        media_connector.install(hosts)
        connector = MEDIA_CONNECTOR_REGISTRY.load("http", allowed_media_domains=list(hosts))
        connection = connector.connection
        return await way(connector, url)
    finally:
        MEDIA_CONNECTOR_REGISTRY.name2class.update(before)
        if connection is not None:
            await connection.close()


def test_a_picture_of_an_address_in_the_list_is_fetched(fetch: Fetch) -> None:
    with serving(LOOPBACK, picture()) as server:
        assert fetch(server.url(), (LOOPBACK,)).size == (64, 64)


def test_a_name_that_leads_to_an_address_or_network_in_the_list_is_fetched_from(fetch: Fetch) -> None:
    with serving(LOOPBACK, picture()) as server:
        for listed in (LOOPBACK, "127.0.0.0/8"):
            assert fetch(server.url(NAME), (NAME, listed)).size == (64, 64)


def test_a_name_that_leads_inside_is_refused_before_anything_is_asked(
    fetch: Fetch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(LOOPBACK, picture()) as server:
        with pytest.raises(VLLMValidationError) as refused:
            fetch(server.url(NAME), (NAME,))
        assert server.asked == []
    assert NAME in str(refused.value)
    assert LOOPBACK not in str(refused.value)
    assert LOOPBACK in caplog.text, "operators see where it leads"


def test_a_host_that_is_not_in_the_list_is_refused(fetch: Fetch) -> None:
    with serving(LOOPBACK, picture()) as server:
        for host, listed in ((LOOPBACK, NAME), (NAME, LOOPBACK), (LOOPBACK, "127.0.0.0/8")):
            with pytest.raises(ValueError, match="allowed domains"):
                fetch(server.url(host), (listed,))
        assert server.asked == []


@pytest.mark.parametrize("allowed", ["0", "1"])
def test_no_redirect_is_followed_whatever_the_environment_says(
    fetch: Fetch, allowed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS", allowed)
    with serving(LOOPBACK, picture()) as server:
        with pytest.raises(ValueError, match="image"):
            fetch(server.url(path=MOVED_PATH), (LOOPBACK,))
        assert server.asked == [MOVED_PATH]


def test_a_picture_that_is_larger_than_the_bound_is_refused(fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB", "1")
    with (
        serving(LOOPBACK, picture() + bytes(2**20)) as server,
        pytest.raises(VLLMUnprocessableEntityError, match="VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB"),
    ):
        fetch(server.url(), (LOOPBACK,))


def test_no_proxy_of_the_environment_is_asked(fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(LOOPBACK, picture()) as server, serving(LOOPBACK, picture()) as proxy:
        for name in ("http_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(name, f"http://{NAME}:{proxy.port}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        assert fetch(server.url(), (LOOPBACK,)).size == (64, 64)
        assert proxy.asked == []


async def made(config: Any, state: Any, frontend: Any) -> None:
    """In place of vLLM's renderer, which needs a model."""
    state.online_renderer = SimpleNamespace(renderer=None)


@pytest.mark.parametrize("way", [by_the_loop, in_a_thread])
def test_the_process_that_renders_large_requests_fetches_no_link(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MEDIA_CONNECTOR_REGISTRY, "name2class", {})
    monkeypatch.setattr(render_process.cut_calls, "install", lambda: None)
    monkeypatch.setattr(render_process, "init_render_app_state", made)
    monkeypatch.setattr(render_process, "take_turns", lambda renderer: None)
    monkeypatch.setattr(render_process, "name_what_is_refused", lambda renderer: None)
    setup: Any = SimpleNamespace(config=None, frontend=None)
    asyncio.run(render_process.Reader(setup).start())
    connector = MEDIA_CONNECTOR_REGISTRY.load("http", allowed_media_domains=[LOOPBACK])
    with serving(LOOPBACK, picture()) as server:
        with pytest.raises(VLLMValidationError, match="data URL"):
            asyncio.run(way(connector, server.url()))
        assert server.asked == []
    assert asyncio.run(way(connector, data_url(picture()))).size == (64, 64)


def test_the_installed_vllm_fetches_media_as_is_known_here() -> None:
    assert missing(MEDIA_NAMES) == []


def test_an_engine_with_hosts_does_not_start_on_a_vllm_that_fetches_in_another_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(media_connector, "missing", lambda names: ["vllm.connections.HTTPConnection"])
    monkeypatch.setattr(MEDIA_CONNECTOR_REGISTRY, "name2class", {})
    with pytest.raises(ConfigError, match="HTTPConnection") as refused:
        media_connector.install((NAME,))
    assert refused.value.param == "models.media_domains"
    media_connector.install(())
    assert list(MEDIA_CONNECTOR_REGISTRY.name2class) == ["http"]
