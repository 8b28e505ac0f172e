"""Tokens of an OpenID provider that is made of Authlib's parts, and signs with its own code."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import requests

from serve_app.errors import AuthFailure, Unauthorized
from serve_app.http.keys import KeyRing
from serve_app.http.tokens import JwksFollower, follower
from serve_app.settings import AuthSettings, JwtSettings, KeySettings
from serve_app.types import Identity
from tests.fakes.stores import no_keys
from tests.requires import requires
from tests.waiting import patient

requires("openid provider")

import joserfc.jwt  # noqa: E402

from tests.fakes import openid_provider  # noqa: E402  # imports Authlib

ANSWER_S = 10.0


def discovered(provider: openid_provider.OpenIdProvider, **changes: Any) -> JwtSettings:
    """The settings, which name what the provider says of itself."""
    settings = provider.settings() | changes
    found = requests.get(provider.issuer + openid_provider.DISCOVERY, timeout=patient(ANSWER_S)).json()
    assert (settings["issuer"], settings["jwks_url"]) == (found["issuer"], found["jwks_uri"])
    return JwtSettings.model_validate(settings)


class Router:
    """The keys and tokens of a router."""

    def __init__(self, settings: JwtSettings) -> None:
        self.now = 1000.0
        self.follower = JwksFollower(now=lambda: self.now)
        self.follower.configure(settings)
        auth = AuthSettings(keys=(KeySettings(key="sk-people-0123456789"),), jwt=settings)
        self.keys = KeyRing(auth, no_keys(), follower=self.follower)

    async def identify(self, token: str) -> Identity:
        headers = {b"authorization": f"Bearer {token}".encode()}
        return await self.keys.settled(lambda: self.keys.identify(headers))


@pytest.mark.parametrize("algorithm", ["RS256", "ES256"])
def test_a_client_of_the_provider_has_the_tenant_the_models_and_the_rights_of_its_claims(algorithm: str) -> None:
    with openid_provider.serving(algorithm) as provider:
        router = Router(discovered(provider, algorithms=[algorithm]))
        agent = asyncio.run(router.identify(provider.token_of("agent")))
        assert (agent.key_id, agent.tenant, agent.models, agent.admin) == ("jwt:agent", "research", {"tiny-sim"}, False)
        operator = asyncio.run(router.identify(provider.token_of("operator")))
        assert (operator.key_id, operator.tenant, operator.admin) == ("jwt:operator", "platform", True)


def test_a_token_that_joserfc_has_signed_by_ps256_is_let_in() -> None:
    """Authlib's provider has no PS256: joserfc signs only what is asked for by name."""
    now = int(time.time())
    claims = {"aud": openid_provider.AUDIENCE, "sub": "agent", "iat": now, "exp": now + openid_provider.LASTS_S}
    with openid_provider.serving("PS256") as provider:
        (key,) = provider.published
        own = claims | {"iss": provider.issuer} | openid_provider.CLIENTS["agent"]
        token = joserfc.jwt.encode({"alg": "PS256", "kid": key.kid}, own, key, algorithms=["PS256"])
        found = asyncio.run(Router(discovered(provider)).identify(token))
        assert (found.key_id, found.tenant) == ("jwt:agent", "research")
        with pytest.raises(Unauthorized) as caught:
            asyncio.run(Router(discovered(provider, algorithms=["RS256"])).identify(token))
        assert caught.value.failure is AuthFailure.ALGORITHM


def test_after_a_rotation_new_tokens_are_let_in_and_old_ones_are_not() -> None:
    async def scenario(provider: openid_provider.OpenIdProvider) -> None:
        router = Router(discovered(provider))
        old = await asyncio.to_thread(provider.token_of, "agent")
        assert (await router.identify(old)).tenant == "research"
        provider.rotate()
        router.now += follower.UNKNOWN_S
        new = await asyncio.to_thread(provider.token_of, "agent")
        assert (await router.identify(new)).tenant == "research"
        with pytest.raises(Unauthorized) as caught:
            await router.identify(old)
        assert caught.value.failure is AuthFailure.UNKNOWN_KEY_ID

    with openid_provider.serving() as provider:
        asyncio.run(scenario(provider))


def test_a_token_of_another_provider_is_refused() -> None:
    with openid_provider.serving() as ours, openid_provider.serving() as theirs:
        router = Router(discovered(ours))
        with pytest.raises(Unauthorized) as caught:
            asyncio.run(router.identify(theirs.token_of("operator")))
        assert caught.value.failure is AuthFailure.SIGNATURE, "it has the same key id, and another key"
