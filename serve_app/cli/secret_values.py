"""The secrets of a configuration and of an environment: which values they are, and texts without them.

Invariant: a text that leaves `Secrets.without` has none of the values in it, in none of the forms in which JSON, Python
and URLs write them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, quote, quote_plus, unquote, urlsplit

MIN_CHARS = 6  # a shorter value guards nothing, and occurs in every text
SECRET_WORDS = frozenset({"key", "keys", "credential", "credentials"})
SECRET_ENDS = ("token", "secret", "password", "passwd", "apikey")  # of a word: PGPASSWORD
HARMLESS_ENDS = ("_file", "_id", "_path", "_dir")  # of a name with such a word: where the secret is, or whose
HARMLESS_PATHS = ("http.tls.key",)  # a file
SHOWN = "[secret {name}]"
_VARIABLE = re.compile(r"\$\{[^}]*\}")  # a text that is a variable and nothing else


def is_secret_name(name: str) -> bool:
    """Whether a setting or a variable of this name holds a secret."""
    words = re.split(r"[^a-z0-9]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower())
    has_word = any(word in SECRET_WORDS or word.endswith(SECRET_ENDS) for word in words)
    return has_word and not name.lower().endswith(HARMLESS_ENDS)


@dataclass(slots=True)
class Secrets:
    """Values that nobody may see, each with the name of what holds it."""

    names: dict[str, str] = field(default_factory=dict)

    def add(self, value: str, name: str) -> None:
        """A value that is too short is left out."""
        if len(value) >= MIN_CHARS:
            self.names.setdefault(value, name)

    def add_environment(self, environment: Mapping[str, str]) -> None:
        """The values of the variables with a secret's name."""
        for name, value in environment.items():
            if is_secret_name(name):
                self.add(value.strip(), name)
            for password in _passwords(value):
                self.add(password, name)

    def add_settings(self, data: Any, variables: Any) -> None:
        """The secrets of a configuration. `variables`: the texts of the scalars that came from variables."""
        for path, value, text in _scalars(data, variables):
            if text or _is_secret(path):
                self.add(value, text or path)
            for password in _passwords(value):
                self.add(password, path)

    def without(self, text: str) -> str:
        """The text with the names of the secrets in place of their values."""
        for value in sorted(self.names, key=len, reverse=True):
            for form in sorted(_forms(value), key=len, reverse=True):
                text = text.replace(form, SHOWN.format(name=self.names[value]))
        return text


def without_secrets(data: Any, variables: Any) -> Any:
    """A configuration with `${NAME}` for what came from a variable, and a word for each secret, of whatever length."""
    return _masked(data, variables, "")


def _masked(data: Any, variables: Any, path: str) -> Any:
    if isinstance(variables, str) and _VARIABLE.fullmatch(variables):
        return variables
    if isinstance(data, dict):
        return {name: _masked(value, _below(variables, name), _joined(path, name)) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_masked(value, _below(variables, index), path) for index, value in enumerate(data)]
    if not isinstance(data, str):
        return data
    if _is_secret(path):
        return SHOWN.format(name=path)
    text = variables if isinstance(variables, str) and variables else data
    for password in _passwords(text):
        text = text.replace(quote(password, safe=""), "...").replace(password, "...")
    return text


def _scalars(data: Any, variables: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """Each text or number with its path, and the text of its variable; empty: it has none."""
    if isinstance(data, dict | list | tuple):
        items = data.items() if isinstance(data, dict) else enumerate(data)
        for key, value in items:
            inner = _joined(path, key) if isinstance(data, dict) else path
            yield from _scalars(value, _below(variables, key), inner)
    elif data is not None and not isinstance(data, bool):
        yield path, str(data), variables if isinstance(variables, str) else ""


def _below(variables: Any, key: object) -> Any:
    """The texts of the variables inside a value; of a scalar that gave a whole mapping, its own."""
    return variables.get(str(key)) if isinstance(variables, Mapping) else variables


def _joined(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def _is_secret(path: str) -> bool:
    return is_secret_name(path.rpartition(".")[2]) and path not in HARMLESS_PATHS


def _passwords(text: str) -> list[str]:
    """The passwords in a URL, as they stand there and as they are meant."""
    if "://" not in text:
        return []
    try:
        parsed = urlsplit(text)
        found = [value for name, value in parse_qsl(parsed.query) if is_secret_name(name)]
        return [*found, *([parsed.password, unquote(parsed.password)] if parsed.password else [])]
    except ValueError:
        return []


def _forms(value: str) -> set[str]:
    """How JSON, Python, YAML and URLs write a value."""
    written = {json.dumps(value), json.dumps(value, ensure_ascii=False), repr(value)}
    in_yaml = value.replace("'", "''")
    return {value, in_yaml, *(one[1:-1] for one in written), quote(value), quote(value, safe=""), quote_plus(value)}
