"""What `serve-app check` finds about tokens: the file of the issuer's keys, names of models, and who is an operator."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from serve_app.cli.check import check_access, check_jwks
from serve_app.settings import Settings, parse
from tests.fakes.token_issuer import jwk, rsa_key

NOW = datetime(2026, 11, 30, tzinfo=UTC)


def settings(**jwt: Any) -> Settings:
    given = {"issuer": "https://login.example", "audience": "a", "tenant": "people"} | jwt
    if "jwks_file" not in given:
        given["jwks_url"] = "https://login.example/keys"
    keys = [{"key_sha256": "ab" * 32, "tenant": "programs"}]
    tenants = {"research": {"share": 0.5}}
    return parse({"auth": {"keys": keys, "jwt": given}, "admission": {"tenants": tenants}})


def in_file(tmp_path: Path, text: bytes) -> Settings:
    (tmp_path / "jwks.json").write_bytes(text)
    return settings(jwks_file=str(tmp_path / "jwks.json"))


def test_keys_of_an_address_are_not_asked_for() -> None:
    assert check_jwks(settings()) == []


def test_a_good_file_has_no_finding(tmp_path: Path) -> None:
    assert check_jwks(in_file(tmp_path, json.dumps({"keys": [jwk("k1", rsa_key("k1"))]}).encode())) == []


@pytest.mark.parametrize(
    ("text", "problem"), [(b"<html>", "no JSON"), (b'{"keys": []}', "no usable key"), (b" " * 300_000, "larger")]
)
def test_a_file_without_usable_keys_is_an_error(text: bytes, problem: str, tmp_path: Path) -> None:
    (found,) = check_jwks(in_file(tmp_path, text))
    assert (found.path, found.severity) == ("auth.jwt.jwks_file", "error")
    assert problem in found.message


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    (found,) = check_jwks(settings(jwks_file=str(tmp_path / "absent.json")))
    assert (found.path, found.severity) == ("auth.jwt.jwks_file", "error")
    assert "absent.json: No such file" in found.message


def test_a_key_that_is_not_used_is_named(tmp_path: Path) -> None:
    keys = [jwk("k1", rsa_key("k1")), jwk("secret", rsa_key("k2"), d="AQAB")]
    (found,) = check_jwks(in_file(tmp_path, json.dumps({"keys": keys}).encode()))
    assert (found.code, found.severity) == ("jwks_key_unused", "warning")
    assert "secret: it is secret" in found.message


def codes(found: Settings) -> set[tuple[str, str]]:
    return {(one.code, one.path) for one in check_access(found, NOW)}


def test_an_operator_may_be_one_by_a_role() -> None:
    assert ("no_operator", "auth.keys") in codes(settings())
    by_role = settings(claims={"roles": "roles"}, roles={"admin": "ops"})
    assert ("no_operator", "auth.keys") not in codes(by_role)


def test_a_share_may_be_of_a_tenant_of_tokens() -> None:
    lacking = ("share_without_key", "admission.tenants.research.share")
    assert lacking in codes(settings())
    assert lacking not in codes(settings(tenant="research"))
    named_by_a_claim = {"tenant": None, "claims": {"tenant": "team"}}
    assert lacking not in codes(settings(**named_by_a_claim))


def test_a_model_that_is_not_there_is_named() -> None:
    assert ("no_such_name", "auth.jwt.models.0") in codes(settings(models=["chatt"]))
