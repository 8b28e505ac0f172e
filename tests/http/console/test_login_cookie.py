"""The cookie of a login: what is in it, what it is good for, and that nobody else can make one."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serve_app.http.console.login_cookie import COOKIE, LOGIN_S, LoginCookies, cleared

SECRET = b"s" * 32
DIGEST = hashlib.sha256(b"sk-alice-0123456789").digest()


class Clock:
    """Seconds since 1970, as the test sets them."""

    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def cookie_of(header: tuple[bytes, bytes]) -> bytes:
    """What a browser sends back."""
    return header[1].split(b";")[0]


@given(st.text(min_size=1, max_size=64).filter(lambda text: text.isprintable()))
@example('a;b=c.d e"')
def test_a_login_names_its_key_and_fits_the_digest_of_that_key_alone(key_id: str) -> None:
    cookies = LoginCookies(SECRET, Clock())
    login = cookies.read(cookie_of(cookies.header(key_id, DIGEST, is_secure=False)))
    assert login is not None
    assert login.key_id == key_id
    assert cookies.is_of(login, DIGEST)
    assert not cookies.is_of(login, hashlib.sha256(b"another").digest())


def test_a_login_is_over_after_half_a_day() -> None:
    clock = Clock()
    cookies = LoginCookies(SECRET, clock)
    cookie = cookie_of(cookies.header("desk", DIGEST, is_secure=False))
    clock.now += LOGIN_S - 1
    assert cookies.read(cookie) is not None
    clock.now += 1
    assert cookies.read(cookie) is None


def test_another_router_reads_it_and_another_deployment_does_not() -> None:
    cookie = cookie_of(LoginCookies(SECRET).header("desk", DIGEST, is_secure=False))
    here = LoginCookies(SECRET)
    login = here.read(cookie)
    assert login is not None
    assert here.is_of(login, DIGEST)
    elsewhere = LoginCookies(b"t" * 32)
    read = elsewhere.read(cookie)
    assert read is not None
    assert not elsewhere.is_of(read, DIGEST)


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_changed_byte_makes_it_worthless(place: int, byte: int) -> None:
    cookies = LoginCookies(SECRET, Clock())
    cookie = cookie_of(cookies.header("desk", DIGEST, is_secure=False))
    place = len(COOKIE) + 1 + place % (len(cookie) - len(COOKIE) - 1)
    changed = cookie[:place] + bytes([byte]) + cookie[place + 1 :]
    login = cookies.read(changed)
    if changed != cookie and login is not None:
        same = login == cookies.read(cookie)  # the last character of base64 has bits that say nothing
        assert same or not cookies.is_of(login, DIGEST)


@given(st.binary(max_size=200))
@example(b"1.2.3")
@example(b"1.9999999999.\xff.\xff")
@example(b"1.9999999999..")
def test_whatever_a_browser_sends_is_read_or_not_and_raises_nothing(value: bytes) -> None:
    cookies = LoginCookies(SECRET, Clock())
    login = cookies.read(COOKIE + b"=" + value)
    assert login is None or not cookies.is_of(login, DIGEST)


def test_among_other_cookies_it_is_found_and_two_of_them_are_none() -> None:
    cookies = LoginCookies(SECRET)
    cookie = cookie_of(cookies.header("desk", DIGEST, is_secure=False))
    assert cookies.read(b"a=b; " + cookie + b"; c=" + COOKIE) is not None
    assert cookies.read(cookie + b"; " + cookie) is None, "a page of a sibling host can set a second one"
    assert cookies.read(b"") is None


@pytest.mark.parametrize("is_secure", [False, True])
def test_no_script_reads_it_and_no_other_site_sends_it(is_secure: bool) -> None:
    name, value = LoginCookies(SECRET).header("desk", DIGEST, is_secure=is_secure)
    assert name == b"set-cookie"
    assert value.split(b"; ")[1:] == [
        b"Path=/",
        b"Max-Age=43200",
        b"HttpOnly",
        b"SameSite=Strict",
        *([b"Secure"] if is_secure else []),
    ]
    assert b"Max-Age=0" in cleared()[1]


def test_neither_the_key_nor_its_digest_is_in_it() -> None:
    value = LoginCookies(SECRET).header("desk", DIGEST, is_secure=True)[1]
    assert DIGEST.hex().encode() not in value
    assert DIGEST not in value
