"""The findings of a configuration file by itself: its keys and values, and the arguments passed on to vLLM.

Invariant: all mistakes are found in one pass, as far as one does not hide another: settings are compared with each
other once each of them is right, and a model is checked further once its own settings are.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from serve_app.cli.check.findings import Finding, finding
from serve_app.engine.start import engine_args, environment, vllm_arguments
from serve_app.errors import ConfigError
from serve_app.settings import ModelSettings, Settings, counterpart, examine, nearest, read_file

ALL_ARGUMENTS = "`vllm serve --help=all` lists all arguments, with - for _"
TAKES = "what each setting takes: serve-app help SETTING"
TYPES: Mapping[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}


@dataclass(frozen=True, slots=True)
class Reading:
    """A file that was read.

    Args:
        settings: None: it has an error.
        findings: what was found in it.
        right: of a file with errors the models without one, by their position in it.
        names: of the file's scalars that came from variables, their texts.
    """

    settings: Settings | None
    findings: list[Finding]
    right: Mapping[int, ModelSettings] = field(default_factory=dict)
    names: Mapping[str, Any] = field(default_factory=dict)


def read(path: str | os.PathLike[str]) -> Reading:
    """The settings of a file, and what was found in it."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", FutureWarning)
        try:
            file = read_file(path)
        except ConfigError as error:
            return Reading(None, [finding("unreadable", "config", problem=error.message)])
    found = [finding("old_name", "config", problem=str(one.message)) for one in warned if one.category is FutureWarning]
    for mistake in file.wrong:
        if mistake.is_unknown_key:
            advice = mistake.advice or "all keys: serve-app help settings"
            found.append(finding("unknown_key", mistake.path, advice=advice))
        else:
            found.append(finding("wrong_value", mistake.path, problem=mistake.located, advice=mistake.advice or TAKES))
    settings = file.settings
    right = {} if settings else _right_models(file.data, [one.path for one in file.wrong])
    return Reading(settings, found, right, file.names)


def _right_models(data: Mapping[str, Any], wrong: Sequence[str]) -> dict[int, ModelSettings]:
    """The models that no path of a mistake leads to."""
    models = data.get("models")
    if not isinstance(models, list):
        return {}
    named = {tuple(path.split(".")[:2]) for path in wrong}
    kept = [index for index in range(len(models)) if ("models", str(index)) not in named]
    right, _ = examine({"models": [models[index] for index in kept]})
    return {} if right is None else dict(zip(kept, right.models, strict=True))


def check_settings(
    settings: Settings, platform: environment.Platform, vllm: vllm_arguments.Arguments | None
) -> list[Finding]:
    """What is wrong with settings that parse: ranks that cannot be placed, and vLLM's arguments.

    Args:
        vllm: the arguments of the installed vLLM; None: it is not installed here.
    """
    found: list[Finding] = []
    for index, model in enumerate(settings.models):
        path = f"models.{index}"
        try:
            engine_args.placement(model, platform)
        except ConfigError as error:
            found.append(finding("wrong_value", f"{path}.{error.param}", problem=error.message, advice=TAKES))
        if model.engine == "simulated":
            continue
        if vllm is None:
            found.append(finding("no_vllm", path))
            continue
        found += _check_names(path, model, vllm)
        plain = model.model_copy(update={"extra_engine_args": {}, "path": "-"})  # whose folder need not be made
        ours = engine_args.engine_arguments(plain, platform)
        for name, value in model.extra_engine_args.items():
            found += _check_argument(f"{path}.extra_engine_args.{name}", name, value, vllm, ours)
    return found


def _check_names(path: str, model: ModelSettings, vllm: vllm_arguments.Arguments) -> Iterator[Finding]:
    known = {
        "tool_parser": vllm.tool_parsers,
        "reasoning_parser": vllm.reasoning_parsers,
        "quantization": vllm.quantizations,
    }
    for kind, names in known.items():
        name = getattr(model, kind)
        if name is not None and names and name not in names:
            near = nearest(name, names)
            advice = f"did you mean {near}?" if near else f"one of: {', '.join(sorted(names))}"
            yield finding("unknown_parser", f"{path}.{kind}", version=vllm.version, kind=kind, name=name, advice=advice)


def _check_argument(
    path: str, name: str, value: Any, vllm: vllm_arguments.Arguments, ours: Mapping[str, Any]
) -> list[Finding]:
    if name not in vllm.types:
        plain = name.replace("-", "_")
        near = nearest(plain, vllm.types)
        advice = counterpart(plain) or (f"did you mean {near}?" if near else ALL_ARGUMENTS)
        return [finding("unknown_engine_arg", path, version=vllm.version, name=name, advice=advice)]
    kinds = [kind.strip() for kind in vllm.types[name].split("|")]
    if all(kind in TYPES or kind == "None" for kind in kinds):
        fits = any(
            value is None
            if kind == "None"
            else isinstance(value, TYPES[kind]) and (kind == "bool") == isinstance(value, bool)
            for kind in kinds
        )
        if not fits:
            wanted = " or ".join(kind for kind in kinds if kind != "None")
            return [
                finding("wrong_engine_arg", path, version=vllm.version, name=name, value=repr(value), wanted=wanted)
            ]
    return [finding("engine_arg_is_a_setting", path, name=name)] if name in ours else []
