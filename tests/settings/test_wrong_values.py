"""A wrong value is told in plain words: what it is, what would be right, and no secret."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel

from serve_app.settings import Settings, examine
from serve_app.settings.wrong_values import describe

VALUES: tuple[Any, ...] = (None, True, -1, 1.5, 1e300, float("nan"), "", "x", "\u00e9" * 300, [], [1], {}, {"x": 1})
PYDANTIC = ("Input should", "valid ", "Field required", "should have at", "String ", "Value error", "unable to")


def places(model: type[BaseModel], inside: Any) -> Iterator[tuple[str, Any]]:
    """Each setting, and how a configuration is built around a value of it."""
    for name, field in model.model_fields.items():
        yield name, lambda value, name=name: inside({name: value})
        for section, around in _sections(field.annotation):
            yield from places(section, lambda value, name=name, around=around: inside({name: around(value)}))


def _sections(annotation: Any) -> Iterator[tuple[type[BaseModel], Any]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, lambda value: value
        return
    for argument in get_args(annotation):
        for section, around in _sections(argument):
            if get_origin(annotation) is tuple:
                yield section, lambda value, around=around: [around(value)]
            elif get_origin(annotation) is dict:
                yield section, lambda value, around=around: {"high": around(value)}
            else:
                yield section, around


ALL = list(places(Settings, lambda value: value))


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_no_sentence_is_pydantic_s(value: Any) -> None:
    reported = [one.message for _, build in ALL for one in (examine(build(value))[1])]
    assert reported
    assert [message for message in reported if any(words in message for words in PYDANTIC)] == []


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("drain_s", "10m", "write 600, in seconds"),
        ("drain_s", "1.5 h", "write 5400, in seconds"),
        ("drain_s", "250ms", "write 0.25, in seconds"),
        ("drain_s", "soon", "write a number of seconds"),
        ("memory_gb", "2GB", "write 2, in GB"),
        ("memory_gb", "512MB", "write 0.512, in GB"),
        ("memory_gb", "1TiB", "write 1099.51, in GB"),
        ("files_expire_days", "48h", "write 2, in days"),
        ("max_body_bytes", "8MiB", "write 8388608, in bytes"),
        ("max_queued", "10,000", "write 10000"),
        ("max_queued", "10k", "write 10000"),
        ("share", "50%", "write 0.5"),
        ("share", "half", None),
    ],
)
def test_an_amount_with_a_unit_is_reported_in_the_setting_s_own(name: str, value: str, advice: str | None) -> None:
    assert describe("float_parsing", (name,), value, {}, "", None) == (f"{value!r} is no number", advice)


@pytest.mark.parametrize(
    "config",
    [
        {"auth": {"keys": [{"key": "short-secret", "admin": True}]}},
        {"auth": {"keys": [{"key": 1234567890123456}]}},
        {"auth": {"keys": [{"key_sha256": "secret-digest"}]}},
        {"store": {"url": 1234567890123456}},
        {"batch": {"files_url": 1234567890123456}},
    ],
)
def test_a_secret_is_in_no_sentence(config: dict[str, Any]) -> None:
    _, wrong = examine(config)
    assert wrong
    assert not [
        one for one in wrong if "secret" in f"{one.message}{one.advice}" or "12345" in f"{one.message}{one.advice}"
    ]
