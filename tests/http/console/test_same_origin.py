"""Which requests with the cookie are the console's own: with and without what browsers say, and behind proxies."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.errors import Forbidden
from serve_app.http.console.same_origin import check_same_origin

HERE = {"host": "serve.example:8000", "origin": "http://serve.example:8000", "x-serve-app-console": "1"}
# nginx sends its own name of the endpoint; the browser says that page and endpoint are one
BEHIND_PROXY = HERE | {"host": "serve_app", "origin": "https://console.example", "sec-fetch-site": "same-origin"}


def is_allowed(method: str, headers: dict[str, Any]) -> bool:
    sent = {name.encode(): value.encode() for name, value in headers.items() if value is not None}
    try:
        check_same_origin(method, sent)
    except Forbidden:
        return False
    return True


def test_a_refusal_has_a_code_of_its_own() -> None:
    with pytest.raises(Forbidden) as caught:
        check_same_origin("POST", {b"host": b"serve.example"})
    assert (caught.value.status, caught.value.code) == (403, "csrf")


@pytest.mark.parametrize(
    "headers",
    [
        HERE,
        HERE | {"sec-fetch-site": "same-origin"},
        BEHIND_PROXY,
        HERE | {"host": "serve.example", "origin": "http://serve.example"},
        HERE | {"host": "serve.example", "origin": "https://serve.example:443"},
        HERE | {"host": "serve.example:80", "origin": "http://serve.example"},
        HERE | {"host": "SERVE.example:8000"},
        HERE | {"host": "[::1]:8000", "origin": "http://[::1]:8000"},
    ],
)
def test_the_console_s_own_page_may_change_things(headers: dict[str, str]) -> None:
    assert is_allowed("POST", headers)
    assert is_allowed("DELETE", headers)


@pytest.mark.parametrize(
    "headers",
    [
        HERE | {"x-serve-app-console": None},
        HERE | {"x-serve-app-console": "yes"},
        HERE | {"origin": None},
        HERE | {"origin": "null"},
        HERE | {"origin": "http://evil.example"},
        HERE | {"origin": "http://serve.example:9000"},
        HERE | {"origin": "https://serve.example"},
        HERE | {"origin": "http://serve.example:8000.evil.example"},
        HERE | {"origin": "http://evil.example:8000/serve.example:8000"},
        HERE | {"origin": "http://serve.example:99999"},
        HERE | {"origin": "ftp://serve.example:8000"},
        HERE | {"origin": "http://\xe9:8000"},
        HERE | {"host": None},
        HERE | {"host": "", "origin": "http://"},
        HERE | {"sec-fetch-site": "same-site"},
        HERE | {"sec-fetch-site": "cross-site"},
        HERE | {"sec-fetch-site": "none"},
        BEHIND_PROXY | {"sec-fetch-site": "cross-site"},
        BEHIND_PROXY | {"sec-fetch-site": None},
        BEHIND_PROXY | {"origin": None},
        BEHIND_PROXY | {"x-serve-app-console": None},
    ],
)
def test_nobody_else_may(headers: dict[str, str]) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        assert not is_allowed(method, headers)


def test_reading_needs_no_more_than_that_no_other_page_asks() -> None:
    for site in (None, "same-origin", "none"):
        assert is_allowed("GET", {"host": "serve.example", "sec-fetch-site": site})
    for site in ("same-site", "cross-site", "unheard-of"):
        assert not is_allowed("GET", {"host": "serve.example", "sec-fetch-site": site})
        assert not is_allowed("HEAD", {"host": "serve.example", "sec-fetch-site": site})
