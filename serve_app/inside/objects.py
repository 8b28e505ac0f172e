"""Answers as objects of the `openai` package."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from openai.types import Model
from pydantic import BaseModel, ValidationError

M = TypeVar("M", bound=BaseModel)


class ModelList(BaseModel):
    """Of GET /v1/models."""

    data: list[Model]


def as_object(type_: type[M], data: bytes) -> M:
    """The answer as the `openai` package would give it: validated, which is also twenty times as fast, and as it came
    where a value is none that OpenAI's own servers give."""
    try:
        return type_.model_validate_json(data)
    except ValidationError:
        return type_.model_construct(**msgspec.json.decode(data))
