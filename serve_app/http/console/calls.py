"""What can be asked below `/console`, and where the console's cookie counts."""

from __future__ import annotations

import enum
import re

_BELOW = re.compile(r"^/+console(/|$)")
# What the console's page asks. The metrics and the paths of other APIs are for programs, which have keys.
_WITH_COOKIE = re.compile(r"^/+(admin|v1|console)(/|$)")


class ConsoleCall(enum.StrEnum):
    """Calls of the console."""

    FILE = "file"
    LOGIN = "login"
    LOGOUT = "logout"
    LOGGED_IN = "logged_in"
    LIVE = "live"


OPEN_CALLS = frozenset({ConsoleCall.FILE, ConsoleCall.LOGIN, ConsoleCall.LOGOUT})  # without a key


def is_of_console(path: str) -> bool:
    """Whether a path is `/console` or below it."""
    return _BELOW.match(path) is not None


def takes_cookie(path: str) -> bool:
    """Whether the console's cookie identifies a caller at this path."""
    return _WITH_COOKIE.match(path) is not None
