"""The file of a generated API key: read, or made for its owner alone.

Invariant: the file appears whole or not at all, and a key that others could read or change is refused.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from pathlib import Path

from serve_app.errors import ConfigError

DEFAULT_KEY_FILE = "~/.local/state/serve-app/api_key"  # of a generated key that no instance keeps
KEY_PREFIX = "sk-"  # what people and secret scanners recognise as an API key
KEY_RANDOM_BYTES = 32  # 256 bits are 43 URL-safe characters
MIN_KEY_CHARS = 16  # the settings' own bound for a key
MAX_KEY_CHARS = 512  # a file with more in it is not a key file
KEY_FOLDER_MODE = 0o700


def new_key() -> str:
    """A new API key."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_RANDOM_BYTES)


def load_or_create_key(path: str | os.PathLike[str]) -> str:
    """The key kept in the file `path`; made, with mode 0600, where the file does not exist yet.

    Of any number of processes that start at once all get the same key: the file appears whole or not at all.

    Raises:
        ConfigError: the file can be read by others, is not ours, holds no key, or cannot be read or made.
    """
    file = Path(path)
    try:
        with contextlib.suppress(FileNotFoundError):
            return _read_key(file)
        file.parent.mkdir(mode=KEY_FOLDER_MODE, parents=True, exist_ok=True)
        _publish(file, new_key())
        return _read_key(file)
    except OSError as error:
        raise _bad_file(file, error.strerror or str(error)) from None


def _publish(file: Path, key: str) -> None:
    """Writes a hidden file beside it, for its owner alone, and links that into place: the first to link wins, the rest
    read what is there."""
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}.") as draft:
        draft.write(key + "\n")
        draft.flush()
        os.fsync(draft.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(draft.name, file)


def _read_key(file: Path) -> str:
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # non-blocking: the path may be a pipe
    with os.fdopen(descriptor, "rb") as source:
        about = os.fstat(source.fileno())  # of what was opened, not of what the name means by now
        if not stat.S_ISREG(about.st_mode):
            raise _bad_file(file, "not a plain file")
        if about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            mode = stat.S_IMODE(about.st_mode)
            raise _bad_file(file, f"mode {mode:04o} lets others at the API key; run: chmod 600 {file}")
        if about.st_uid not in (os.geteuid(), 0):
            raise _bad_file(file, f"owned by user {about.st_uid}, who could read and change the API key")
        key = source.read(MAX_KEY_CHARS + 1).strip()
    if not MIN_KEY_CHARS <= len(key) <= MAX_KEY_CHARS or not key.isascii() or not key.decode().isprintable():
        raise _bad_file(file, "holds no API key; delete it and a new one is made")
    return key.decode()


def _bad_file(file: Path, reason: str) -> ConfigError:
    return ConfigError(f"auth.key_file: {file}: {reason}", param="auth.key_file")
