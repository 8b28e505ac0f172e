"""The sentence about a value that a setting does not take, and what to write instead. Pure.

Invariant: no sentence is pydantic's own, which speaks of Python's types, and none shows a key or a URL.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any

from serve_app.settings.variables import Place

SECRET = {"key", "key_sha256", "url", "files_url"}  # settings whose values may be, or hold, a secret
TRUE_OR_FALSE = {"yes", "no", "on", "off", "true", "false"}  # what YAML 1.1 reads as such
PATTERNS = {
    r"^[A-Za-z0-9][A-Za-z0-9._/-]*$": "must be of letters, digits and . _ / - and begin with a letter or a digit",
    r"^[!-~]+$": "must be of letters, digits and signs of ASCII, without spaces: it is sent in a header",
    r"^(\*|null|[a-z][a-z0-9+.-]*://[^/\s]+)$": "must be * or an origin as a browser sends it, https://chat.example",
    r"^[0-9a-f]{64}$": "must be 64 digits of 0 to 9 and a to f, as `sha256sum` prints them",
}
_AMOUNT = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z%]*)")
_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_BYTES = {"": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
_BYTES |= {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
PLAIN = {"": 1.0, "%": 0.01, "k": 1e3, "m": 1e6}
# How a setting's name ends, what its unit is, and the other units in it.
UNITS: tuple[tuple[str, str, Mapping[str, float]], ...] = (
    ("_per_s", "", PLAIN),
    ("_s", "seconds", _SECONDS),
    ("_days", "days", {name: size / 86_400.0 for name, size in _SECONDS.items() if name in ("h", "d")} | {"": 1.0}),
    ("_gb", "GB", {name: size / 1e9 for name, size in _BYTES.items()} | {"": 1.0}),
    ("_bytes", "bytes", _BYTES),
)
NEAR = 0.6  # difflib's own cutoff: `max_num_seq` and `kv_cache` are near, `num_gpus` is not


def describe(
    kind: str, place: Place, value: Any, bounds: Mapping[str, Any], message: str, written: str | None
) -> tuple[str, str | None]:
    """What is wrong with a value, and what to write instead (None: not known).

    Args:
        kind: pydantic's name of the error; `bounds`, `message`: what it says with it.
        place: of the setting.
        written: the scalar as the file has it; None: it is none, or there is no file.
    """
    name = next((part for part in reversed(place) if isinstance(part, str)), "")
    shown = "the value" if name in SECRET and isinstance(value, str | int | float) else _shown(value)
    if kind in ("value_error", "assertion_error"):
        return message.removeprefix("Value error, ").removeprefix("Assertion failed, "), None
    if (sentence := FORMS.get(kind)) is not None:
        return sentence, None
    if kind in BOUNDS:
        bound, words = BOUNDS[kind]
        number = bounds[bound]
        if bound == "min_length" and number == 1:
            return "must not be empty", None
        return words.format(bound=f"{number:,}" if isinstance(number, int) else f"{number:g}", shown=shown), None
    if kind == "string_pattern_mismatch":
        return PATTERNS.get(str(bounds["pattern"]), f"{shown} does not match {bounds['pattern']}"), None
    if kind in ("literal_error", "enum"):
        known = re.findall(r"'([^']*)'", str(bounds["expected"]))
        near = difflib.get_close_matches(str(value).lower(), known, n=1, cutoff=NEAR)
        return f"{shown} is none of {', '.join(known)}", f"did you mean {near[0]}?" if near else None
    tell = next((one for start, one in KINDS.items() if kind.startswith(start)), None)
    return (f"{shown} is not what is wanted: {message}", None) if tell is None else tell(name, value, shown, written)


def _shown(value: Any) -> str:
    """A value as YAML has it."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    return repr(value) if isinstance(value, str) else str(value)


def _number(rule: str) -> Callable[[str, Any, str, str | None], tuple[str, str | None]]:
    def tell(name: str, value: Any, shown: str, written: str | None) -> tuple[str, str | None]:
        return f"{shown} is {rule}", _amount(name, value) if isinstance(value, str) else None

    return tell


def _amount(name: str, text: str) -> str | None:
    """What an amount with a unit, or in another form, is in this setting's unit."""
    found = _AMOUNT.fullmatch(text.strip())
    unit, units = next(((unit, units) for end, unit, units in UNITS if name.endswith(end)), ("", PLAIN))
    if found is None or (size := units.get(found[2].lower())) is None:
        return f"write a number of {unit}" if unit else None
    amount = float(found[1].replace(",", "").replace("_", "")) * size
    number = str(int(amount)) if amount == int(amount) else f"{amount:g}"
    return f"write {number}" + (f", in {unit}" if unit else "")


def _text(name: str, value: Any, shown: str, written: str | None) -> tuple[str, str | None]:
    if value is None or isinstance(value, Mapping | list | tuple):
        return f"{shown} is no text", None
    if name in SECRET:
        kind = "true or false" if isinstance(value, bool) else "a number"
        return f"{shown} is no text for YAML, but {kind}", "put it in quotes"
    if isinstance(value, bool) and written is not None and written.lower() in TRUE_OR_FALSE:
        return f"{written} is {shown} for YAML, and no text", f'put it in quotes: "{written}"'
    return f"{shown} is no text for YAML", f'put it in quotes: "{shown if written is None else written}"'


def _flag(name: str, value: Any, shown: str, written: str | None) -> tuple[str, str | None]:
    return f"{shown} is neither true nor false", "write true or false"


def _moment(name: str, value: Any, shown: str, written: str | None) -> tuple[str, str | None]:
    day = re.match(r"\d{4}-\d{2}-\d{2}", str(value))
    example = day[0] if day else "2027-01-31"
    return f"{shown} is no moment with its offset from UTC", f"write {example}T00:00:00Z"


FORMS = {
    "missing": "is missing",
    "tuple_type": "a list is wanted, - or [...]",
    "list_type": "a list is wanted, - or [...]",
    "model_type": "a mapping is wanted, key: value",
    "model_attributes_type": "a mapping is wanted, key: value",
    "dict_type": "a mapping is wanted, key: value",
    "recursion_loop": "contains itself",
    "invalid_key": "is no name of a key: put it in quotes",
}
# The name of the bound in what pydantic says, and our words.
BOUNDS = {
    "greater_than": ("gt", "{shown} is too small: it must be above {bound}"),
    "greater_than_equal": ("ge", "{shown} is too small: it must be {bound} or more"),
    "less_than": ("lt", "{shown} is too large: it must be below {bound}"),
    "less_than_equal": ("le", "{shown} is too large: it must be {bound} or less"),
    "string_too_short": ("min_length", "must have at least {bound} characters"),
    "string_too_long": ("max_length", "must have at most {bound} characters"),
    "too_short": ("min_length", "must have at least {bound} entries"),
    "too_long": ("max_length", "must have at most {bound} entries"),
}
# By how pydantic's name of the error begins.
KINDS: Mapping[str, Callable[[str, Any, str, str | None], tuple[str, str | None]]] = {
    "int": _number("no whole number"),
    "float": _number("no number"),
    "finite_number": _number("no finite number"),
    "bool": _flag,
    "string": _text,
    "date": _moment,
    "timezone": _moment,
}
