"""Where a body is wrong: of a union, in the branch that fits best."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Required

import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from serve_app.engine.body_faults import FaultFinder


class Words(TypedDict, total=False):
    type: Required[Literal["words"]]
    words: Required[str]


class Picture(TypedDict, total=False):
    type: Required[Literal["picture"]]
    url: Required[str]


class Bare(TypedDict, total=False):
    """Takes any object."""

    note: str


class Asking(TypedDict, total=False):
    role: Required[Literal["asking"]]
    parts: Required[str | Iterable[Words | Picture]]


class Answering(TypedDict, total=False):
    role: Required[Literal["answering"]]
    parts: Required[str]


class Anything(TypedDict, total=False):
    role: Required[str]
    parts: str | list[Words | Picture | Bare]


class Talk(BaseModel):
    turns: list[Asking | Answering]
    level: int | Literal["high"] = 0
    tags: dict[str, int] = Field(default_factory=dict)


class LooseTalk(BaseModel):
    turns: list[Asking | Answering | Anything]


class Ask(BaseModel):
    text: str
    size: int = 0


class AskMany(BaseModel):
    texts: list[list[int]] | list[str]
    size: int = 0


TALK = FaultFinder(Talk)
LOOSE_TALK = FaultFinder(LooseTalk)
ASKS = FaultFinder(Ask | AskMany)


@pytest.mark.parametrize(
    ("reported", "path", "message"),
    [
        ({"role": "asking", "parts": [{"type": "picture"}]}, ("parts", 0, "url"), "Field required"),
        (
            {"role": "asking", "parts": [{"type": "words", "words": "a"}, {"type": "words"}]},
            ("parts", 1, "words"),
            "Field required",
        ),
        ({"role": "asking", "parts": [{"url": "a"}]}, ("parts", 0, "type"), "Field required"),
        ({"role": "asking", "parts": ["a"]}, ("parts", 0), "Input should be an object"),
        ({"role": "asking", "parts": 5}, ("parts",), "Input should be a valid string or a valid list"),
        ({"role": "answering", "parts": []}, ("parts",), "Input should be a valid string"),
        ({"role": "asking"}, ("parts",), "Field required"),
        ({"parts": "a"}, ("role",), "Field required"),
        ({"role": None}, ("role",), "Input should be 'asking' or 'answering'"),
        (5, (), "Input should be an object"),
    ],
)
def test_a_fault_is_of_the_branch_that_fits_best(reported: Any, path: tuple[Any, ...], message: str) -> None:
    fault = TALK.find({"turns": [{"role": "answering", "parts": "a"}, reported]})
    assert fault is not None
    assert fault.path == ("turns", 1, *path)
    assert message in fault.message


def test_what_a_lenient_branch_takes_is_no_fault() -> None:
    """The role is any text there, and a part any object."""
    reported = {"role": "other", "parts": [{"type": "none"}], "mood": "good"}
    body = {"turns": [{"role": "asking", "parts": "a", "note": "b"}, reported]}
    assert LOOSE_TALK.find(body) is None
    fault = LOOSE_TALK.find(body, by_kind=True)
    assert fault is not None
    assert (fault.path, fault.message) == (("turns", 1, "parts", 0, "type"), "Input should be 'words' or 'picture'")


@pytest.mark.parametrize(
    ("body", "path", "message"),
    [
        (
            {"level": "low"},
            ("level",),
            "Input should be a valid integer, unable to parse string as an integer or 'high'",
        ),
        ({"turns": [], "tags": {"a": 1, "b": "c"}}, ("tags", "b"), "Input should be a valid integer"),
        ({"tags": {}}, ("turns",), "Field required"),
    ],
)
def test_what_is_wrong_counts_before_what_is_missing(body: dict[str, Any], path: tuple[Any, ...], message: str) -> None:
    fault = TALK.find(body)
    assert fault is not None
    assert fault.path == path
    assert fault.message.startswith(message)


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"texts": ["a", 5]}, ("texts", 1)),
        ({"texts": [[1, "a"]]}, ("texts", 0, 1)),
        ({"text": 5}, ("text",)),
        ({"texts": ["a"], "size": "b"}, ("size",)),
        ({}, ("text",)),
    ],
)
def test_of_several_models_the_one_counts_whose_fields_the_body_has(
    body: dict[str, Any], path: tuple[Any, ...]
) -> None:
    fault = ASKS.find(body)
    assert fault is not None
    assert fault.path == path


def test_a_body_with_many_wrong_entries_has_the_errors_of_the_first() -> None:
    fault = TALK.find({"turns": [{"role": "asking", "parts": [5] * 10_000}] * 100})
    assert fault is not None
    assert fault.path == ("turns", 0, "parts", 0)
