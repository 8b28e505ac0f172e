"""Warnings about keys, tenants and logs that are allowed, and do nothing, lock people out or show prompts."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from serve_app.cli.check import check_access
from serve_app.settings import parse

NOW = datetime(2027, 1, 1, tzinfo=UTC)
OPERATOR = {"key": "sk-operator-0123456789", "admin": True}
KEY = {"key": "sk-of-acme-0123456789", "tenant": "acme"}
# the second is the moment itself
LATE = "2027-01-01T00:00:01Z"
EARLY = "2027-01-01T01:00:00+01:00"


def codes(**config: Any) -> list[tuple[str, str]]:
    found = check_access(parse({"models": [{"name": "chat"}], **config}), NOW)
    assert {one.severity for one in found} <= {"warning"}
    return [(one.code, one.path) for one in found]


def with_keys(*keys: dict[str, Any]) -> dict[str, Any]:
    return {"auth": {"keys": keys}}


@pytest.mark.parametrize(
    "config",
    [
        {},
        with_keys(OPERATOR),
        with_keys(OPERATOR, KEY | {"models": ["chat"], "expires_at": LATE}),
        with_keys(OPERATOR, KEY) | {"admission": {"tenants": {"acme": {"share": 0.5}, "night": {"weight": 2}}}},
        {"admission": {"tenants": {"default": {"share": 0.5, "models": {"chat": {"max_concurrent": 1}}}}}},
    ],
)
def test_what_is_sound_gets_no_warning(config: dict[str, Any]) -> None:
    assert codes(**config) == []


@pytest.mark.parametrize(
    ("config", "reported"),
    [
        (with_keys(OPERATOR, KEY | {"expires_at": EARLY}), [("key_expired", "auth.keys.1.expires_at")]),
        (with_keys(OPERATOR, KEY | {"models": ["chat", "gone"]}), [("no_such_name", "auth.keys.1.models.1")]),
        (with_keys(KEY), [("no_operator", "auth.keys")]),
        ({"logs": {"prompts": True}}, [("prompts_in_logs", "logs.prompts")]),
        (
            with_keys(OPERATOR | {"expires_at": EARLY}),
            [("key_expired", "auth.keys.0.expires_at"), ("no_operator", "auth.keys")],
        ),
        (
            with_keys(OPERATOR) | {"admission": {"tenants": {"acme": {"share": 0.5}}}},
            [("share_without_key", "admission.tenants.acme.share")],
        ),
        (
            {"admission": {"tenants": {"acme": {"models": {"gone": {"max_concurrent": 1}}}}}},
            [("no_such_name", "admission.tenants.acme.models.gone")],
        ),
    ],
)
def test_what_does_nothing_or_locks_people_out_is_a_warning(
    config: dict[str, Any], reported: list[tuple[str, str]]
) -> None:
    assert codes(**config) == reported
