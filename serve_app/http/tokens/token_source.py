"""Tokens as the second source of identities, beside keys: what a JWT (RFC 7519, RFC 8725) is worth.

Invariant: the header of a token chooses among the keys and algorithms that are known, and nothing else: `jku`, `x5u`,
`jwk` and `x5c` are not read. No claim is looked at before the signature was verified. No part of a token is in an error
or a log line.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
from jwt import PyJWS
from jwt.exceptions import PyJWTError

from serve_app.errors import AuthFailure, Unauthorized
from serve_app.http.tokens.claims import check_validity, record_of, refused
from serve_app.http.tokens.follower import JwksFollower
from serve_app.http.tokens.key_set import MAX_KEY_ID_CHARS
from serve_app.settings import JwtSettings
from serve_app.store import KeyRecord

MAX_TOKEN_BYTES = 16 * 1024  # of a person in some hundred groups; proxies take headers of 8 to 64 KiB
MAX_HEADER_BYTES = 4 * 1024  # of the token's own header, decoded: with a chain of certificates (`x5c`) some 3 KiB
TOKEN_BEGIN = b"eyJ"  # `{"` in base64: how each JWT begins, and no key of the store
PARTS = 3  # header, claims, signature; an encrypted token has five


class _Header(NamedTuple):
    """What is read of a token's header."""

    algorithm: str
    key_id: str


class TokenSource:
    """The tokens that are accepted.

    Args:
        follower: knows the keys of the issuer.
    """

    def __init__(self, settings: JwtSettings, follower: JwksFollower) -> None:
        self._settings = settings
        self._follower = follower
        self._verifier = PyJWS(algorithms=list(settings.algorithms))
        # a login with a token ends when it would mean something else
        self.digest = hashlib.sha256(b"auth.jwt\0" + settings.model_dump_json().encode()).digest()

    def record(self, token: bytes, now: float) -> KeyRecord:
        """Whose token it is, in the form of a key. `now`: seconds since 1970 UTC.

        Raises:
            Unauthorized: it is not accepted. IssuerAway: the keys of its issuer are not known.
        """
        header = self._header(token)
        if header.algorithm not in self._settings.algorithms:
            raise refused(AuthFailure.ALGORITHM, "is signed by an algorithm (`alg`) that auth.jwt.algorithms lacks")
        key = self._follower.find(header.key_id)
        if header.algorithm not in key.algorithms:
            raise refused(AuthFailure.ALGORITHM, "names an algorithm (`alg`) that its key is not for")
        try:
            text = self._verifier.decode(token, key.key, algorithms=[header.algorithm])
        except (PyJWTError, ValueError, TypeError):
            raise refused(AuthFailure.SIGNATURE, "has a signature that is not of its issuer's key") from None
        claims = _claims(text)
        expires_at = check_validity(claims, self._settings, now)
        return record_of(claims, self._settings, hashlib.sha256(token).digest(), expires_at)

    def _header(self, token: bytes) -> _Header:
        """Raises Unauthorized."""
        if len(token) > MAX_TOKEN_BYTES:
            raise _malformed(f"is longer than {MAX_TOKEN_BYTES} bytes")
        parts = token.split(b".")
        if len(parts) != PARTS:
            raise _malformed("has no three parts: it is encrypted, or cut off")
        header = _json_object(parts[0])
        if "crit" in header or "b64" in header:
            raise _malformed("has a critical extension (`crit`), and none is supported")
        algorithm = header.get("alg")
        if not isinstance(algorithm, str):
            raise refused(AuthFailure.ALGORITHM, "names no algorithm (`alg`)")
        key_id = header.get("kid")
        if not isinstance(key_id, str) or not 0 < len(key_id) <= MAX_KEY_ID_CHARS:
            raise refused(AuthFailure.UNKNOWN_KEY_ID, "names no key (`kid`) of its issuer")
        return _Header(algorithm, key_id)


def is_token(secret: bytes) -> bool:
    """Whether what was sent as a key has the form of a token."""
    return secret.startswith(TOKEN_BEGIN) and b"." in secret


def _malformed(why: str) -> Unauthorized:
    return refused(AuthFailure.MALFORMED, why)


def _json_object(part: bytes) -> dict[str, Any]:
    """The header of a token. Raises Unauthorized: it is none, or has a name twice, which parsers read differently."""
    try:
        text = base64.b64decode(part + b"=" * (-len(part) % 4), altchars=b"-_", validate=True)
        if len(text) > MAX_HEADER_BYTES:
            raise _malformed(f"has a header of more than {MAX_HEADER_BYTES} bytes")
        found = json.loads(text, object_pairs_hook=_distinct)
    except (binascii.Error, ValueError, RecursionError):
        raise _malformed("has a header that is no JSON") from None
    if not isinstance(found, dict):
        raise _malformed("has a header that is no JSON object")
    return found


def _distinct(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError: a name comes twice."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(name)
        found[name] = value
    return found


def _claims(text: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _malformed("has claims that are no JSON object")
    return found
