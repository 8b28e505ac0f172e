"""Models built without validation are the same models."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, model_validator

from serve_app.engine.trusted_models import trusted


class Inner(BaseModel):
    text: str | None = None
    calls: list[int] = Field(default_factory=list)


class Outer(BaseModel):
    model_config = {"extra": "allow"}

    id: str
    kind: str = "outer"
    inner: Inner
    items: list[Inner] = Field(default_factory=list)
    usage: int | None = None

    @model_validator(mode="wrap")
    @classmethod
    def look(cls, data: Any, handler: Any) -> Any:
        return handler(data)


FastInner = trusted(Inner)
FastOuter = trusted(Outer)
inner_fields = st.fixed_dictionaries({}, optional={"text": st.none() | st.text(), "calls": st.lists(st.integers())})


@given(inner_fields, st.lists(inner_fields, max_size=2), st.booleans(), st.booleans())
def test_the_json_is_the_same_whatever_is_set(
    inner: dict[str, Any], items: list[dict[str, Any]], unset: bool, none: bool
) -> None:
    def made(outer: type[Outer], part: type[Inner]) -> str:
        value = outer(id="x", inner=part(**inner), items=[part(**item) for item in items])
        value.usage = 5
        return value.model_dump_json(exclude_unset=unset, exclude_none=none)

    assert made(FastOuter, FastInner) == made(Outer, Inner)


def test_it_is_an_instance_of_the_model_with_all_fields() -> None:
    value = FastOuter(id="x", inner=FastInner())
    assert isinstance(value, Outer)
    assert (value.kind, value.items, value.usage, value.inner.calls) == ("outer", [], None, [])


def test_defaults_are_not_shared_between_instances() -> None:
    first = FastInner()
    second = FastInner()
    first.calls.append(1)
    assert second.calls == []
