"""Resolves the API keys of an instance, and keeps plain keys out of Serve's configuration.

Invariant: the application's settings hold digests only, never a key.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from serve_app.cluster.local import InstanceState, write_private
from serve_app.settings import Settings, load_or_create_key


@dataclass(frozen=True, slots=True)
class ResolvedKeys:
    """`settings`: the configuration for the application. `key`, `file`: for a client on this machine; None if the
    configuration names digests only. `generated`: whether the key is generated rather than configured."""

    settings: Settings
    key: str | None
    file: Path | None
    generated: bool


def resolve(settings: Settings, home: InstanceState | str) -> ResolvedKeys:
    """The keys of the configuration, or a key generated at the first start and reused later.

    `key` is the first one of an operator that the configuration has in plain, else the first one.

    Args:
        home: the instance that stores the key; or, for a cluster, the file for a generated key.

    Raises:
        ConfigError: the generated key cannot be stored.
    """
    keys = settings.auth.keys
    if keys:
        readable = sorted((entry for entry in keys if entry.key is not None), key=lambda entry: not entry.admin)
        key = readable[0].key if readable else None  # an operator's first: `keys`, `explain`, `quota` need one
        file = home.configured_key_file if key is not None and isinstance(home, InstanceState) else None
        return ResolvedKeys(settings.without_secrets(), key, file, generated=False)
    usual = home.generated_key_file if isinstance(home, InstanceState) else Path(home)
    file = (Path(settings.auth.key_file) if settings.auth.key_file else usual).expanduser()
    key = load_or_create_key(file)
    return ResolvedKeys(settings.with_key(key).without_secrets(), key, file, generated=True)


def keep(keys: ResolvedKeys) -> Callable[[], None]:
    """Store a configured key for `status` and `chat` while the instance runs; returns what undoes that."""
    if keys.file is None or keys.key is None or keys.generated:
        return lambda: None
    before = keys.file.read_text() if keys.file.exists() else None
    write_private(keys.file, keys.key + "\n")
    if before is None:
        return functools.partial(keys.file.unlink, missing_ok=True)
    return functools.partial(write_private, keys.file, before)
