"""Which requests with the console's cookie come from the console's own page. A browser adds the cookie to requests of
other pages, too, where `SameSite` does not hold: of another port or a sibling host.

Rules
- A browser that says where a request comes from (`Sec-Fetch-Site`) is believed: no script can set that header. So it
  holds behind a proxy, which may send another `Host` than the page has.
- Without that header, `Origin` must name the `Host` of the request.
- A request that changes something must have `Origin`, and `X-Serve-App-Console: 1`, which a form cannot send.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from serve_app.errors import Forbidden

READING = ("GET", "HEAD")
MARK = b"x-serve-app-console"
OWN_SITES = (b"same-origin", b"none")  # none: a person has typed the address
DEFAULT_PORTS = {"http": 80, "https": 443}


def check_same_origin(method: str, headers: Mapping[bytes, bytes]) -> None:
    """Raises Forbidden: the request may come from another page."""
    site = headers.get(b"sec-fetch-site")
    if site is not None and site not in OWN_SITES:
        raise _refusal("the request comes from a page of another origin")
    if method in READING:
        return
    if headers.get(MARK) != b"1":
        raise _refusal("with the console's cookie a request that changes something needs X-Serve-App-Console: 1")
    check_origin(headers)


def check_origin(headers: Mapping[bytes, bytes]) -> None:
    """Raises Forbidden: a request that changes something was not sent by a page of this endpoint."""
    site = headers.get(b"sec-fetch-site")
    origin = headers.get(b"origin")
    if origin is None:
        raise _refusal("a request that changes something needs the header Origin")
    if site is None and not _is_at(origin, headers.get(b"host", b"")):
        raise _refusal("the header Origin names another endpoint than Host")
    if site is not None and site != b"same-origin":
        raise _refusal("the request comes from a page of another origin")


def is_from_browser(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a browser has said from which page a request comes."""
    return b"origin" in headers or b"sec-fetch-site" in headers


def _is_at(origin: bytes, host: bytes) -> bool:
    """Whether an origin is that of this host; its default port may be left out on either side."""
    try:
        page = urlsplit(origin.decode("ascii"))
        default = DEFAULT_PORTS[page.scheme]
        here = urlsplit(f"//{host.decode('ascii')}")
        return (
            page.hostname is not None
            and page.hostname == here.hostname
            and (page.port or default) == (here.port or default)
        )
    except (KeyError, ValueError):
        return False


def _refusal(message: str) -> Forbidden:
    return Forbidden(message, code="csrf")
