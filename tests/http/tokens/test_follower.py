"""How a router follows the keys of an issuer: when it reads them, what it forgets, and what it logs."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from serve_app.errors import IssuerAway, Unauthorized
from serve_app.http.tokens import JwksFollower, follower
from serve_app.settings import JwtSettings
from tests.fakes.token_issuer import JWKS_URL, SETTINGS, FakeIssuer, jwk, rsa_key
from tests.fakes.virtual_time import virtual_runner


class Following:
    """A follower that runs, in virtual time."""

    def __init__(self) -> None:
        self.issuer = FakeIssuer()
        self.follower = JwksFollower(self.issuer.read, lambda: asyncio.get_running_loop().time())

    def knows(self, key_id: str) -> bool:
        try:
            return bool(self.follower.find(key_id))
        except (IssuerAway, Unauthorized):
            return False


async def passing(span_s: float) -> None:
    await asyncio.sleep(span_s)  # of virtual time


def check(scenario: Callable[[Following], Awaitable[None]], settings: JwtSettings | None = SETTINGS) -> None:
    async def with_follower() -> None:
        following = Following()
        following.follower.configure(settings)
        running = asyncio.ensure_future(following.follower.run())
        await passing(1.0)
        await scenario(following)
        running.cancel()

    with virtual_runner() as runner:
        runner.run(with_follower())


def test_the_keys_are_read_at_the_start_and_again_every_five_minutes() -> None:
    async def scenario(following: Following) -> None:
        assert following.knows("k1")
        assert following.issuer.reads == 1
        following.issuer.published = [jwk("k2", rsa_key("k2"))]
        await passing(follower.REFRESH_S)
        assert following.issuer.reads == 2
        assert following.knows("k2")
        assert not following.knows("k1")

    check(scenario)


def test_an_issuer_that_is_away_is_asked_every_ten_seconds_and_its_keys_stay(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(following: Following) -> None:
        following.issuer.is_away = True
        await passing(follower.REFRESH_S)
        assert following.issuer.reads == 2
        await passing(3 * follower.RETRY_S)
        assert following.issuer.reads == 5
        assert following.knows("k1")
        age_s = following.follower.age_s
        assert age_s is not None
        assert age_s > follower.REFRESH_S
        following.issuer.is_away = False
        await passing(follower.RETRY_S)
        assert following.follower.age_s is not None
        assert following.follower.age_s < follower.RETRY_S

    with caplog.at_level(logging.INFO, "ray.serve"):
        check(scenario)
    texts = [record.message for record in caplog.records]
    assert sum("could not be read" in text for text in texts) == 1, "once, not at every attempt"
    assert sum("was read" in text for text in texts) == 2


def test_without_an_issuer_nothing_is_read_until_there_is_one() -> None:
    async def scenario(following: Following) -> None:
        await passing(10 * follower.REFRESH_S)
        assert following.issuer.reads == 0
        assert following.follower.age_s is None
        await following.follower.wait()
        assert following.issuer.reads == 0
        following.follower.configure(SETTINGS)
        await passing(1.0)
        assert following.knows("k1")

    check(scenario, settings=None)


def test_another_address_forgets_the_keys_at_once_and_another_mapping_does_not() -> None:
    async def scenario(following: Following) -> None:
        following.follower.configure(SETTINGS.model_copy(update={"leeway_s": 1.0}))
        assert following.knows("k1")
        following.issuer.gate = asyncio.Event()
        following.follower.configure(SETTINGS.model_copy(update={"algorithms": ("ES256",)}))
        assert not following.knows("k1")
        following.issuer.gate.set()
        await passing(1.0)
        assert following.knows("e1")
        assert not following.knows("k1")
        following.follower.configure(None)
        assert not following.knows("e1")

    check(scenario)


def test_a_key_that_is_not_used_is_logged_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(following: Following) -> None:
        following.issuer.published.append({"kid": "odd", "kty": "oct", "k": "c2VjcmV0"})
        await passing(follower.REFRESH_S)
        following.issuer.published.append(jwk("k2", rsa_key("k2")))
        await passing(follower.REFRESH_S)

    with caplog.at_level(logging.WARNING, "ray.serve"):
        check(scenario)
    assert [record.message for record in caplog.records] == [
        "JWKS of https://login.example/realms/ai has a key that is not used: odd: it is secret, and has to be replaced "
        "at the issuer"
    ]


# The real sources


class Answers:
    """What a server of one answer sends, and how often it was asked."""

    def __init__(self, *parts: bytes) -> None:
        self.parts = parts
        self.asked = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked += 1
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"accept-encoding: identity" in head.lower()
        try:
            for part in self.parts:
                writer.write(part)
                await writer.drain()
        except ConnectionError:  # the client has seen enough
            return
        finally:
            writer.close()


def jwks(**more: str) -> bytes:
    return json.dumps({"keys": [jwk("k1", rsa_key("k1"))], **more}).encode()


def http(status: str, body: bytes, *headers: str) -> bytes:
    head = "".join(f"{line}\r\n" for line in (f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers))
    return f"{head}\r\n".encode() + body


def read_over_http(answers: Answers) -> JwksFollower:
    """A follower that has asked once."""

    async def ask() -> JwksFollower:
        server = await asyncio.start_server(answers.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        found = JwksFollower()
        found.configure(SETTINGS.model_copy(update={"jwks_url": f"http://127.0.0.1:{port}/keys"}))
        await found.wait()
        server.close()
        return found

    return asyncio.run(ask())


def test_keys_are_read_from_an_address() -> None:
    answers = Answers(http("200 OK", jwks()))
    assert read_over_http(answers).find("k1").algorithms == {"RS256"}
    assert answers.asked == 1


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([http("503 Unavailable", b"")], "HTTP status 503"),
        ([http("302 Found", b"", f"Location: {JWKS_URL}")], "HTTP status 302"),
        ([http("200 OK", b"x", "Content-Encoding: gzip")], "compressed"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n", *[b" " * 65536] * 8], "larger than"),
        ([b"nonsense\r\n\r\n"], "Error"),
        ([http("200 OK", b"<html>")], "no JSON"),
    ],
)
def test_another_answer_gives_no_key_and_a_reason(
    parts: list[bytes], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    answers = Answers(*parts)
    with caplog.at_level(logging.WARNING, "ray.serve"):
        found = read_over_http(answers)
    assert answers.asked == 1, "no redirect is followed"
    with pytest.raises(IssuerAway):
        found.find("k1")
    assert reason in caplog.text


def in_file(path: Path) -> JwksFollower:
    async def ask() -> JwksFollower:
        found = JwksFollower()
        found.configure(SETTINGS.model_copy(update={"jwks_url": None, "jwks_file": str(path)}))
        await found.wait()
        return found

    return asyncio.run(ask())


def test_keys_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    path.write_bytes(jwks())
    assert in_file(path).find("k1").algorithms == {"RS256"}


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "large"])
def test_another_file_gives_no_key_and_does_not_hang(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "large":
        path.write_bytes(b" " * 2**20 + jwks())
    with pytest.raises(IssuerAway):
        in_file(path).find("k1")
