"""Which API keys an instance takes, and what of them Serve gets to see.

Invariant: the settings handed to the application hold digests only, never a key.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from serve_app.cluster.local import InstanceState, write_private
from serve_app.settings import Settings, load_or_create_key


@dataclass(frozen=True, slots=True)
class ResolvedKeys:
    """`settings`: the configuration as the application gets it. `key`, `file`: what a client here uses; None when the
    configuration names digests only. `generated`: whether the key is ours rather than the configuration's."""

    settings: Settings
    key: str | None
    file: Path | None
    generated: bool


def resolve(settings: Settings, home: InstanceState | str) -> ResolvedKeys:
    """Keys of the configuration, or a generated one (made at the first start, used again later).

    Args:
        home: the instance that keeps the key; or, for a cluster, the file for a generated one.

    Raises:
        ConfigError: the generated key cannot be kept.
    """
    keys = settings.auth.keys
    if keys:
        key = next((one.key for one in keys if one.key is not None), None)
        file = home.configured_key_file if key is not None and isinstance(home, InstanceState) else None
        return ResolvedKeys(settings.without_secrets(), key, file, generated=False)
    usual = home.generated_key_file if isinstance(home, InstanceState) else Path(home)
    file = (Path(settings.auth.key_file) if settings.auth.key_file else usual).expanduser()
    key = load_or_create_key(file)
    return ResolvedKeys(settings.with_key(key).without_secrets(), key, file, generated=True)


def keep(keys: ResolvedKeys) -> None:
    """Put a configured key where `status` and `chat` find it while the instance runs."""
    if keys.file is not None and keys.key is not None and not keys.generated:
        write_private(keys.file, keys.key + "\n")
