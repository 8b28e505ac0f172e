"""Named endpoints of a user: `~/.config/serve-app/contexts.yaml`, as kubectl has its clusters.

    current: night                # where commands go that name no other place
    contexts:
      night:
        url: https://models.example.com
        key_file: ~/.config/serve-app/night.key
        certificate: ~/.config/serve-app/night.pem     # of a server whose certificate nobody has signed

Invariant: no key is in this file: it names the files of keys. A file of the user's own that others may read is refused,
as ssh refuses such a private key.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from serve_app.cli.endpoint import Endpoint, key_in, root_of
from serve_app.errors import ConfigError

CONFIG_VARIABLE = "XDG_CONFIG_HOME"


class Context(BaseModel):
    """An endpoint by its name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    key_file: str | None = None
    certificate: str | None = None

    def endpoint(self, key: str | None = None) -> Endpoint:
        """This endpoint. `key`: instead of the one in its file.

        Raises:
            ConfigError: a file cannot be read, or others may read the key.
        """
        found = key or (_key_of_user(Path(self.key_file).expanduser()) if self.key_file else None)
        certificate = None if self.certificate is None else str(Path(self.certificate).expanduser())
        return Endpoint(root_of(self.url), found, certificate)


def _key_of_user(file: Path) -> str:
    with contextlib.suppress(OSError):  # `key_in` says why it cannot be read
        about = file.stat()
        if about.st_uid == os.geteuid() and about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            mode = stat.S_IMODE(about.st_mode)
            raise ConfigError(f"key_file: {file}: mode {mode:04o} lets others at the key; run: chmod 600 {file}")
    return key_in(file)


class Contexts(BaseModel):
    """All contexts of the user. `current`: the name of one; None: commands go to the instance of this machine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    current: str | None = None
    contexts: dict[str, Context] = {}

    def named(self, name: str) -> Context:
        """Raises ConfigError: there is none of this name."""
        found = self.contexts.get(name)
        if found is None:
            known = ", ".join(sorted(self.contexts)) or "none"
            raise ConfigError(f"{contexts_file()}: there is no context {name!r}, there is {known}", param="context")
        return found


def contexts_file() -> Path:
    base = os.environ.get(CONFIG_VARIABLE)
    folder = Path(base) if base and os.path.isabs(base) else Path("~/.config").expanduser()
    return folder / "serve-app" / "contexts.yaml"


def read_contexts() -> Contexts:
    """The file's contexts; none, if there is no file.

    Raises:
        ConfigError: it cannot be read, or has another form; the message names file and field.
    """
    path = contexts_file()
    try:
        return Contexts.model_validate(yaml.safe_load(path.read_text()) or {})
    except FileNotFoundError:
        return Contexts()
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: {place}: {first['msg']}", param="context") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}", param="context") from None
