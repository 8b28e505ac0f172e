"""Which replica a request would rather have, and why: what goes into that choice and what comes out."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from serve_app.core.routing.bounded_ring import Route


class Why(enum.StrEnum):
    """Why a request runs where it runs; a label of the metrics."""

    SESSION = "session"
    PREFIX = "prefix"
    PROBE = "probe"  # the replica had failed, and this request shows whether it is well again
    MOST_FREE = "most_free"  # the line's own choice: no key, or no room where it would rather have been


@dataclass(frozen=True, slots=True)
class Key:
    """Requests of one key belong together. `text` has the tenant: caches are salted, none finds another's prefix."""

    text: str
    why: Why


@dataclass(frozen=True, slots=True)
class Aim:
    """The replica a request would rather have. `route`: how it was found; None: it was not looked for."""

    replica_id: str
    why: Why
    route: Route | None = None
