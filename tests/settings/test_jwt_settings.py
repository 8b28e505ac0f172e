"""`auth.jwt`: what is a valid issuer of tokens, and what each mistake is called."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.errors import ConfigError
from serve_app.settings import parse

ISSUER = {
    "issuer": "https://login.example/realms/ai",
    "audience": "serve-app",
    "jwks_url": "https://login.example/keys",
    "tenant": "people",
}
KEYS = [{"key_sha256": "ab" * 32}]


def parsed(**changes: Any) -> Any:
    given = {name: value for name, value in (ISSUER | changes).items() if value is not None}
    return parse({"auth": {"keys": KEYS, "jwt": given}}).auth.jwt


def mistake(**changes: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parsed(**changes)
    return caught.value


def test_an_issuer_has_safe_defaults() -> None:
    found = parsed()
    assert found.algorithms == ("RS256", "ES256")
    assert (found.max_class, found.default_class, found.leeway_s) == ("high", "normal", 30.0)
    assert (found.roles.admin, found.roles.metrics, found.roles.deploy) == (None, None, None)
    assert not found.hash_subjects


def test_without_the_setting_there_are_no_tokens() -> None:
    assert parse({"auth": {"keys": KEYS}}).auth.jwt is None


@pytest.mark.parametrize("algorithm", ["none", "HS256", "HS512", "RS1", "ES256K"])
def test_no_algorithm_with_a_shared_secret_can_be_named(algorithm: str) -> None:
    assert mistake(algorithms=[algorithm]).param == "auth.jwt.algorithms.0"
    assert mistake(algorithms=[]).param == "auth.jwt.algorithms"


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8080/keys", "http://[::1]/keys", "http://localhost/keys", "https://10.0.0.1/keys"]
)
def test_keys_come_by_tls_or_from_this_machine(url: str) -> None:
    assert parsed(jwks_url=url).jwks_url == url


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("http://login.example/keys", "https:"),
        ("http://10.0.0.1/keys", "https:"),
        ("http://127.0.0.1.evil.example/keys", "https:"),
        ("http://localhost.evil.example/keys", "https:"),
        ("file:///etc/jwks.json", "address of a JWKS"),
        ("https://", "address of a JWKS"),
        ("login.example/keys", "address of a JWKS"),
        ("https://user:secret@login.example/keys", "no password"),
        ("https://login.example:nine/keys", ""),
    ],
)
def test_another_address_is_refused_with_the_reason_and_without_its_password(url: str, word: str) -> None:
    error = mistake(jwks_url=url)
    assert error.param == "auth.jwt.jwks_url"
    assert word in error.message
    assert "secret" not in error.message


@pytest.mark.parametrize(
    ("changes", "place", "words"),
    [
        ({"jwks_file": "/etc/jwks.json"}, "auth.jwt", "exactly one of jwks_url and jwks_file"),
        ({"jwks_url": None}, "auth.jwt", "exactly one of jwks_url and jwks_file"),
        ({"jwks_url": None, "jwks_file": "jwks.json"}, "auth.jwt.jwks_file", "full path"),
        ({"claims": {"tenant": "team"}}, "auth.jwt", "exactly one of tenant and claims.tenant"),
        ({"tenant": None}, "auth.jwt", "exactly one of tenant and claims.tenant"),
        ({"default_class": "critical"}, "auth.jwt", "above max_class"),
        ({"roles": {"admin": "ops"}}, "auth.jwt.roles", "no token could have a role"),
        ({"issuer": ""}, "auth.jwt.issuer", "empty"),
        ({"issuer": None}, "auth.jwt.issuer", "missing"),
        ({"audience": None}, "auth.jwt.audience", "missing"),
        ({"audience": ["a"]}, "auth.jwt.audience", "no text"),
        ({"leeway_s": 301}, "auth.jwt.leeway_s", "too large"),
        ({"leeway_s": -1}, "auth.jwt.leeway_s", "too small"),
        ({"claims": {"tenants": "x"}}, "auth.jwt.claims.tenants", "unknown key"),
        ({"secret": "x"}, "auth.jwt.secret", "unknown key"),
    ],
)
def test_a_mistake_names_its_setting(changes: dict[str, Any], place: str, words: str) -> None:
    error = mistake(**changes)
    assert error.param == place
    assert words in error.message


def test_no_key_is_called_like_a_token_s_subject() -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"auth": {"keys": [{"key_sha256": "ab" * 32, "name": "jwt:alice"}]}})
    assert caught.value.param == "auth.keys.0.name"
