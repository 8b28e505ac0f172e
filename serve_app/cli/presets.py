"""`serve-app presets`: the settings of the presets, and the resulting values of a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from serve_app.settings import PRESETS, Settings


def known() -> list[str]:
    """Every preset with the defaults that it changes."""
    texts: list[str] = []
    for name in PRESETS:
        texts += [f"{name}:", *(f"  {'.'.join(path)}: {value}" for path, value in _flat(PRESETS[name]))]
    return texts


def of(settings: Settings) -> list[str]:
    """Each model's values of its preset's settings, and which of them the user has overridden."""
    texts: list[str] = []
    for model in settings.models:
        texts.append(f"{model.name}: {model.preset or 'no preset'}")
        plain = model.model_dump(mode="json")
        for path, default in () if model.preset is None else _flat(PRESETS[model.preset]):
            value: Any = plain
            for key in path:
                value = value.get(key)
            set_otherwise = "" if value == default else f" (set; the preset's is {default})"
            texts.append(f"  {'.'.join(path)}: {value}{set_otherwise}")
    return texts


def _flat(defaults: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in defaults.items():
        if isinstance(value, Mapping):
            yield from (((name, *path), one) for path, one in _flat(value))
        else:
            yield (name,), value
