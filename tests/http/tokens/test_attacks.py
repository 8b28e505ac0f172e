"""Twenty ways to get in without a token that the issuer has made for us, one or more tests each: none gets in, and a
token whose key is known waits for none of them."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import time
from collections.abc import Callable, Coroutine
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization

from serve_app.errors import AuthFailure, IssuerAway, ServeAppError, Unauthorized
from serve_app.http.keys import KeyRing
from serve_app.http.tokens import JwksFollower, follower
from serve_app.http.tokens.key_set import MAX_JWKS_BYTES, MAX_KEYS
from serve_app.settings import AuthSettings, JwtSettings, KeySettings
from serve_app.types import Identity, RequestClass
from tests.fakes.stores import no_keys
from tests.fakes.token_issuer import AUDIENCE, SETTINGS, FakeIssuer, claims, ec_key, jwk, rsa_key

KEY = "sk-people-0123456789"
FAR = "https://attacker.example/keys"


class Door:
    """A router's keys and tokens, with a clock of the test for the follower."""

    def __init__(self, settings: JwtSettings = SETTINGS) -> None:
        self.now = 1000.0
        self.issuer = FakeIssuer()
        self.follower = JwksFollower(self.issuer.read, lambda: self.now)
        self.follower.configure(settings)
        auth = AuthSettings(keys=(KeySettings(key=KEY, tenant="people"),), jwt=settings)
        self.keys = KeyRing(auth, no_keys(), follower=self.follower)

    def looking(self, token: str | bytes, header: bytes = b"authorization") -> Coroutine[Any, Any, Identity]:
        sent = token.encode() if isinstance(token, str) else token
        value = b"Bearer " + sent if header == b"authorization" else sent
        return self.keys.settled(lambda: self.keys.identify({header: value}))

    def at_once(self, token: str) -> Identity:
        """The identity of a token without one turn of the event loop."""
        looking = self.looking(token)
        try:
            looking.send(None)
        except StopIteration as found:
            identity: Identity = found.value
            return identity
        looking.close()
        raise AssertionError("it waits")

    async def open(self) -> None:
        """Know the keys of the issuer, long enough for an unknown key id to start a reading."""
        assert (await self.looking(self.issuer.token())).tenant == "research"
        assert self.issuer.reads == 1
        self.now += follower.UNKNOWN_S

    async def refused(self, token: str | bytes, header: bytes = b"authorization") -> ServeAppError:
        """The error of a token; a good one, and a key, are let in before and after it without a wait."""
        self.at_once(self.issuer.token())
        with pytest.raises((Unauthorized, IssuerAway)) as caught:
            await self.looking(token, header)
        assert caught.value.status in (401, 503)
        self.at_once(self.issuer.token())
        assert self.at_once(KEY).tenant == "people"
        return caught.value


def check(scenario: Callable[[Door], Coroutine[Any, Any, None]], settings: JwtSettings = SETTINGS) -> None:
    async def opened() -> None:
        door = Door(settings)
        await door.open()
        await scenario(door)

    asyncio.run(opened())


def check_refused(
    forge: Callable[[FakeIssuer], str | bytes], failure: AuthFailure, header: bytes = b"authorization"
) -> None:
    """The forged token is refused for this reason, without an echo of it."""

    async def scenario(door: Door) -> None:
        forged = forge(door.issuer)
        error = await door.refused(forged, header)
        assert isinstance(error, Unauthorized)
        assert (error.failure, error.status) == (failure, 401)
        assert "Incorrect API key provided" in error.message
        sent = forged.decode() if isinstance(forged, bytes) else forged
        assert not any(len(part) > 8 and part in error.message for part in sent.split("."))

    check(scenario)


def encoded(value: Any) -> bytes:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(text).rstrip(b"=")


def with_header(token: str, **header: Any) -> bytes:
    """The token with another header, and the signature that it had."""
    return b".".join([encoded(header), *token.encode().split(b".")[1:]])


def mac(header: dict[str, Any], secret: bytes) -> bytes:
    signed = encoded(header) + b"." + encoded(claims())
    return signed + b"." + encoded(hmac.digest(secret, signed, "sha256"))


def test_a_good_token_gives_tenant_class_and_models_and_no_right() -> None:
    async def scenario(door: Door) -> None:
        found = door.at_once(door.issuer.token())
        assert (found.tenant, found.key_id, found.max_class) == ("research", "jwt:alice", RequestClass.HIGH)
        assert found.models == {"sim", "other-model"}
        assert found.is_token
        assert (found.admin, found.metrics, found.deploy) == (False, False, False)
        by_curve = jwt.encode(claims(), ec_key("e1"), algorithm="ES256", headers={"kid": "e1"})
        assert door.at_once(by_curve).key_id == "jwt:alice"

    check(scenario)


# 1. alg: none


@pytest.mark.parametrize("algorithm", ["none", "None", "NONE", "", None, 0, ["RS256"]])
@pytest.mark.parametrize("is_signed", [True, False])
def test_a_token_without_an_algorithm_is_refused(algorithm: Any, is_signed: bool) -> None:
    def forge(issuer: FakeIssuer) -> bytes:
        token = with_header(issuer.token(), alg=algorithm, kid="k1", typ="JWT")
        return token if is_signed else token.rpartition(b".")[0] + b"."

    check_refused(forge, AuthFailure.ALGORITHM)


# 2. key confusion


@pytest.mark.parametrize("form", [serialization.PublicFormat.PKCS1, serialization.PublicFormat.SubjectPublicKeyInfo])
def test_the_public_key_is_no_shared_secret(form: serialization.PublicFormat) -> None:
    secret = rsa_key("k1").public_key().public_bytes(serialization.Encoding.PEM, form)
    check_refused(lambda _: mac({"alg": "HS256", "kid": "k1"}, secret), AuthFailure.ALGORITHM)


def test_the_jwk_itself_is_no_shared_secret() -> None:
    text = json.dumps(jwk("k1", rsa_key("k1"))).encode()
    check_refused(lambda _: mac({"alg": "HS256", "kid": "k1"}, text), AuthFailure.ALGORITHM)


def test_a_secret_in_the_jwks_is_never_a_key() -> None:
    """Even an issuer that publishes one, and settings that name its algorithm, do not make it one."""

    async def scenario(door: Door) -> None:
        door.issuer.published.append({"kty": "oct", "kid": "s1", "k": encoded(b"x" * 32).decode(), "alg": "HS256"})
        forged = mac({"alg": "HS256", "kid": "s1"}, b"x" * 32)
        assert (await door.refused(forged)).failure is AuthFailure.ALGORITHM  # type: ignore[attr-defined]
        as_rsa = with_header(door.issuer.token(), alg="RS256", kid="s1")
        assert (await door.refused(as_rsa)).failure is AuthFailure.UNKNOWN_KEY_ID  # type: ignore[attr-defined]

    check(scenario)


def test_an_algorithm_of_another_type_of_key_is_refused() -> None:
    check_refused(lambda issuer: with_header(issuer.token(), alg="ES256", kid="k1"), AuthFailure.ALGORITHM)


def test_an_algorithm_that_the_settings_lack_is_refused_with_a_right_signature() -> None:
    check_refused(
        lambda _: jwt.encode(claims(), rsa_key("k1"), algorithm="RS512", headers={"kid": "k1"}), AuthFailure.ALGORITHM
    )


# 3., 4. time


@pytest.mark.parametrize("ago_s", [31, 3600, 10**9])
def test_an_expired_token_is_refused_after_the_leeway(ago_s: int) -> None:
    check_refused(lambda issuer: issuer.token(exp=int(time.time()) - ago_s), AuthFailure.EXPIRED)


def test_a_token_within_the_leeway_is_accepted() -> None:
    async def scenario(door: Door) -> None:
        door.at_once(door.issuer.token(exp=int(time.time()) - 10))
        door.at_once(door.issuer.token(nbf=int(time.time()) + 10, iat=int(time.time()) + 10))

    check(scenario)


def test_a_token_that_never_expires_is_refused() -> None:
    check_refused(lambda issuer: issuer.token(exp=None), AuthFailure.CLAIM)


@pytest.mark.parametrize("name", ["nbf", "iat"])
def test_a_token_of_the_future_is_refused(name: str) -> None:
    check_refused(lambda issuer: issuer.token(**{name: int(time.time()) + 120}), AuthFailure.NOT_YET_VALID)


# 5., 6. for others, of others


@pytest.mark.parametrize(
    "audience", [None, "", "account", ["a", "b"], [], AUDIENCE.upper(), [[AUDIENCE]], {AUDIENCE: 1}]
)
def test_a_token_for_another_audience_is_refused(audience: Any) -> None:
    def forge(issuer: FakeIssuer) -> str:
        # PyJWT refuses to make some of these: they are signed as they are
        return jwt.PyJWS().encode(
            json.dumps(claims(aud=audience)).encode(), rsa_key("k1"), algorithm="RS256", headers={"kid": "k1"}
        )

    check_refused(forge, AuthFailure.AUDIENCE)


@pytest.mark.parametrize("issuer", [None, "", "https://login.example/realms/ai/", "https://LOGIN.example/realms/ai"])
def test_a_token_of_another_issuer_is_refused(issuer: str | None) -> None:
    check_refused(lambda fake: fake.token(iss=issuer), AuthFailure.ISSUER)


def test_a_token_of_a_stranger_s_key_under_a_known_id_is_refused() -> None:
    check_refused(lambda issuer: issuer.token("k1", signed_by="stranger"), AuthFailure.SIGNATURE)


def test_changed_claims_are_refused() -> None:
    def forge(issuer: FakeIssuer) -> bytes:
        header, _, signature = issuer.token().encode().split(b".")
        return b".".join([header, encoded(claims(roles=["operators"])), signature])

    check_refused(forge, AuthFailure.SIGNATURE)


# 7. the JWKS is away


def test_while_the_jwks_is_away_known_keys_are_served_and_others_get_503() -> None:
    async def scenario(door: Door) -> None:
        door.issuer.is_away = True
        error = await door.refused(door.issuer.token("k2"))
        assert (error.status, error.code) == (503, "no_jwks")
        assert error.retry_after_s is not None
        assert door.issuer.reads == 2

    check(scenario)


def test_a_router_without_a_jwks_lets_nobody_in_but_keys() -> None:
    async def scenario() -> None:
        door = Door()
        door.issuer.is_away = True
        for _ in range(3):
            with pytest.raises(IssuerAway):
                await door.looking(door.issuer.token())
        assert door.issuer.reads == 1
        assert door.at_once(KEY).tenant == "people"
        door.issuer.is_away = False
        door.now += follower.UNKNOWN_S
        assert (await door.looking(door.issuer.token())).tenant == "research"

    asyncio.run(scenario())


# 8. a rotated key


def test_a_new_key_is_known_after_one_reading_and_the_old_one_is_gone() -> None:
    async def scenario(door: Door) -> None:
        door.issuer.published = [jwk("k2", rsa_key("k2"))]
        assert (await door.looking(door.issuer.token("k2"))).tenant == "research"
        assert door.issuer.reads == 2
        door.at_once(door.issuer.token("k2"))
        with pytest.raises(Unauthorized) as caught:
            await door.looking(door.issuer.token("k1"))
        assert caught.value.failure is AuthFailure.UNKNOWN_KEY_ID

    check(scenario)


# 9. sizes


@pytest.mark.parametrize("size", [16 * 1024 + 1, 2**20])
def test_a_token_of_a_megabyte_is_refused_unread(size: int) -> None:
    check_refused(lambda issuer: issuer.token().encode() + b"x" * size, AuthFailure.MALFORMED)


@pytest.mark.parametrize("header", [b'{"a":"' + b"x" * 5000 + b'"}', b'{"a":' + b"[" * 4000 + b"]" * 4000 + b"}"])
def test_a_large_or_deep_header_within_a_token_is_refused(header: bytes) -> None:
    check_refused(
        lambda issuer: encoded(header) + b"." + issuer.token().encode().partition(b".")[2], AuthFailure.MALFORMED
    )


# 10. key ids


def test_two_key_ids_in_one_header_are_refused() -> None:
    header = b'{"alg":"RS256","kid":"unknown","kid":"k1"}'
    check_refused(
        lambda issuer: encoded(header) + b"." + issuer.token().encode().partition(b".")[2], AuthFailure.MALFORMED
    )


@pytest.mark.parametrize("key_id", ["", "k" * 257, None, 1, ["k1"], {"k1": 1}])
def test_a_key_id_of_a_wrong_form_is_refused_without_a_reading(key_id: Any) -> None:
    async def scenario(door: Door) -> None:
        error = await door.refused(with_header(door.issuer.token(), alg="RS256", kid=key_id))
        assert isinstance(error, Unauthorized)
        assert error.failure is AuthFailure.UNKNOWN_KEY_ID
        assert door.issuer.reads == 1

    check(scenario)


def test_a_token_without_a_key_id_is_refused() -> None:
    check_refused(lambda issuer: issuer.token(None), AuthFailure.UNKNOWN_KEY_ID)


def test_a_key_id_that_the_issuer_does_not_have_is_refused() -> None:
    check_refused(lambda issuer: issuer.token("unknown", signed_by="stranger"), AuthFailure.UNKNOWN_KEY_ID)


def test_of_two_keys_with_one_id_none_is_used() -> None:
    async def scenario(door: Door) -> None:
        door.issuer.published += [jwk("two", rsa_key("k2")), jwk("two", rsa_key("stranger"))]
        for name in ("k2", "stranger"):
            error = await door.refused(door.issuer.token("two", signed_by=name))
            assert error.status == 401

    check(scenario)


# 11., 12. headers that name extensions or other keys


@pytest.mark.parametrize("critical", [["exp"], ["b64"], [], "exp", None])
def test_a_critical_extension_is_refused_with_a_right_signature(critical: Any) -> None:
    def forge(issuer: FakeIssuer) -> bytes:
        signed = encoded({"alg": "RS256", "kid": "k1", "crit": critical, "b64": True}) + b"." + encoded(claims())
        return (
            signed
            + b"."
            + encoded(jwt.algorithms.RSAAlgorithm(jwt.algorithms.RSAAlgorithm.SHA256).sign(signed, rsa_key("k1")))
        )

    check_refused(forge, AuthFailure.MALFORMED)


@pytest.mark.parametrize("key_id", ["k1", "stranger"])
@pytest.mark.parametrize("name", ["jku", "x5u", "jwk", "x5c"])
def test_a_key_that_the_token_itself_names_is_not_used(name: str, key_id: str) -> None:
    own = {"jku": FAR, "x5u": FAR, "jwk": jwk(key_id, rsa_key("stranger")), "x5c": ["MIIB"]}
    failure = AuthFailure.SIGNATURE if key_id == "k1" else AuthFailure.UNKNOWN_KEY_ID
    check_refused(lambda issuer: issuer.token(key_id, signed_by="stranger", header={name: own[name]}), failure)


# 13. encrypted


def test_an_encrypted_token_is_refused() -> None:
    header = {"alg": "RSA-OAEP", "enc": "A256GCM", "kid": "k1"}
    check_refused(lambda _: b".".join([encoded(header), *[encoded(b"x" * 32)] * 4]), AuthFailure.MALFORMED)


def test_a_token_in_a_token_is_refused() -> None:
    def forge(issuer: FakeIssuer) -> str:
        return jwt.PyJWS().encode(
            issuer.token().encode(), rsa_key("k1"), algorithm="RS256", headers={"kid": "k1", "cty": "JWT"}
        )

    check_refused(forge, AuthFailure.MALFORMED)


# 14., 15. claims of wrong types


@pytest.mark.parametrize(
    "subject", [None, 1, True, ["alice"], {"name": "alice"}, "", "a b", "a\n", "é", "x" * 256, "a\0"]
)
def test_a_subject_that_is_no_name_is_refused(subject: Any) -> None:
    def forge(_: FakeIssuer) -> str:
        return jwt.PyJWS().encode(
            json.dumps(claims() | {"sub": subject}).encode(), rsa_key("k1"), algorithm="RS256", headers={"kid": "k1"}
        )

    check_refused(forge, AuthFailure.CLAIM)


@pytest.mark.parametrize(
    "wrong",
    [
        {"roles": "operators"},
        {"roles": {"operators": True}},
        {"roles": True},
        {"roles": ["operators", 1]},
        {"roles": [["operators"]]},
        {"llm": {"class": 3, "models": ["m"]}},
        {"llm": {"class": "CRITICAL", "models": ["m"]}},
        {"llm": {"class": ["critical"], "models": ["m"]}},
        {"llm": {"class": "high"}},
        {"llm": {"class": "high", "models": None}},
        {"llm": {"class": "high", "models": "m"}},
        {"llm": {"class": "high", "models": {"m": 1}}},
        {"llm": {"class": "high", "models": [None]}},
        {"llm": {"class": "high", "models": ["m"] * 1025}},
        {"llm": ["class", "models"]},
        {"llm": None},
        {"exp": "9999999999"},
        {"exp": True},
        {"exp": 1e300},
        {"exp": 10**20},
        {"nbf": "0"},
        {"iat": [0]},
    ],
)
def test_a_claim_of_a_wrong_type_gives_nothing_and_refuses_the_token(wrong: dict[str, Any]) -> None:
    def forge(_: FakeIssuer) -> str:
        return jwt.PyJWS().encode(
            json.dumps(claims(**wrong)).encode(), rsa_key("k1"), algorithm="RS256", headers={"kid": "k1"}
        )

    check_refused(forge, AuthFailure.CLAIM)


@pytest.mark.parametrize("text", [b"[]", b'"alice"', b"null", b"{", b"", b"\xff", b"[" * 9000])
def test_claims_that_are_no_object_are_refused(text: bytes) -> None:
    def forge(_: FakeIssuer) -> str:
        return jwt.PyJWS().encode(text, rsa_key("k1"), algorithm="RS256", headers={"kid": "k1"})

    check_refused(forge, AuthFailure.MALFORMED)


def test_roles_of_others_give_no_right() -> None:
    async def scenario(door: Door) -> None:
        found = door.at_once(door.issuer.token(roles=["Operators", "operators ", "admin", "deploy", ""]))
        assert (found.admin, found.metrics, found.deploy) == (False, False, False)
        assert door.at_once(door.issuer.token(roles=["operators"])).admin

    check(scenario)


def test_a_class_and_models_above_the_settings_are_cut_to_them() -> None:
    bounded = SETTINGS.model_copy(update={"max_class": "normal", "models": ("m",)})

    async def scenario(door: Door) -> None:
        found = door.at_once(door.issuer.token(llm={"class": "critical", "models": ["m", "secret"]}))
        assert (found.max_class, found.models) == (RequestClass.NORMAL, {"m"})

    check(scenario, bounded)


# 16. tenants


@pytest.mark.parametrize(
    "tenant",
    [
        None,
        "",
        1,
        True,
        ["research"],
        {"a": 1},
        "other",
        "Other",
        "a b",
        "a/b",
        "../x",
        ".x",
        "a\n",
        "a\0model",
        "é",
        "\u202eabc",
        'a"b',
        "a{b}",
        "x" * 65,
    ],
)
def test_a_tenant_of_odd_characters_or_a_reserved_name_is_refused(tenant: Any) -> None:
    check_refused(lambda issuer: issuer.token(team=tenant), AuthFailure.CLAIM)


# 17. the wrong header


@pytest.mark.parametrize("header", [b"x-api-key", b"api-key"])
def test_a_token_in_a_key_s_header_is_refused_with_the_right_one(header: bytes) -> None:
    async def scenario(door: Door) -> None:
        error = await door.refused(door.issuer.token(), header)
        assert isinstance(error, Unauthorized)
        assert error.failure is AuthFailure.WRONG_HEADER
        assert "Authorization: Bearer" in error.message

    check(scenario)


# 18. weak keys


@pytest.mark.filterwarnings("ignore::jwt.InsecureKeyLengthWarning")  # of the forger's own library
@pytest.mark.parametrize("bits", [1024, 2047])
def test_a_weak_rsa_key_of_the_issuer_is_not_used(bits: int) -> None:
    async def scenario(door: Door) -> None:
        weak = rsa_key(f"weak-{bits}", bits)
        door.issuer.published.append(jwk("weak", weak))
        token = jwt.encode(claims(), weak, algorithm="RS256", headers={"kid": "weak"})
        assert (await door.refused(token)).status == 401

    check(scenario)


def test_a_key_that_the_issuer_has_published_with_its_secret_is_not_used() -> None:
    async def scenario(door: Door) -> None:
        secret = jwt.algorithms.RSAAlgorithm.to_jwk(rsa_key("leaked"), as_dict=True)
        door.issuer.published.append({**secret, "kid": "leaked"})
        assert (await door.refused(door.issuer.token("leaked"))).status == 401

    check(scenario)


# 19. an oversized JWKS


@pytest.mark.parametrize(
    "text",
    [
        b" " * MAX_JWKS_BYTES + b'{"keys": []}',
        json.dumps({"keys": [jwk("k2", rsa_key("k2"))] * (MAX_KEYS + 1)}).encode(),
        b"[" * 200_000,
        b'{"keys": {}}',
        b'{"keys": []}',
        b"<html>maintenance</html>",
    ],
)
def test_a_jwks_that_cannot_be_used_changes_no_key(text: bytes) -> None:
    async def scenario(door: Door) -> None:
        door.issuer.text = text
        error = await door.refused(door.issuer.token("k2"))
        assert (error.status, error.code) == (503, "no_jwks")

    check(scenario)


# 20. a flood of unknown key ids


def test_a_flood_of_unknown_key_ids_reads_once_in_30_s_and_known_ids_never_wait() -> None:
    async def scenario(door: Door) -> None:
        door.issuer.gate = asyncio.Event()
        floods = [asyncio.ensure_future(door.looking(door.issuer.token(f"u{n}", signed_by="k1"))) for n in range(50)]
        for _ in range(5):
            await asyncio.sleep(0)
            door.at_once(door.issuer.token())  # while the reading hangs and 50 requests wait for it
        assert door.issuer.reads == 2
        door.issuer.gate.set()
        errors = await asyncio.gather(*floods, return_exceptions=True)
        assert {type(error) for error in errors} == {Unauthorized}
        for number in range(50):
            door.now += follower.UNKNOWN_S / 50 - 0.01
            assert (await door.refused(door.issuer.token(f"v{number}", signed_by="k1"))).status == 401
        assert door.issuer.reads == 2
        door.now += 1.0
        await door.refused(door.issuer.token("w", signed_by="k1"))
        assert door.issuer.reads == 3

    check(scenario)


def test_a_jwks_that_hangs_holds_an_unknown_key_id_for_two_seconds_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(door: Door) -> None:
        monkeypatch.setattr(follower, "WAIT_S", 0.0)
        door.issuer.gate = asyncio.Event()  # is never set
        error = await door.refused(door.issuer.token("k2"))
        assert (error.status, error.code) == (503, "no_jwks")

    check(scenario)


def test_more_requests_than_may_wait_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "MAX_WAITING", 1)

    async def scenario(door: Door) -> None:
        door.issuer.gate = asyncio.Event()
        first = asyncio.ensure_future(door.looking(door.issuer.token("k2")))
        await asyncio.sleep(0)
        assert (await door.refused(door.issuer.token("k3", signed_by="k1"))).status == 503
        assert not first.done()
        door.issuer.published.append(jwk("k2", rsa_key("k2")))
        door.issuer.gate.set()
        assert (await first).tenant == "research"

    check(scenario)


def test_a_key_with_the_form_of_a_token_stays_a_key() -> None:
    key = "eyJhbGciOiJub25lIn0.e30."
    auth = AuthSettings(
        keys=(KeySettings(key_sha256=hashlib.sha256(key.encode()).hexdigest(), tenant="old"),), jwt=SETTINGS
    )
    ring = KeyRing(auth, no_keys(), follower=JwksFollower())
    assert ring.identify({b"x-api-key": key.encode()}).tenant == "old"


def test_without_the_setting_a_token_is_an_unknown_key() -> None:
    ring = KeyRing(AuthSettings(keys=(KeySettings(key=KEY),)), no_keys(), follower=JwksFollower())
    with pytest.raises(Unauthorized) as caught:
        ring.identify({b"authorization": b"Bearer " + FakeIssuer().token().encode()})
    assert (caught.value.code, caught.value.failure) == ("invalid_api_key", AuthFailure.UNKNOWN_KEY)
