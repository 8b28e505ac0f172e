"""The endpoint that a command asks by HTTP: its address, key and certificate, and its errors in plain words.

Invariant: a key goes to the endpoint that it was given for and to no other: no redirect is followed.
"""

from __future__ import annotations

import hashlib
import json
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter

from serve_app.errors import (
    DROPPED,
    NO_ROUTER,
    BadRequest,
    ConfigError,
    Forbidden,
    ServeAppError,
    Unauthorized,
    Unavailable,
)

CONNECT_S = 5.0  # the instance is on this machine or nearby
SILENCE_S = 300.0  # between two pieces: a long prompt in a full queue waits a minute, then prefills
LOCAL_NAMES = ("127.0.0.1", "localhost", "::1")
API_ROOT = "/v1"  # what OpenAI's clients have at the end of their base URL
NOT_ADMIN = "not_admin"  # the code of a 403 for a key that is not an operator's
UNKNOWN_URL = "unknown_url"  # the code of a 404 for a route that the release there does not have
CA_VARIABLE = "REQUESTS_CA_BUNDLE"  # of `requests`


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The URL of an endpoint and the key for it. `certificate`: the file of the one that this endpoint must show,
    whatever its name and whoever signed it; None: a trusted one of the URL's host."""

    url: str
    key: str | None
    certificate: str | None = None


def root_of(url: str) -> str:
    """The URL that all paths are below: without `/v1`, as OpenAI's clients have it, at its end.

    Raises:
        ConfigError: it is no URL of HTTP.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url}: give a URL such as http://HOST:8000", param="url")
    return url.rstrip("/").removesuffix(API_ROOT).rstrip("/")


def key_in(path: str | Path) -> str:
    """The key in a file. Raises ConfigError: it cannot be read."""
    try:
        return Path(path).expanduser().read_text().strip()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"{path}: the API key cannot be read: {why}; give one with --key") from None


class _PinnedAdapter(HTTPAdapter):
    """Connects only to a server with this certificate, whatever its name and whoever signed it."""

    def __init__(self, certificate: Path) -> None:
        first, end, _ = certificate.read_text().partition(ssl.PEM_FOOTER)  # the rest is its chain
        der = ssl.PEM_cert_to_DER_cert(first[first.index(ssl.PEM_HEADER) :] + end)
        self._fingerprint = hashlib.sha256(der).hexdigest()
        super().__init__()

    def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
        super().init_poolmanager(*arguments, assert_fingerprint=self._fingerprint, **options)


def session(endpoint: Endpoint) -> requests.Session:
    """A session that sends the key. For this machine it ignores the user's proxy and .netrc: the proxy does not reach
    this loopback, and .netrc would replace the key.

    Raises:
        ConfigError: the certificate cannot be read.
    """
    made = requests.Session()
    made.trust_env = urlsplit(endpoint.url).hostname not in LOCAL_NAMES
    if endpoint.certificate:
        try:
            made.mount("https://", _PinnedAdapter(Path(endpoint.certificate)))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{endpoint.certificate}: the certificate cannot be read: {error}") from None
        made.verify = False  # by its fingerprint instead, which a proxy's or the environment's settings would replace
        made.trust_env = False
    if endpoint.key:
        made.headers["Authorization"] = f"Bearer {endpoint.key}"
        made.auth = _KeptHeader()  # else .netrc of the user would replace it
    return made


class _KeptHeader(requests.auth.AuthBase):
    """Leaves the request's own header as it is."""

    def __call__(self, prepared: requests.PreparedRequest) -> requests.PreparedRequest:
        return prepared


def request(http: requests.Session, endpoint: Endpoint, method: str, path: str, **options: Any) -> requests.Response:
    """The answer, with a status of success.

    Raises:
        ServeAppError: refused or unreachable, with a message for the user: the server's own if there is one, when to
            retry, the remedy for a 401. `Unavailable` where a repeat can succeed; its code is `NO_ROUTER` without any
            answer. `Forbidden`: the key may not do that.
    """
    url = root_of(endpoint.url) + path
    options.setdefault("timeout", (CONNECT_S, SILENCE_S))
    try:
        response = http.request(method, url, allow_redirects=False, **options)
    except requests.exceptions.SSLError as error:
        raise ConfigError(_of_tls(endpoint, error), param="url") from None
    except requests.ConnectionError as error:
        raise Unavailable(_of_connection(endpoint, error), code=NO_ROUTER) from None
    except requests.exceptions.ChunkedEncodingError:
        raise Unavailable(f"the connection to {endpoint.url} broke", code=DROPPED) from None
    except requests.Timeout:
        within_s = options["timeout"][1]
        raise Unavailable(f"no answer from {endpoint.url} within {within_s:.0f} s", code=NO_ROUTER) from None
    except requests.RequestException as error:
        raise BadRequest(f"{url}: {error}", param="url") from None
    except OSError as error:  # of the file that CA_VARIABLE names
        raise ConfigError(str(error), param=CA_VARIABLE) from None
    if response.status_code in (200, 201, 202):
        return response
    raise _refusal(endpoint, response)


def _refusal(endpoint: Endpoint, response: requests.Response) -> ServeAppError:
    """The error of an answer that is none of a success."""
    status = response.status_code
    if response.is_redirect:
        return BadRequest(f"{endpoint.url} redirects to {response.headers['location']}: give that as --url")
    error = _openai_error(response.text)
    message = str(error.get("message") or response.reason or "no reason given")
    code = error.get("code")
    if status == 401:
        return Unauthorized(f"the key was refused ({message}); give the right one with --key")
    if status == 403 and code == NOT_ADMIN:
        return Forbidden(f"{message}; give an operator's key with --key", code=NOT_ADMIN)
    if status == 404 and code == UNKNOWN_URL:
        return BadRequest(f"{endpoint.url} runs a release without this route: {message}", code=UNKNOWN_URL)
    wait = response.headers.get("Retry-After")
    again = f"; try again in {wait} s" if wait else ""
    kind = Unavailable if status == 429 or status >= 500 else BadRequest
    return kind(f"{status}: {message}{again}", code=code if isinstance(code, str) else None)


def _of_tls(endpoint: Endpoint, error: requests.exceptions.SSLError) -> str:
    reasons = list(_causes(error))
    if any(isinstance(one, ssl.SSLCertVerificationError) for one in reasons):
        why = next(one.verify_message for one in reasons if isinstance(one, ssl.SSLCertVerificationError))
        return (
            f"the certificate of {endpoint.url} is not trusted ({why}): {CA_VARIABLE} names the file of its authority, "
            "`certificate` of a context the file of the certificate itself"
        )
    if "ingerprint" in str(error):
        return f"{endpoint.url} shows another certificate than {endpoint.certificate}"
    return f"{endpoint.url} does not speak TLS: is it http://?"


def _of_connection(endpoint: Endpoint, error: requests.ConnectionError) -> str:
    kinds = {type(one).__name__ for one in _causes(error)}  # by name: they are of the library below `requests`
    if "NameResolutionError" in kinds:
        return f"{urlsplit(endpoint.url).hostname}: there is no host of this name"
    if isinstance(error, requests.ConnectTimeout):
        return f"no connection to {endpoint.url} within {CONNECT_S:.0f} s; check its address, and firewalls between"
    if "NewConnectionError" in kinds:
        return f"nothing answers at {endpoint.url}; is the instance running? (serve-app status)"
    return f"nothing answers at {endpoint.url}: the connection ended without an answer; is it https://?"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what it was made of: `requests` and `urllib3` keep that in arguments and in `reason`."""
    ahead: list[BaseException] = [error]
    while ahead:
        found = ahead.pop()
        yield found
        inner = [*found.args, getattr(found, "reason", None), found.__cause__]
        ahead += [one for one in inner if isinstance(one, BaseException)]


def fetch(endpoint: Endpoint, method: str, path: str, **options: Any) -> Any:
    """The JSON value that one request is answered with. Raises as `request`."""
    with session(endpoint) as http:
        return request(http, endpoint, method, path, **options).json()


def error_message(text: str) -> str | None:
    """The message of an OpenAI error body; None if `text` is no such body."""
    message = _openai_error(text).get("message")
    return message if isinstance(message, str) else None


def _openai_error(text: str) -> dict[str, Any]:
    """The fields of an OpenAI error body; empty if `text` is no such body."""
    try:
        found = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}
