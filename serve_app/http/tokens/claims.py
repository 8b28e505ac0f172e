"""What the claims of a token give: the subject, its tenant and its rights. Pure.

Invariant: a claim that gives something has exactly the type that the settings say, or the token is refused; no value is
converted into another type. What no claim gives, the token has not. A name that comes from a token is of a few
characters that no log, label or report has to escape.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from serve_app.core.usage import OTHER
from serve_app.errors import AuthFailure, Unauthorized
from serve_app.settings import JwtSettings
from serve_app.store import KeyRecord
from serve_app.types import TOKEN_PREFIX, RequestClass

INVALID_TOKEN = "invalid_token"  # RFC 6750's word for it
INCORRECT_TOKEN = "Incorrect API key provided: the token"  # clients know a 401 by the words that keys have, too
MAX_NAME_CHARS = 64  # of the store's columns
MAX_LISTED = 1024  # names in a list; directories put a person into hundreds of groups
SUBJECT = re.compile(r"[!-~]{1,255}")  # OpenID Connect: at most 255 characters of ASCII
TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
RESERVED_TENANTS = frozenset({OTHER})  # in the metrics all tenants without a label of their own
HASHED = "sha256:"  # before a digest in place of a subject
HASH_DIGITS = 32  # 128 bits: no two subjects share a digest by chance
MAX_TIME_S = 1e15  # larger numbers, infinity and what is no number are no times


def refused(failure: AuthFailure, why: str) -> Unauthorized:
    """The error of a token. `why`: what follows on 'the token'."""
    return Unauthorized(f"{INCORRECT_TOKEN} {why}", failure=failure, code=INVALID_TOKEN)


def check_validity(claims: Mapping[str, Any], settings: JwtSettings, now: float) -> float:
    """Whether the token is of this issuer, for us, and valid now. `now`: seconds since 1970 UTC.

    Returns:
        When it expires, with the leeway.

    Raises:
        Unauthorized: it is not.
    """
    if claims.get("iss") != settings.issuer:
        raise refused(AuthFailure.ISSUER, "is of another issuer (`iss`) than auth.jwt.issuer")
    audience = claims.get("aud")
    audiences = audience if isinstance(audience, list) else [audience]
    if settings.audience not in audiences:
        raise refused(AuthFailure.AUDIENCE, "is for another audience (`aud`) than auth.jwt.audience")
    expires_at = _time(claims, "exp")
    if expires_at is None:
        raise refused(AuthFailure.CLAIM, "has no `exp`: it would be valid for ever")
    if now >= expires_at + settings.leeway_s:
        raise refused(AuthFailure.EXPIRED, "has expired (`exp`)")
    for name in ("nbf", "iat"):
        begins_at = _time(claims, name)
        if begins_at is not None and now < begins_at - settings.leeway_s:
            raise refused(AuthFailure.NOT_YET_VALID, f"is not yet valid (`{name}`)")
    return expires_at + settings.leeway_s


def record_of(claims: Mapping[str, Any], settings: JwtSettings, digest: bytes, expires_at: float) -> KeyRecord:
    """What the token's subject is and may do, in the form of a key. `digest`: of the token.

    Raises:
        Unauthorized: a claim that the settings name is missing, or of another type or value than they say.
    """
    names = settings.claims
    roles = frozenset() if names.roles is None else _names(claims, names.roles, is_needed=False)
    max_class = RequestClass[settings.max_class.upper()]
    if names.max_class is not None:
        max_class = min(max_class, _class(claims, names.max_class))
    models = None if settings.models is None else frozenset(settings.models)
    if names.models is not None:
        claimed = _names(claims, names.models, is_needed=True)
        models = claimed if models is None else claimed & models
    rights = settings.roles
    return KeyRecord(
        key_id=_subject(claims, settings),
        name="",
        tenant=settings.tenant or _tenant(claims, names.tenant or ""),
        digest=digest,
        max_class=max_class,
        default_class=min(max_class, RequestClass[settings.default_class.upper()]),
        admin=rights.admin in roles,
        metrics=rights.metrics in roles,
        deploy=rights.deploy in roles,
        models=None if models is None else tuple(sorted(models)),
        expires_at=expires_at,
    )


def claim(claims: Mapping[str, Any], name: str) -> Any:
    """The value of a claim; None: there is none. A name with dots is a claim's own, as `https://example.com/team`, or
    else a path into claims that are objects."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _time(claims: Mapping[str, Any], name: str) -> float | None:
    value = claims.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not -MAX_TIME_S < value < MAX_TIME_S:
        raise refused(AuthFailure.CLAIM, f"has a `{name}` that is no number of seconds")
    return float(value)


def _subject(claims: Mapping[str, Any], settings: JwtSettings) -> str:
    subject = claims.get("sub")
    if not isinstance(subject, str) or SUBJECT.fullmatch(subject) is None:
        raise refused(AuthFailure.CLAIM, "has no `sub` of 1 to 255 visible ASCII characters")
    # a subject that looks like a digest is hashed, too: else somebody could be taken for the subject of that digest
    if settings.hash_subjects or len(TOKEN_PREFIX + subject) > MAX_NAME_CHARS or subject.startswith(HASHED):
        subject = HASHED + hashlib.sha256(f"{settings.issuer}\0{subject}".encode()).hexdigest()[:HASH_DIGITS]
    return TOKEN_PREFIX + subject


def _tenant(claims: Mapping[str, Any], name: str) -> str:
    tenant = claim(claims, name)
    if not isinstance(tenant, str) or TENANT.fullmatch(tenant) is None:
        raise refused(
            AuthFailure.CLAIM,
            f"has no tenant in its claim {name}: 1 to {MAX_NAME_CHARS} letters, digits and . _ @ -, first a letter or "
            "a digit",
        )
    if tenant.casefold() in RESERVED_TENANTS:
        raise refused(AuthFailure.CLAIM, f"has a tenant in its claim {name} whose name is reserved")
    return tenant


def _class(claims: Mapping[str, Any], name: str) -> RequestClass:
    value = claim(claims, name)
    known = {one.label: one for one in RequestClass}
    if not isinstance(value, str) or value not in known:
        raise refused(AuthFailure.CLAIM, f"has no class in its claim {name}: {', '.join(known)}")
    return known[value]


def _names(claims: Mapping[str, Any], name: str, *, is_needed: bool) -> frozenset[str]:
    value = claim(claims, name)
    if value is None and not is_needed:
        return frozenset()
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value) or len(value) > MAX_LISTED:
        raise refused(AuthFailure.CLAIM, f"has no list of at most {MAX_LISTED} names in its claim {name}")
    return frozenset(value)
