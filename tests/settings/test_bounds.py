"""Every number of the configuration has a sensible least and largest value, and is a number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import annotated_types
import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from serve_app.errors import ConfigError
from serve_app.settings import Settings, parse

LARGEST = 1e13  # of any setting but a seed; a day has 8.6e4 seconds, the largest disk 1e14 bytes
UNCHECKED = {"seed"}


def fields(model: type[BaseModel], at: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        yield f"{at}{name}", field
        for inner in sections(field.annotation):
            yield from fields(inner, f"{at}{name}.")


def sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for one in get_args(annotation) for found in sections(one)]


def is_number(annotation: Any) -> bool:
    return annotation in (int, float) or bool({int, float} & set(get_args(annotation)))


NUMBERS = {path: field for path, field in fields(Settings) if is_number(field.annotation)}


@pytest.mark.parametrize("path", NUMBERS)
def test_a_number_has_a_least_and_a_largest_value(path: str) -> None:
    of = NUMBERS[path].metadata
    lower = [one for one in of if isinstance(one, annotated_types.Ge | annotated_types.Gt)]
    upper = [
        float(str(one.le if isinstance(one, annotated_types.Le) else one.lt))
        for one in of
        if isinstance(one, annotated_types.Le | annotated_types.Lt)
    ]
    assert lower
    assert upper
    assert min(upper) <= LARGEST or path.rpartition(".")[2] in UNCHECKED


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("max_replicas", 1e9),
        ("upscale_delay_s", 1e300),
        ("upscale_delay_s", float("inf")),
        ("upscale_delay_s", float("nan")),
        ("target_ongoing_requests", True),
        ("max_replicas", True),
    ],
)
def test_a_number_beyond_any_machine_and_what_is_none_is_refused(where: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=where) as refused:
        parse({"models": [{"name": "a", "replicas": {where: value}}]})
    assert refused.value.param == f"models.0.replicas.{where}"
