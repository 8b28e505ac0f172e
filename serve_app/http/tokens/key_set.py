"""The keys of an issuer, from the text of its JWKS (RFC 7517). Pure.

Invariant: only public keys for signatures are taken, each for algorithms of its own type. A key of a text that is not
understood, is too weak, or shares its id with another one of the text is left out, with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt import PyJWK
from jwt.exceptions import PyJWTError

MAX_JWKS_BYTES = 256 * 1024  # of 64 keys with their chains of certificates, as the largest providers send them
MAX_KEYS = 64  # more would hold a router's process for long; providers have 2 to 10
MAX_KEY_ID_CHARS = 256
MIN_RSA_BITS = 2048  # RFC 7518, 3.3
MAX_RSA_BITS = 8192  # a signature of a larger key takes a router milliseconds
MAX_RSA_EXPONENT = 2**32  # the same; 65537 is usual
RSA_ALGORITHMS = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"})
CURVE_ALGORITHMS: Mapping[tuple[str, str], frozenset[str]] = {
    ("EC", "P-256"): frozenset({"ES256"}),
    ("EC", "P-384"): frozenset({"ES384"}),
    ("EC", "P-521"): frozenset({"ES512"}),
    ("OKP", "Ed25519"): frozenset({"EdDSA"}),
}
# What PyJWT makes of a key that is not bad but wrong: most are its own errors, some are Python's.
KEY_ERRORS = (PyJWTError, ValueError, TypeError, KeyError, OverflowError)


class JwksError(Exception):
    """A JWKS that cannot be read or used; its text says why."""


@dataclass(frozen=True, slots=True)
class IssuerKey:
    """A public key. `algorithms`: those that it may verify; `key`: as PyJWT takes it."""

    key: Any = field(repr=False)
    algorithms: frozenset[str]


@dataclass(frozen=True, slots=True)
class KeySet:
    """The usable keys by id, and why the others are not used."""

    keys: Mapping[str, IssuerKey]
    left_out: tuple[str, ...] = ()


def parse_key_set(text: bytes, algorithms: Collection[str]) -> KeySet:
    """The keys that can verify one of the `algorithms`.

    Raises:
        JwksError: too large, no JWKS, or without one usable key.
    """
    if len(text) > MAX_JWKS_BYTES:
        raise JwksError(f"it is larger than {MAX_JWKS_BYTES} bytes")
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise JwksError("it is no JSON") from None
    listed = found.get("keys") if isinstance(found, dict) else None
    if not isinstance(listed, list):
        raise JwksError("it has no list `keys`")
    if len(listed) > MAX_KEYS:
        raise JwksError(f"it has {len(listed)} keys, more than {MAX_KEYS}")
    keys: dict[str, IssuerKey] = {}
    left_out = list(_doubles(listed))
    twice = {key_id for key_id, _ in left_out}
    for index, jwk in enumerate(listed):
        key_id = jwk.get("kid") if isinstance(jwk, dict) else None
        if not isinstance(key_id, str) or not 0 < len(key_id) <= MAX_KEY_ID_CHARS:
            left_out.append((f"#{index}", f"no `kid` of 1 to {MAX_KEY_ID_CHARS} characters"))
        elif key_id not in twice:
            try:
                keys[key_id] = _issuer_key(jwk, algorithms)
            except JwksError as error:
                left_out.append((key_id, str(error)))
    reasons = tuple(f"{key_id}: {reason}" for key_id, reason in left_out)
    if not keys:
        raise JwksError(f"it has no usable key ({'; '.join(reasons) or 'the list is empty'})")
    return KeySet(keys, reasons)


def _doubles(listed: list[Any]) -> Iterator[tuple[str, str]]:
    counts = Counter(one["kid"] for one in listed if isinstance(one, dict) and isinstance(one.get("kid"), str))
    return ((key_id, "two keys have this `kid`") for key_id, count in counts.items() if count > 1)


def _issuer_key(jwk: dict[str, Any], algorithms: Collection[str]) -> IssuerKey:
    """Raises JwksError: why it is not used."""
    if "d" in jwk or "k" in jwk:
        raise JwksError("it is secret, and has to be replaced at the issuer")
    if jwk.get("use", "sig") != "sig":
        raise JwksError("it is not for signatures (`use`)")
    operations = jwk.get("key_ops", ["verify"])
    if not isinstance(operations, list) or "verify" not in operations:
        raise JwksError("it is not for verifying signatures (`key_ops`)")
    usable = _of_type(jwk) & frozenset(algorithms)
    if "alg" in jwk:
        usable &= {jwk["alg"]} if isinstance(jwk["alg"], str) else frozenset()
    if not usable:
        raise JwksError("it is for none of `auth.jwt.algorithms`")
    try:
        key = PyJWK.from_dict(jwk, algorithm=min(usable)).key
    except KEY_ERRORS:
        raise JwksError("its numbers are no key") from None
    if isinstance(key, RSAPublicKey):
        if not MIN_RSA_BITS <= key.key_size <= MAX_RSA_BITS:
            raise JwksError(f"{key.key_size} bits: RSA keys have {MIN_RSA_BITS} to {MAX_RSA_BITS}")
        if key.public_numbers().e > MAX_RSA_EXPONENT:
            raise JwksError("its exponent is too large")
    return IssuerKey(key, frozenset(usable))


def _of_type(jwk: dict[str, Any]) -> frozenset[str]:
    """The algorithms of a key's type and curve."""
    kind = jwk.get("kty")
    if kind == "RSA":
        return RSA_ALGORITHMS
    curve = jwk.get("crv")
    if isinstance(kind, str) and isinstance(curve, str):
        return CURVE_ALGORITHMS.get((kind, curve), frozenset())
    return frozenset()
