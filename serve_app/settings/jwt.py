"""Tokens of an identity provider: which are accepted, and what their claims give.

Invariant: no algorithm with a shared secret can be named, and the keys of the issuer come by TLS, from this machine, or
from a file.
"""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal
from urllib.parse import SplitResult, urlsplit

from pydantic import Field, field_validator, model_validator

from serve_app.settings.model import ClassName, FrozenSettings
from serve_app.types import RequestClass

Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
Claim = Annotated[str, Field(min_length=1, max_length=256)]

DEFAULT_ALGORITHMS: tuple[Algorithm, ...] = ("RS256", "ES256")  # what providers sign with unless told otherwise
DEFAULT_LEEWAY_S = 30.0  # machines with NTP differ by less; a token ends that much later
MAX_LEEWAY_S = 300.0  # more would make tokens of five minutes last twice as long
LOCAL_HOST = "localhost"


class JwtClaims(FrozenSettings):
    """The claims to read, by name; `realm_access.roles` is the claim `roles` within the claim `realm_access`. A token
    has to have each claim that is named here, except `roles`."""

    tenant: Claim | None = None  # a text; None: `auth.jwt.tenant`
    max_class: Claim | None = None  # the name of a class, which `auth.jwt.max_class` bounds
    models: Claim | None = None  # a list of names, of which `auth.jwt.models` has to have each
    roles: Claim | None = None  # a list of names, for `auth.jwt.roles`


class JwtRoles(FrozenSettings):
    """The role that gives a right; None: no token has it."""

    admin: Claim | None = None
    metrics: Claim | None = None
    deploy: Claim | None = None


class JwtSettings(FrozenSettings):
    """One issuer of tokens."""

    issuer: str = Field(min_length=1, max_length=512)
    audience: str = Field(min_length=1, max_length=512)
    jwks_url: str | None = Field(None, min_length=1, max_length=2048)
    jwks_file: str | None = Field(None, min_length=1, max_length=4096)
    algorithms: tuple[Algorithm, ...] = Field(DEFAULT_ALGORITHMS, min_length=1)
    leeway_s: float = Field(DEFAULT_LEEWAY_S, ge=0, le=MAX_LEEWAY_S)
    tenant: str | None = Field(None, min_length=1, max_length=64)  # of all tokens; None: `claims.tenant` names it
    max_class: ClassName = "high"
    default_class: ClassName = "normal"
    models: tuple[str, ...] | None = None  # that tokens may use; None: all
    claims: JwtClaims = JwtClaims()
    roles: JwtRoles = JwtRoles()
    hash_subjects: bool = False  # receipts, usage, logs and audit name a digest in place of the subject

    @field_validator("jwks_url")
    @classmethod
    def _is_private(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parsed = urlsplit(url)
        _ = parsed.port  # raises ValueError for what is none
        if parsed.scheme not in ("http", "https") or not parsed.hostname or parsed.fragment:
            raise ValueError("must be the address of a JWKS, such as https://login.example.com/keys")
        if parsed.username is not None or parsed.password is not None:
            raise ValueError("must hold no user and no password: a JWKS is public")
        if parsed.scheme == "http" and not _is_loopback(parsed):
            raise ValueError("must begin with https:, or others on the way could replace the keys of the issuer")
        return url

    @model_validator(mode="after")
    def _fits(self) -> JwtSettings:
        if (self.jwks_url is None) == (self.jwks_file is None):
            raise ValueError("give exactly one of jwks_url and jwks_file")
        if self.jwks_file is not None and not self.jwks_file.startswith("/"):
            raise ValueError("jwks_file: must be a full path: each router reads it on its own node")
        if (self.tenant is None) == (self.claims.tenant is None):
            raise ValueError("give exactly one of tenant and claims.tenant")
        if RequestClass[self.default_class.upper()] > RequestClass[self.max_class.upper()]:
            raise ValueError(f"default_class {self.default_class!r} is above max_class {self.max_class!r}")
        if self.claims.roles is None and self.roles != JwtRoles():
            raise ValueError("roles: claims.roles names no claim, so no token could have a role")
        return self


def _is_loopback(url: SplitResult) -> bool:
    if url.hostname == LOCAL_HOST:
        return True
    try:
        return ipaddress.ip_address(url.hostname or "").is_loopback
    except ValueError:  # a name
        return False
