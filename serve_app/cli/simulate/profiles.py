"""Which engine profile a model of the configuration has, by `--profile` or by its own settings.

Rules, in this order: the profile given for the model; the one given for all models; for an engine of
`engine: simulated` the figures of its settings; for the built-in model `tiny-cpu`, which was measured. A model for
which none of these applies is an error that lists the profiles: no size or speed is guessed from a name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Any

from autoscaling.simulator import PROFILES, EngineProfile
from serve_app.errors import BadRequest
from serve_app.settings import ModelSettings, nearest

OPTION = "--profile"
BUILT_IN = "tiny-cpu"
LEAST_STEP_S = 1e-6  # of a simulated engine without a step time: a profile's is above zero
SUFFIX = ".json"

_TEXTS = frozenset({"name", "source"})
_SWITCHES = frozenset({"prefix_cache"})
_WHOLE = frozenset({"slots", "kv_tokens", "prefill_chunk_tokens", "gpus", "memory_bytes"})


def chosen_profiles(
    given: Sequence[str], models: Sequence[ModelSettings], read: Callable[[str], str]
) -> dict[str, EngineProfile]:
    """The profile of each model, by its name.

    Args:
        given: values of `--profile`: `PROFILE` for all models, or `MODEL=PROFILE`.
        read: the text of a file.

    Raises:
        BadRequest: there is no such profile or model, a file is wrong, or a model has no profile.
    """
    names = [model.name for model in models]
    for_all: EngineProfile | None = None
    by_model: dict[str, EngineProfile] = {}
    for value in given:
        model, separator, name = value.rpartition("=")
        if not separator:
            for_all = _profile(name, read)
        elif model in names:
            by_model[model] = _profile(name, read)
        else:
            raise BadRequest(
                f"{OPTION} {value}: the configuration has no model {model!r}{_near(model, names)}", param=OPTION
            )
    return {model.name: by_model.get(model.name) or for_all or _own_profile(model) for model in models}


def profile_of(text: str, origin: str) -> EngineProfile:
    """The profile of a JSON object with the fields of `EngineProfile`.

    Raises:
        BadRequest: it is none; the message names `origin` and the field.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise BadRequest(f"{OPTION} {origin}: it is no JSON: {error}", param=OPTION) from None
    if not isinstance(data, dict):
        raise BadRequest(f"{OPTION} {origin}: it is no JSON object", param=OPTION)
    known = {field.name: field for field in fields(EngineProfile)}
    for name in data:
        if name not in known:
            raise BadRequest(f"{OPTION} {origin}: {name}: there is no such field{_near(name, list(known))}", param=name)
    for name, field in known.items():
        if name in data:
            _check(name, data[name], origin)
        elif field.default is MISSING:
            raise BadRequest(f"{OPTION} {origin}: {name}: it is missing", param=name)
    try:
        return EngineProfile(**data)
    except ValueError as error:
        raise BadRequest(f"{OPTION} {origin}: {error}", param=OPTION) from None


def _check(name: str, value: Any, origin: str) -> None:
    if name in _TEXTS:
        if not isinstance(value, str) or not value:
            raise BadRequest(f"{OPTION} {origin}: {name}: {value!r} is no text", param=name)
        return
    if name in _SWITCHES:
        if not isinstance(value, bool):
            raise BadRequest(f"{OPTION} {origin}: {name}: {value!r} is neither true nor false", param=name)
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRequest(f"{OPTION} {origin}: {name}: {value!r} is no number", param=name)
    if name in _WHOLE and not isinstance(value, int):
        raise BadRequest(f"{OPTION} {origin}: {name}: {value!r} is no whole number", param=name)


def _profile(name: str, read: Callable[[str], str]) -> EngineProfile:
    if name.endswith(SUFFIX):
        return profile_of(read(name), name)
    found = PROFILES.get(name)
    if found is None:
        raise BadRequest(
            f"{OPTION} {name}: there is no such profile{_near(name, list(PROFILES))}; {_all()}", param=OPTION
        )
    return found


def _own_profile(model: ModelSettings) -> EngineProfile:
    """The profile that a model's settings say."""
    if model.engine == "simulated":
        rates = model.simulated
        return EngineProfile(
            "simulated",
            "the settings of the simulated engine",
            slots=model.max_num_seqs,
            kv_tokens=rates.kv_cache_tokens,
            step_s=max(LEAST_STEP_S, rates.decode_step_s),
            sequence_s=0.0,
            kv_token_s=0.0,
            prefill_tokens_per_s=rates.prefill_tokens_per_s,
            start_s=rates.start_s,
        )
    if model.path == "tiny":
        return PROFILES[BUILT_IN]
    raise BadRequest(
        f"how fast is an engine of {model.name}? Give {OPTION} {model.name}=PROFILE; {_all()}", param=OPTION
    )


def _all() -> str:
    return f"there are {', '.join(PROFILES)}, or FILE{SUFFIX} with figures of your own"


def _near(name: str, known: Sequence[str]) -> str:
    found = nearest(name, known)
    return "" if found is None else f"; did you mean {found}?"
