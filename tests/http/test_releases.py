"""Messages of releases with other fields: what one wrote, another reads, in both directions."""

from __future__ import annotations

import base64
import collections
import dataclasses
import json
import pickle
import sys
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from serve_app.core.claims import ClaimRequest
from serve_app.core.messages import message
from tests.sent_messages import is_tuple, names_of, sent_messages, with_default

MESSAGES = sent_messages()
FORMER = Path(__file__).with_name("messages_of_0_5_0.json")  # pickles of each message, written there (53a36364)
SAMPLES = {int: 3, float: 0.5, str: "s", bool: True, bytes: b"\x00b"}


def values_of(cls: Any) -> dict[str, Any]:
    """A value for each field; of the right type where the class insists on it."""
    if not issubclass(cls, msgspec.Struct):
        return {name: f"value of {name}" for name in names_of(cls)}
    hints = typing.get_type_hints(cls)
    return {name: SAMPLES.get(hints[name], ["s"]) for name in names_of(cls)}


def made(cls: Any, values: dict[str, Any]) -> Any:
    """An instance, without the checks of its constructor."""
    if is_tuple(cls):
        return tuple.__new__(cls, values.values())
    if not dataclasses.is_dataclass(cls):
        return cls(**values)
    instance = cls.__new__(cls)
    for name, value in values.items():
        object.__setattr__(instance, name, value)
    return instance


def seen_in(instance: Any) -> dict[str, Any]:
    return {name: getattr(instance, name) for name in names_of(type(instance))}


def of_release(cls: Any, names: list[str], *, is_former: bool) -> Any:
    """The class as another release has it; all its fields have a default. `is_former`: that release knew nothing of
    `message`."""
    if is_tuple(cls):
        other: Any = collections.namedtuple(cls.__name__, names, defaults=["default"] * len(names))
    elif dataclasses.is_dataclass(cls):
        fields = [(name, Any, dataclasses.field(default="default")) for name in names]
        other = dataclasses.make_dataclass(cls.__name__, fields, frozen=True, slots=True)
    else:
        hints = typing.get_type_hints(cls)
        structs = [(name, hints.get(name, str), SAMPLES.get(hints.get(name, str), [])) for name in names]
        body = {} if is_former else {"__reduce__": cls.__reduce__}
        other = msgspec.defstruct(cls.__name__, structs, frozen=True, array_like=True, namespace=body)
    other.__module__ = cls.__module__
    other.__qualname__ = cls.__qualname__
    return other if is_former or issubclass(cls, msgspec.Struct) else message(other)


def sent(monkeypatch: pytest.MonkeyPatch, instance: Any, reader: Any) -> Any:
    """An instance as a process reads it that has `reader` in place of its class."""
    module = sys.modules[reader.__module__]
    with monkeypatch.context() as patch:
        patch.setattr(module, reader.__name__, type(instance))
        written = pickle.dumps(instance)
    with monkeypatch.context() as patch:
        patch.setattr(module, reader.__name__, reader)
        return pickle.loads(written)


def test_the_doors_of_all_processes_are_searched() -> None:
    found = {cls.__name__ for cls in MESSAGES}
    assert found >= {"RouterMessage", "LimitGrant", "EngineReport", "EngineInfo", "AnswerCopy", "BatchRecord", "Used"}


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
def test_a_release_reads_a_message_with_a_further_field_and_gives_one_that_is_missing_its_default(
    monkeypatch: pytest.MonkeyPatch, cls: Any
) -> None:
    values = values_of(cls)
    names = names_of(cls)
    later = of_release(cls, [*names, "later"], is_former=False)
    of_later = sent(monkeypatch, made(later, {**values, "later": "s"}), cls)
    assert type(of_later) is cls
    assert seen_in(of_later) == values
    of_ours = sent(monkeypatch, made(cls, values), later)
    assert seen_in(of_ours) == {**values, "later": seen_in(later())["later"]}


@pytest.mark.parametrize("cls", [cls for cls in MESSAGES if with_default(cls)], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("is_former", [True, False], ids=["former", "later"])
def test_a_release_with_a_field_less_reads_the_others_and_is_read(
    monkeypatch: pytest.MonkeyPatch, cls: Any, is_former: bool
) -> None:
    values = values_of(cls)
    names = names_of(cls)
    earlier = of_release(cls, names[:-1], is_former=is_former)
    last = names[-1]
    known = {name: values[name] for name in names[:-1]}
    assert seen_in(sent(monkeypatch, made(cls, values), earlier)) == known
    of_earlier = sent(monkeypatch, made(earlier, known), cls)
    assert {name: value for name, value in seen_in(of_earlier).items() if name != last} == known
    assert getattr(of_earlier, last) != values[last] or isinstance(values[last], bool)


def test_a_message_without_a_field_that_has_no_default_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    short = of_release(ClaimRequest, ["router", "tenant"], is_former=False)
    with pytest.raises(TypeError, match="ClaimRequest was sent without key"):
        sent(monkeypatch, short(), ClaimRequest)


def test_what_is_no_value_cannot_be_a_message() -> None:
    with pytest.raises(TypeError, match="no NamedTuple and no dataclass"):
        message(object)
    with pytest.raises(TypeError, match="not frozen"):
        message(dataclasses.make_dataclass("Loose", ["field"]))


@pytest.mark.parametrize("name", json.loads(FORMER.read_text()))
def test_what_release_0_5_0_has_written_is_read_and_its_fields_are_where_they_were(name: str) -> None:
    former = json.loads(FORMER.read_text())[name]
    read = pickle.loads(base64.b64decode(former["pickle"]))
    assert names_of(type(read))[: len(former["fields"])] == former["fields"]
    for field in former["fields"]:
        assert getattr(read, field) == f"value of {field}" or isinstance(read, msgspec.Struct)
    for field in names_of(type(read)):
        assert hasattr(read, field)
