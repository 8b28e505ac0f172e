"""The cookie of a login to the console: a signed text that names a key by its id, or has what a token gave. Any router
can read it; nothing of it is kept.

Invariant: neither the key nor its digest nor a token is in the cookie. The signature covers the digest, so a login ends
with the key, or the settings of tokens, that it was made with, and cannot be made without the secret that all routers
share.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import time
from collections.abc import Callable
from typing import NamedTuple

from serve_app.errors import Forbidden

COOKIE = b"serve_app_console"
LOGIN_S = 12 * 3600.0  # a working day
VERSION = "1"
MAX_CHARS = 1024  # of a cookie's value; a longer one is not ours


class Login(NamedTuple):
    """What a cookie says: the id of a key, and the signature for the digest that the key had."""

    key_id: str
    signed: bytes
    signature: bytes


class LoginCookies:
    """Makes and reads them.

    Args:
        secret: of all routers.
        now: seconds since 1970 UTC.
    """

    def __init__(self, secret: bytes, now: Callable[[], float] = time.time) -> None:
        self._secret = hmac.digest(secret, b"console-login\0", "sha256")
        self._now = now

    def header(
        self, key_id: str, digest: bytes, *, is_secure: bool, ends_at: float | None = None
    ) -> tuple[bytes, bytes]:
        """The header that sets the cookie, for the key with this SHA-256.

        Args:
            is_secure: the browser came by TLS.
            ends_at: seconds since 1970 UTC; None: after `LOGIN_S`, which is the most.

        Raises:
            Forbidden: the cookie would be longer than `MAX_CHARS`.
        """
        lasts_s = LOGIN_S if ends_at is None else min(LOGIN_S, ends_at - self._now())
        signed = f"{VERSION}.{int(self._now() + lasts_s)}.{_text(key_id.encode())}"
        value = f"{signed}.{_text(self._sign(signed.encode(), digest))}"
        if len(value) > MAX_CHARS:
            raise Forbidden("a login cannot hold all that this token names: give it fewer models")
        return _set_cookie(value.encode(), int(lasts_s), is_secure=is_secure)

    def read(self, cookies: bytes) -> Login | None:
        """The login in a `Cookie` header. None: there is none, it is over, or it is not one of ours."""
        values = [value for name, _, value in map(_parts, cookies.split(b";")) if name == COOKIE]
        if len(values) != 1 or len(values[0]) > MAX_CHARS:  # a second one was set by a page of another host
            return None
        signed, _, signature = values[0].rpartition(b".")
        parts = signed.split(b".")
        if len(parts) != 3 or parts[0] != VERSION.encode() or not parts[1].isdigit():
            return None
        try:
            login = Login(_bytes(parts[2]).decode(), signed, _bytes(signature))
        except (binascii.Error, ValueError):
            return None
        return login if self._now() < int(parts[1]) else None

    def is_of(self, login: Login, digest: bytes) -> bool:
        """Whether it was made with the key of this SHA-256."""
        return hmac.compare_digest(self._sign(login.signed, digest), login.signature)

    def _sign(self, signed: bytes, digest: bytes) -> bytes:
        return hmac.digest(self._secret, signed + b"\0" + digest, "sha256")


def cleared() -> tuple[bytes, bytes]:
    """The header that takes the cookie away."""
    return _set_cookie(b"", 0, is_secure=False)


def _set_cookie(value: bytes, max_age_s: int, *, is_secure: bool) -> tuple[bytes, bytes]:
    text = b"%s=%s; Path=/; Max-Age=%d; HttpOnly; SameSite=Strict" % (COOKIE, value, max_age_s)
    return b"set-cookie", text + (b"; Secure" if is_secure else b"")


def _parts(pair: bytes) -> tuple[bytes, bytes, bytes]:
    return pair.strip().partition(b"=")


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes(text: bytes) -> bytes:
    return base64.b64decode(text + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
