"""An issuer of tokens in the process of a test: its keys, its tokens, and its JWKS, which can be away or slow."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from serve_app.http.tokens.key_set import JwksError
from serve_app.settings import JwtSettings

ISSUER = "https://login.example/realms/ai"
AUDIENCE = "serve-app"
JWKS_URL = "https://login.example/keys"
SETTINGS = JwtSettings.model_validate(
    {
        "issuer": ISSUER,
        "audience": AUDIENCE,
        "jwks_url": JWKS_URL,
        "max_class": "critical",
        "claims": {"tenant": "team", "max_class": "llm.class", "models": "llm.models", "roles": "roles"},
        "roles": {"admin": "operators", "metrics": "scrapers", "deploy": "deployers"},
    }
)
LASTS_S = 300


@functools.cache
def rsa_key(name: str, bits: int = 2048) -> rsa.RSAPrivateKey:
    """The key of this name; made once, which takes a tenth of a second."""
    return rsa.generate_private_key(public_exponent=65537, key_size=bits)


@functools.cache
def ec_key(name: str) -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def jwk(key_id: str, key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey, **more: Any) -> dict[str, Any]:
    """The public half of a key in a JWKS."""
    kind = jwt.algorithms.RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else jwt.algorithms.ECAlgorithm
    return {**kind.to_jwk(key.public_key(), as_dict=True), "kid": key_id, "use": "sig"} | more


def claims(**more: Any) -> dict[str, Any]:
    """Those of a valid token; None leaves one out."""
    now = int(time.time())
    usual = {
        "iss": ISSUER,
        "aud": [AUDIENCE, "account"],
        "sub": "alice",
        "iat": now,
        "nbf": now,
        "exp": now + LASTS_S,
        "team": "research",
        "llm": {"class": "high", "models": ["sim", "other-model"]},
    }
    return {name: value for name, value in (usual | more).items() if value is not None}


class FakeIssuer:
    """Signs with the key `k1`, unless told otherwise.

    Attributes:
        published: the keys of its JWKS.
        text: in place of the JWKS. is_away: it answers with an error.
        gate: until it is set, the JWKS does not come; None: it comes at once.
        reads: how often it was asked for.
    """

    def __init__(self) -> None:
        self.published: list[dict[str, Any]] = [jwk("k1", rsa_key("k1")), jwk("e1", ec_key("e1"))]
        self.text: bytes | None = None
        self.is_away = False
        self.gate: asyncio.Event | None = None
        self.reads = 0

    async def read(self, settings: JwtSettings) -> bytes:
        """The JWKS, as `jwks_source.read_jwks` has it."""
        assert settings.jwks_url == JWKS_URL
        self.reads += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.is_away:
            raise JwksError("HTTP status 503")
        return self.text if self.text is not None else json.dumps({"keys": self.published}).encode()

    def token(self, key_id: str | None = "k1", *, signed_by: str | None = None, header: Any = None, **more: Any) -> str:
        """A token.

        Args:
            signed_by: the name of the key; None: that of `key_id`.
            header: more of it.
            more: claims.
        """
        fields = {} if key_id is None else {"kid": key_id}
        key = rsa_key(signed_by or key_id or "k1")
        return jwt.encode(claims(**more), key, algorithm="RS256", headers=fields | (header or {}))
