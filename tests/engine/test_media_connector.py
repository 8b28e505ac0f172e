"""Links in requests are fetched from allowed addresses alone, without redirects."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import pytest

from tests.requires import requires

requires("vllm")

from vllm.exceptions import VLLMValidationError  # noqa: E402
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY  # noqa: E402

from serve_app.engine.vllm_adapter import media_connector  # noqa: E402
from serve_app.engine.vllm_adapter.private_names import MEDIA_NAMES, missing  # noqa: E402
from serve_app.errors import ConfigError  # noqa: E402
from tests.e2e.images import MOVED_PATH, picture, serving  # noqa: E402

LOOPBACK = "127.0.0.1"
NAME = "localhost"  # it leads to loopback


def fetch(url: str, hosts: Collection[str]) -> Any:
    """The picture behind a link, as an engine with these `media_domains` fetches it."""

    async def fetched() -> Any:
        connection: Any = None
        before = dict(MEDIA_CONNECTOR_REGISTRY.name2class)
        try:
            media_connector.install(hosts)
            connector = MEDIA_CONNECTOR_REGISTRY.load("http", allowed_media_domains=list(hosts))
            connection = connector.connection
            return await connector.fetch_image_async(url)
        finally:
            MEDIA_CONNECTOR_REGISTRY.name2class.update(before)
            if connection is not None:
                await (await connection.get_async_client()).close()

    return asyncio.run(fetched())


def test_a_picture_of_an_address_in_the_list_is_fetched() -> None:
    with serving(LOOPBACK, picture()) as server:
        assert fetch(server.url(), (LOOPBACK,)).size == (64, 64)


def test_a_name_that_leads_to_an_address_or_network_in_the_list_is_fetched_from() -> None:
    with serving(LOOPBACK, picture()) as server:
        for listed in (LOOPBACK, "127.0.0.0/8"):
            assert fetch(server.url(NAME), (NAME, listed)).size == (64, 64)


def test_a_name_that_leads_inside_is_refused_before_anything_is_asked(caplog: pytest.LogCaptureFixture) -> None:
    with serving(LOOPBACK, picture()) as server:
        with pytest.raises(VLLMValidationError) as refused:
            fetch(server.url(NAME), (NAME,))
        assert server.asked == []
    assert NAME in str(refused.value)
    assert LOOPBACK not in str(refused.value)
    assert LOOPBACK in caplog.text, "operators see where it leads"


def test_a_host_that_is_not_in_the_list_is_refused() -> None:
    with serving(LOOPBACK, picture()) as server:
        for host, listed in ((LOOPBACK, NAME), (NAME, LOOPBACK), (LOOPBACK, "127.0.0.0/8")):
            with pytest.raises(ValueError, match="allowed domains"):
                fetch(server.url(host), (listed,))
        assert server.asked == []


@pytest.mark.parametrize("allowed", ["0", "1"])
def test_no_redirect_is_followed_whatever_the_environment_says(allowed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS", allowed)
    with serving(LOOPBACK, picture()) as server:
        with pytest.raises(ValueError, match="image"):
            fetch(server.url(path=MOVED_PATH), (LOOPBACK,))
        assert server.asked == [MOVED_PATH]


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
