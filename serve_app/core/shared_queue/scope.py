"""Steps of the actor's work that fail one by one: an error ends what the step was for, and nothing of others.

A step is an event of a router, or a part of what follows from events: a request that is queued again, an engine whose
capacity has changed, an opening of a session, a decision on a request that waits for its limit, the figures of a model.
If the books no longer agree after a failure, the error goes on and concerns all (`ActorQueue`).

Invariant: after a step that has failed and was ended, the books agree, and the next step runs.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable

from serve_app.core.limits import LOST_RETRY_S
from serve_app.core.queue import EventGrants, RefusalReason, Refuse

AT_ONCE = 64  # requests or openings that are moved in one event: about 5 ms of the actor's time
GRANTS_AT_ONCE = 32  # in one event, if much comes free at once: about 4 ms


def lost(request_id: str) -> Refuse:
    """The end of a request that the router and the quota actor do not agree on, or failed at."""
    return Refuse(request_id, RefusalReason.LOST, LOST_RETRY_S)


def nothing() -> None:
    """The end of a step that the next event repeats."""


class StepScope:
    """Runs steps. O(1) per step besides what it does; O(requests + engines) after one that fails.

    Args:
        agree: whether the books agree.
    """

    def __init__(self, agree: Callable[[], bool]) -> None:
        self._agree = agree
        self.event_grants = EventGrants(GRANTS_AT_ONCE)
        self.notes: list[str] = []  # for the operator, since they were taken

    def begin_event(self) -> None:
        """An event begins: the queues may grant again."""
        self.event_grants.count = GRANTS_AT_ONCE

    def run(self, step: str, of: object, act: Callable[[], object], end: Callable[[], object] = nothing) -> None:
        """Run a step. Raises what it raised if the books do not agree afterwards.

        Args:
            step, of: for the operator.
            end: ends what the step was for, after an error.
        """
        try:
            act()
        except Exception as error:
            self.notes.append(f"{step} failed: {of!r}\n{''.join(traceback.format_exception(error))}")
            end()
            if not self._agree():
                raise
