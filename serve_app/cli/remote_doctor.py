"""`serve-app doctor --url`: what is wrong with an endpoint, as far as it can be seen by HTTP, each with a remedy.

Invariant: nothing is changed; where the endpoint does not answer, the checks behind it are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from serve_app.cli.endpoint import CONNECT_S, Endpoint, request, session
from serve_app.cli.operators import ANSWER_S, fetch_soon
from serve_app.errors import Forbidden, ServeAppError, Unauthorized
from serve_app.names import RELEASE
from serve_app.system import Check

CLOCK_S = 5.0  # by which two clocks may differ: expiry of keys and tickets are judged by the endpoint's
UNSEEN = "this key is not an operator's: application, memory and store stay unseen"
OPERATOR = "an operator's key sees more: give one with --key"

Now = Callable[[], datetime]


def checks(endpoint: Endpoint, now: Now = lambda: datetime.now(UTC)) -> list[Check]:
    """All checks of an endpoint."""
    try:
        with session(endpoint) as http:
            answer = request(http, endpoint, "GET", "/health", timeout=(CONNECT_S, ANSWER_S))
            received = now()
    except ServeAppError as error:
        return [Check("endpoint", "fail", error.message, "check --url, the network and `serve-app status` there")]
    found = [Check("endpoint", "ok", f"{endpoint.url} answers")]
    found += [_clock(answer.headers.get("Date"), received), _release(endpoint)]
    key = _key(endpoint)
    found.append(key)
    return found if key.state == "fail" else [*found, _ready(endpoint), *_of_operators(endpoint)]


def _clock(sent: str | None, received: datetime) -> Check:
    if sent is None:
        return Check("clock", "ok", "the endpoint tells no time")
    ahead_s = (parsedate_to_datetime(sent) - received).total_seconds()
    if abs(ahead_s) <= CLOCK_S:
        return Check("clock", "ok", f"within {CLOCK_S:.0f} s of this machine's")
    where = "ahead of" if ahead_s > 0 else "behind"
    return Check("clock", "warn", f"{abs(ahead_s):.0f} s {where} this machine's", "synchronise both by NTP")


def _release(endpoint: Endpoint) -> Check:
    try:
        version = fetch_soon(endpoint, "GET", "/version")["version"]
    except ServeAppError as error:
        return Check("release", "warn", error.message, "upgrade the endpoint, or check its key")
    if version == RELEASE:
        return Check("release", "ok", f"{version} on both sides")
    return Check("release", "warn", f"{version} there, {RELEASE} here", "install the same release on both sides")


def _key(endpoint: Endpoint) -> Check:
    try:
        models = [card["id"] for card in fetch_soon(endpoint, "GET", "/v1/models")["data"]]
    except Unauthorized as error:
        return Check("key", "fail", error.message, "give a valid key with --key, SERVE_APP_API_KEY or a context")
    except ServeAppError as error:
        return Check("key", "warn", error.message, "a key that may use models sees more")
    return Check("key", "ok", f"is taken; models: {', '.join(models) or 'none'}")


def _ready(endpoint: Endpoint) -> Check:
    try:
        missing = fetch_soon(endpoint, "GET", "/ready")["without_replica"]
    except ServeAppError as error:
        return Check("models", "fail", error.message, "`serve-app status` says why")
    if missing:
        return Check("models", "warn", f"no replica runs of {', '.join(missing)}", "`serve-app status` says why")
    return Check("models", "ok", "each has a replica, or starts one on demand")


def _of_operators(endpoint: Endpoint) -> Iterator[Check]:
    """What only an operator's key may see."""
    asks: tuple[tuple[str, str, Callable[[Any], Check]], ...] = (
        ("application", "/admin/status", _application),
        ("quota actor", "/admin/quota", _quota),
        ("store", "/admin/audit?limit=1", lambda _: Check("store", "ok", "answers")),
    )
    for name, path, judge in asks:
        try:
            yield judge(fetch_soon(endpoint, "GET", path))
        except Forbidden:
            yield Check("operator", "warn", UNSEEN, OPERATOR)
            return
        except ServeAppError as error:
            yield Check(name, "fail", error.message, "`serve-app logs --since 10m --level warning` says more")


def _application(state: Any) -> Check:
    text = f"{state['state']}" + (f": {state['message']}" if state["message"] else "")
    is_well = state["state"] == "running"
    return Check("application", "ok" if is_well else "warn", text, "" if is_well else "`serve-app status` says more")


def _quota(figures: Any) -> Check:
    waiting = [str(one["replica"]) for one in figures["waiting"]]
    if waiting:
        text = f"answers; {len(waiting)} engines wait for memory"
        return Check("quota actor", "warn", text, "`serve-app quota`; `serve-app defrag --plan` may free some")
    return Check("quota actor", "ok", "answers; no engine waits for memory")
