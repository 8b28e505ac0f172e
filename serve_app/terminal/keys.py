"""Which API keys an instance takes, and what of them Serve gets to see.

Invariant: the mapping handed to the application holds digests only, never a key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_app.http.keys import load_or_create_key
from serve_app.local.state import InstanceState, write_private
from serve_app.settings import KeySettings, Settings


@dataclass(frozen=True, slots=True)
class ResolvedKeys:
    """`arguments`: the configuration as the application gets it. `key`, `file`: what a client here uses; None when the
    configuration names digests only. `generated`: whether the key is ours rather than the configuration's."""

    arguments: Mapping[str, Any]
    key: str | None
    file: Path | None
    generated: bool


def _hidden(key: KeySettings) -> dict[str, Any]:
    return key.without_secret().model_dump(mode="json", exclude={"key"})


def resolve(settings: Settings, state: InstanceState) -> ResolvedKeys:
    """Keys of the configuration, or the instance's generated one (made at the first start, used again later).

    Raises:
        ConfigError: the generated key cannot be kept.
    """
    keys = settings.auth.keys
    if keys:
        generated = False
        key = next((one.key for one in keys if one.key is not None), None)
        file = state.configured_key_file if key is not None else None
        hidden = [_hidden(one) for one in keys]
    else:
        generated = True
        file = Path(settings.auth.key_file).expanduser() if settings.auth.key_file else state.generated_key_file
        key = load_or_create_key(file)
        hidden = [_hidden(KeySettings.model_validate({"key": key}))]
    arguments = settings.model_dump(mode="json")
    arguments["auth"] = {**arguments["auth"], "keys": hidden}
    return ResolvedKeys(arguments, key, file, generated)


def keep(keys: ResolvedKeys) -> None:
    """Put a configured key where `status` and `chat` find it while the instance runs."""
    if keys.file is not None and keys.key is not None and not keys.generated:
        write_private(keys.file, keys.key + "\n")
