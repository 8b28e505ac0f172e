"""Every setting by its dotted path, with the default that the code has, as `docs/reference/settings.md` shows it."""

from __future__ import annotations

from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from serve_app.settings import Settings
from serve_app.settings.settings import LimitSettings

KEY_OF = {"classes": "<class>", "tenants": "<tenant>", "models": "<model>"}  # what stands for the key of a mapping
SHARED = {LimitSettings: "<limits>."}  # sections that stand in several places: told once, under this path


def defaults(model: type[BaseModel] = Settings, at: str = "") -> dict[str, str]:
    """The default of every setting, as the table shows it, by path: `models[].replicas.min_replicas`."""
    found: dict[str, str] = {}
    for name, field in model.model_fields.items():
        inner = _inner(field.annotation)
        brackets = "[]" if get_origin(field.annotation) is tuple else ""
        if get_origin(field.annotation) is dict and inner is not None:
            brackets = f".{KEY_OF[name]}"
        path = f"{at}{name}{brackets}"
        if inner in SHARED:
            found |= defaults(inner, SHARED[inner])
            continue
        found |= {path.removesuffix("[]"): _shown(field)} if inner is None else defaults(inner, f"{path}.")
    return found


def _inner(annotation: Any) -> type[BaseModel] | None:
    """The section that an annotation is of; None: a value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (tuple, dict, Union, UnionType):
        return next((found for one in get_args(annotation) if (found := _inner(one)) is not None), None)
    return None


def _shown(field: FieldInfo) -> str:
    value = field.default
    if field.is_required():
        return "required"
    if value is None or value in ((), {}):
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"`{value}`"
    if isinstance(value, tuple):
        return ", ".join(f"`{one}`" for one in value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
