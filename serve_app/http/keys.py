"""API keys: who calls is decided by the key alone, and a key leaves no trace.

Invariant: no key is ever part of an error, a log line, or a comparison that stops early. Only the SHA-256 of a key is
kept and looked up: a guess cannot be steered towards the digest of a key, so the time of a lookup tells nothing.

A key comes as `Authorization: Bearer <key>` or `x-api-key: <key>`; where both are sent, `Authorization` alone counts.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from serve_app.errors import ConfigError, Unauthorized
from serve_app.settings import AuthSettings, KeySettings
from serve_app.types import Identity, RequestClass

DEFAULT_KEY_FILE = "~/.local/state/serve-app/api_key"  # of a generated key that no instance keeps
KEY_PREFIX = "sk-"  # what people and secret scanners recognise as an API key
KEY_RANDOM_BYTES = 32  # 256 bits are 43 URL-safe characters
MIN_KEY_CHARS = 16  # the settings' own bound for a key
MAX_KEY_CHARS = 512  # a file with more in it is not a key file
KEY_FILE_MODE = 0o600
KEY_FOLDER_MODE = 0o700
_KEY_ID_BYTES = 4  # enough to tell keys apart in receipts, too little to test guesses of a weak key against


class KeyRing:
    """The keys that may call.

    Args:
        auth: the configured keys.
        generated: the key of `load_or_create_key`, used where none is configured.

    Raises:
        ConfigError: there is no key at all, or one is given twice (`param` names it).
    """

    def __init__(self, auth: AuthSettings, generated: str | None = None) -> None:
        keys = auth.keys or ((KeySettings.model_validate({"key": generated}),) if generated else ())
        if not keys:
            raise ConfigError("auth.keys: no API key, and nothing is served without one", param="auth.keys")
        self._identities: dict[bytes, Identity] = {}
        for index, settings in enumerate(keys):
            digest = _digest_of(settings)
            if digest in self._identities:
                raise ConfigError(f"auth.keys.{index}: this key is given twice", param=f"auth.keys.{index}")
            self._identities[digest] = _identity(settings, digest)

    def identify(self, headers: Iterable[tuple[bytes, bytes]]) -> Identity:
        """Whose key the request carries. `headers` as in ASGI's scope: names in lower case; of two the last counts.

        Raises:
            Unauthorized: no key, not in the form of one, or an unknown one.
        """
        identity = self._identities.get(hashlib.sha256(_presented(dict(headers))).digest())
        if identity is None:
            raise Unauthorized("the API key is not valid here")
        return identity


def _presented(headers: Mapping[bytes, bytes]) -> bytes:
    value = headers.get(b"authorization")
    if value is not None:
        scheme, _, key = value.partition(b" ")
        if scheme.lower() != b"bearer":
            raise Unauthorized("the Authorization header must read `Bearer <API key>`")
    else:
        key = headers.get(b"x-api-key", b"")
    key = key.strip()
    if not key:
        raise Unauthorized("no API key was sent: an `Authorization: Bearer <API key>` header is needed")
    return key


def _digest_of(settings: KeySettings) -> bytes:
    return bytes.fromhex(settings.without_secret().key_sha256 or "")


def _identity(settings: KeySettings, digest: bytes) -> Identity:
    key_id = hashlib.blake2s(digest, digest_size=_KEY_ID_BYTES, person=b"key-id").hexdigest()
    return Identity(
        key_id=key_id,
        tenant=settings.tenant,
        max_class=RequestClass[settings.max_class.upper()],
        default_class=RequestClass[settings.default_class.upper()],
        admin=settings.admin,
        metrics=settings.metrics,
    )


def tenant_salt(secret: bytes, tenant: str) -> str:
    """The salt of a tenant's prefix cache (vLLM's `cache_salt`): 43 URL-safe characters, the same wherever `secret` is.

    Tenants with different salts never share a cached prefix, so nobody can time what another one has asked.
    """
    mac = hmac.digest(secret, b"cache-salt\0" + tenant.encode(), "sha256")
    return base64.urlsafe_b64encode(mac).rstrip(b"=").decode()


def generate_key() -> str:
    """A new key: "sk-" and 43 URL-safe characters."""
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
        _publish(file, generate_key())
        return _read_key(file)
    except OSError as error:
        raise _bad_file(file, error.strerror or str(error)) from None


def _publish(file: Path, key: str) -> None:
    """Writes a hidden file beside it and links that into place: the first to link wins, the rest read what is there."""
    draft = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, KEY_FILE_MODE)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as out:
            out.write(key + "\n")
            out.flush()
            os.fsync(out.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(draft, file)
    finally:
        draft.unlink()


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
