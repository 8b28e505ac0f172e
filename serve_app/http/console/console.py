"""The console's calls, and who a request with its cookie is of.

    GET    /console/           the page; `/console` leads there, and /console/NAME is a file of it
    POST   /console/session    {"key"} -> 204 with the cookie
    GET    /console/session    who is logged in
    DELETE /console/session    takes the cookie away
    GET    /console/live       what happens now, as events

Invariant: the files are the same for everybody and hold nothing secret; all else needs a key, or a cookie that was made
with one. A request with a key of its own is never identified by the cookie.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from serve_app.errors import AuthFailure, Forbidden, Unauthorized
from serve_app.http.body import BodyThread, HeaderMap, Receive, read_object
from serve_app.http.console.calls import ConsoleCall, takes_cookie
from serve_app.http.console.live_stream import LiveStream
from serve_app.http.console.live_watch import LiveSources, LiveWatch
from serve_app.http.console.login_cookie import LoginCookies, cleared
from serve_app.http.console.page_files import INDEX, NO_COPY, SECURE_HEADERS, PageFiles, redirect
from serve_app.http.console.same_origin import check_origin, check_same_origin, is_from_browser
from serve_app.http.error_responses import JSON, Answer
from serve_app.http.keys import KeyRing, RowOwner, sends_key
from serve_app.http.response import HttpExchange
from serve_app.settings import Settings
from serve_app.types import Identity, RequestClass

MAX_KEY_CHARS = 16 * 1024  # of a token; keys have some 50


class Console:
    """Answers the calls.

    Args:
        secret: of all routers.
        keys, settings: those that hold now.
    """

    def __init__(
        self,
        secret: bytes,
        sources: LiveSources,
        keys: Callable[[], KeyRing],
        settings: Callable[[], Settings],
        body_thread: BodyThread,
    ) -> None:
        self._cookies = LoginCookies(secret)
        self.watch = LiveWatch(sources)
        self._keys = keys
        self._settings = settings
        self._body_thread = body_thread
        self._files = PageFiles()

    def identify(self, method: str, path: str, headers: HeaderMap, row: RowOwner | None = None) -> Identity:
        """Whose a request is: by its key, else by the console's cookie.

        Raises:
            Forbidden: a request with the cookie comes from another page (`csrf`). Unauthorized, StoreAway: see
            `KeyRing.identify`.
        """
        keys = self._keys()
        is_allowed = self._settings().http.console and takes_cookie(path) and not sends_key(headers)
        if row is None and is_allowed and b"cookie" in headers:
            login = self._cookies.read(headers[b"cookie"])
            if login is not None:
                identity = keys.identify_login(login.key_id, functools.partial(self._cookies.is_of, login))
                check_same_origin(method, headers)
                return identity
        return keys.identify(headers, row)

    async def answer_open(
        self, call: ConsoleCall, path: str, name: str, headers: HeaderMap, receive: Receive
    ) -> Answer:
        """The answer of a call that needs no key. `name`: of a file.

        Raises:
            Unauthorized: a wrong key. Forbidden: `csrf`, or a key that reads metrics alone. NotFound: no such file.
        """
        if call is ConsoleCall.LOGIN:
            return await self._log_in(headers, receive)
        if call is ConsoleCall.LOGOUT:
            check_same_origin("DELETE", headers)
            return 204, [*NO_COPY, *SECURE_HEADERS, cleared()], b""
        if not name and not path.endswith("/"):
            return redirect()
        return self._files.answer(name or INDEX, headers.get(b"if-none-match", b""))

    def logged_in(self, identity: Identity) -> Answer:
        """Who asks, and what the key may do."""
        classes = [one.label for one in sorted(RequestClass, reverse=True) if one <= identity.max_class]
        settings = self._settings()
        models = [model.name for model in settings.models if identity.may_use(model.name)]
        found: dict[str, Any] = {
            "name": self._keys().name_of(identity),
            "tenant": identity.tenant,
            "admin": identity.admin,
            "classes": classes,
            "models": models,
            "names": [route.name for route in settings.routes if identity.may_use(route.name)],
        }
        return 200, [*JSON, *NO_COPY, *SECURE_HEADERS], msgspec.json.encode(found)

    async def stream_live(self, identify: Callable[[], Identity], exchange: HttpExchange) -> None:
        """Send what happens now. Raises Unavailable: too many consoles watch."""
        await LiveStream(self.watch, identify, lambda identity: self._keys().name_of(identity)).run(exchange)

    async def _log_in(self, headers: Mapping[bytes, bytes], receive: Receive) -> Answer:
        if is_from_browser(headers):
            check_origin(headers)  # else a page could log a person in with a key of its own
        settings = self._settings()
        body, _ = await read_object(headers, receive, settings.http, self._body_thread)
        key = body.get("key")
        if not isinstance(key, str) or not 0 < len(key) <= MAX_KEY_CHARS:
            raise Unauthorized('no API key was sent: the body must be {"key": "sk-..."}', failure=AuthFailure.MISSING)
        secret = key.strip().encode()
        keys = self._keys()
        login = await keys.settled(lambda: keys.log_in(secret))
        identity = login.identity
        if identity.reads_metrics_alone:
            raise Forbidden("this key reads metrics alone", code="model_not_allowed")
        if identity.is_token and not identity.admin:
            raise Forbidden("a token opens the console only with the right `admin` (auth.jwt.roles.admin)")
        is_secure = settings.http.tls is not None or headers.get(b"origin", b"").startswith(b"https:")
        cookie = self._cookies.header(login.name, login.digest, is_secure=is_secure, ends_at=login.ends_at)
        return 204, [*NO_COPY, *SECURE_HEADERS, cookie], b""
