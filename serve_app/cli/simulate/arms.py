"""What is compared: each policy with the configuration as it is, and with each changed one. Pure.

A `--what-if` is one or several changes, `max_num_seqs=128,max_replicas=8`. A key is

- a path from the top: `admission.max_queued`, `models.chat.max_num_seqs`, `models.0.max_num_seqs`;
- a path within a model after its name: `chat.replicas.max_replicas`;
- a path within a model alone, which is that of every model: `max_num_seqs`; of `replicas` the last word is enough.

Invariant: an arm's configuration was checked like a file, and differs from the others in what is simulated.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from autoscaling.simulator import World
from serve_app.errors import BadRequest, ConfigError
from serve_app.settings import AutoscaleSettings, ModelSettings, Settings, parse
from serve_app.types import CLASS_ALIASES, RequestClass

OPTION = "--what-if"
LEVEL_OPTION = "--level"
UNCHANGED = "unchanged"
_NEXT_CHANGE = re.compile(r",(?=[A-Za-z0-9._/-]+=)")

Place = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Configuration:
    """Settings, and the mapping of which they were parsed."""

    data: Mapping[str, Any]
    settings: Settings


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Changes of a configuration. `option`: by which they were given, for messages."""

    text: str
    changes: tuple[tuple[str, Any], ...]
    option: str = OPTION


@dataclass(frozen=True, slots=True)
class Arm:
    """One run: a policy with a world. `what_if`: the changes behind that; empty: there are none."""

    name: str
    policy: str
    what_if: str
    world: World


def what_if_of(text: str) -> WhatIf:
    """A value of `--what-if`. Raises BadRequest."""
    changes = []
    for change in _NEXT_CHANGE.split(text):
        key, separator, value = change.partition("=")
        if not separator or not key:
            raise BadRequest(f"{OPTION} {text}: give key=value, such as max_num_seqs=128", param=OPTION)
        try:
            changes.append((key, yaml.safe_load(value)))
        except yaml.YAMLError:
            raise BadRequest(f"{OPTION} {text}: {value!r} is no value of YAML", param=OPTION) from None
    return WhatIf(text, tuple(changes))


def level_of(text: str) -> WhatIf:
    """A value of `--level`, as a change of the configuration. Raises BadRequest."""
    name, _, value = text.partition("=")
    try:
        level_s = float(value.removesuffix("s"))
    except ValueError:
        level_s = math.nan
    if name not in CLASS_ALIASES or math.isnan(level_s):
        known = ", ".join(each.label for each in RequestClass)
        raise BadRequest(
            f"{LEVEL_OPTION} {text}: give CLASS=SECONDS, such as normal=2s, of {known}", param=LEVEL_OPTION
        )
    return WhatIf(text, ((f"admission.classes.{CLASS_ALIASES[name].label}.ttft_slo_s", level_s),), LEVEL_OPTION)


def changed(configuration: Configuration, what_if: WhatIf) -> Configuration:
    """A configuration with these changes.

    Raises:
        ConfigError: the changed configuration is wrong; the message names the option and the key.
    """
    settings = configuration.settings
    data = copy.deepcopy(dict(configuration.data))
    if "models" not in data:
        data["models"] = [model.model_dump(mode="json", exclude_unset=True) for model in settings.models]
    names = [model.name for model in settings.models]
    try:
        for key, value in what_if.changes:
            for place in _places(key, names):
                _put(data, place, value)
        return Configuration(data, parse(data))
    except ConfigError as error:
        raise ConfigError(f"{what_if.option} {what_if.text}: {error.message}", param=error.param) from None


def arms_of(policies: Sequence[str], unchanged: World, changes: Mapping[str, World]) -> list[Arm]:
    """Every policy with every world, which are named by what tells them apart.

    Args:
        changes: worlds of changed configurations, by the texts of the changes.

    Raises:
        BadRequest: a change makes no difference here.
    """
    for text, world in changes.items():
        if world == unchanged:
            raise BadRequest(f"{OPTION} {text}: it changes nothing that is simulated", param=OPTION)
    found = []
    for policy in policies:
        for text, world in {"": unchanged, **changes}.items():
            parts = [policy] if len(policies) > 1 or not changes else []
            parts += [text or UNCHANGED] if changes else []
            found.append(Arm(" ".join(parts), policy, text, world))
    return found


def _places(key: str, models: Sequence[str]) -> Iterator[Place]:
    """The places of a key in a configuration."""
    parts: Place = tuple(int(part) if part.isdigit() else part for part in key.split("."))
    within = key.removeprefix("models.")
    named = max((name for name in models if within.startswith(f"{name}.")), key=len, default=None)
    if named is not None:
        yield from _within(models.index(named), within.removeprefix(f"{named}."))
    elif parts[0] in Settings.model_fields:
        yield parts
    else:
        for index in range(len(models)):
            yield from _within(index, key)


def _within(model: int, key: str) -> Iterator[Place]:
    is_of_replicas = key in AutoscaleSettings.model_fields and key not in ModelSettings.model_fields
    yield ("models", model, *(["replicas"] if is_of_replicas else []), *key.split("."))


def _put(data: Any, place: Place, value: Any) -> None:
    """Set the value at a place, below new mappings where there is none."""
    path = ".".join(map(str, place))
    for part in place[:-1]:
        if isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        elif isinstance(data, dict):
            if data.get(part) is None:
                data[part] = {}
            data = data[part]
        else:
            raise ConfigError(f"{path}: there is no such place in the configuration", param=path)
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: there is no such place in the configuration", param=path)
    data[place[-1]] = value
