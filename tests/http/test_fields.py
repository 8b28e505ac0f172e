"""A wrong field is told by its path, in words of the API and of no library."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, field_validator

from serve_app.errors import BadRequest
from serve_app.http.fields import parse_fields


class Bounds(BaseModel):
    model_config = ConfigDict(extra="forbid")

    most: int | None = None


class Wish(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = ""
    bounds: Bounds | None = None

    @field_validator("name")
    @classmethod
    def _lower(cls, name: str) -> str:
        if not name.islower():
            raise ValueError("must be in lower case")
        return name


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"nam": "a"}, "`nam`: there is no such field; there are name, bounds"),
        ({"bounds": {"least": 1}}, "`bounds.least`: there is no such field; there are most"),
        ({"bounds": []}, "`bounds`: Input should be an object"),
        ({"name": "A"}, "`name`: must be in lower case"),
    ],
)
def test_a_wrong_field_is_reported_in_plain_words(body: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_fields(Wish, body)
    assert caught.value.message == message
    assert caught.value.param == message.split("`")[1]
