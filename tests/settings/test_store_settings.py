"""Where keys and use are kept, as the configuration says it."""

from __future__ import annotations

import pytest

from serve_app.errors import ConfigError
from serve_app.settings import parse


@pytest.mark.parametrize(
    "url",
    [
        None,
        "sqlite:////var/lib/serve-app/store.sqlite",
        "postgresql://user@host/name",
        "postgresql+psycopg://user@host:5433/name?sslmode=verify-full",
        "postgresql+psycopg://user@/name?host=/var/run/postgresql",
    ],
)
def test_a_store_is_a_file_or_a_postgresql(url: str | None) -> None:
    assert parse({"store": {"url": url}}).store.url == url


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", "must not be empty"),
        ("store.sqlite", "must begin with"),
        ("mysql://user@host/name", "must begin with"),
        ("postgresql+psycopg2://user@host/name", "must begin with"),
        ("sqlite:///store.sqlite", "full path"),
        ("sqlite://", "full path"),
        ("postgresql://user@host:five/name", "[Pp]ort"),
        ("postgresql://[host/name", "IPv6"),
        ("postgresql://user:secret@host/name", "PGPASSWORD"),
        ("postgresql://host/name?user=u&password=secret", "PGPASSWORD"),
    ],
)
def test_what_cannot_be_reached_or_holds_a_password_is_refused(url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        parse({"store": {"url": url}})
    assert refused.value.param == "store.url"
    assert "secret" not in refused.value.message


def test_two_keys_with_one_name_are_refused() -> None:
    keys = [{"key": f"sk-mine-{number}-0123456789", "name": "ops"} for number in range(2)]
    with pytest.raises(ConfigError, match="name 'ops'"):
        parse({"auth": {"keys": keys}})
