"""Which events are asked for, and what nodes answer to a question about their records. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from serve_app.system import EventKind


class RecordAnswers(NamedTuple):
    """What nodes have answered. `missing`: the ids of those that have not."""

    found: list[Any]
    missing: list[str]


class EventHead(msgspec.Struct):
    """The fields of an event that a question looks at."""

    at: float
    kind: str


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Which events are wanted, the newest first.

    Args:
        kinds: empty: all but snapshots.
        since: seconds since 1970. limit: so many at most.
    """

    kinds: tuple[str, ...] = ()
    since: float = 0.0
    limit: int = 100

    def has(self, event: EventHead) -> bool:
        """Whether an event is wanted."""
        return event.at >= self.since and (event.kind in self.kinds if self.kinds else event.kind != EventKind.SNAPSHOT)
