"""The moments of a request that its router notes while traces are sent: at its limits, in the queue, on replicas. Pure.

All moments are seconds of the router's monotonic clock. What no moment ends was ended by the next attempt, or by the
end of the request.

Invariant: a timeline has at most `MAX_ATTEMPTS` attempts; those that are not kept are counted.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

from serve_app.core.queue import WaitReason
from serve_app.core.spans.context import SpanContext

MAX_ATTEMPTS = 32  # the first ones and the last one; there is no bound to how often a request is preempted


class AttemptEnd(enum.StrEnum):
    """How an attempt has ended."""

    ANSWERED = "answered"
    PREEMPTED = "preempted"  # stopped for others
    MOVED = "moved"  # stopped since its replica drains
    RESTARTS = "restarts"  # its replica is lost, and it begins anew
    CONTINUES = "continues"  # its replica is lost, and another one continues it
    FAILED = "failed"
    REFUSED = "refused"  # by the queue
    CANCELLED = "cancelled"  # with its request


@dataclass(slots=True)
class Attempt:
    """One wait for a replica, and the run on it.

    Args:
        queued_at: when the wait began.
        began_at: when the replica was granted; None: it was not.
        waited_for: the reason of the wait, which took `waited_s` in the queue; None: there was no wait.
        route: the rule that chose the replica; empty: the queue did.
        earlier_tokens: output tokens of earlier runs, which this one continues.
        first_token_at: when the first tokens came, if that was in this run.
        relayed_at: when its first frame went on to the client.
        done_at: when the replica was done with it.
        ended_at: when the client had all that came of it.
        tokens: output tokens of this run.
        error: code of the error with which it ended; empty: none.
    """

    queued_at: float
    began_at: float | None = None
    waited_for: WaitReason | None = None
    waited_s: float = 0.0
    replica_id: str = ""
    route: str = ""
    earlier_tokens: int = 0
    first_token_at: float | None = None
    relayed_at: float | None = None
    done_at: float | None = None
    ended_at: float | None = None
    tokens: int = 0
    end: AttemptEnd = AttemptEnd.CANCELLED
    error: str = ""


@dataclass(slots=True)
class RequestTimeline:
    """The moments of one request, or of one prompt of a list.

    Args:
        context: the place of the request in its trace.
        server: the address that the client has called; empty: unknown.
        limits_at, limits_until: when its charge against limits began and ended; None: it did not.
        parts: of the prompts of a list.
        dropped: attempts that were not kept.
        batch_row: the id of its batch and its number there; None: it is of none.
    """

    context: SpanContext
    server: str = ""
    limits_at: float | None = None
    limits_until: float | None = None
    attempts: list[Attempt] = field(default_factory=list)
    parts: list[RequestTimeline] = field(default_factory=list)
    dropped: int = 0
    batch_row: tuple[str, int] | None = None

    def part(self) -> RequestTimeline:
        """The timeline of the next prompt of the list."""
        part = replace(self, limits_at=None, limits_until=None, attempts=[], parts=[])
        self.parts.append(part)
        return part

    def on_queued(self, now: float) -> None:
        """The request waits for a replica, for the first time or again."""
        if len(self.attempts) == MAX_ATTEMPTS:
            del self.attempts[-1]
            self.dropped += 1
        self.attempts.append(Attempt(now))

    def on_waited(self, reason: WaitReason | None, waited_s: float) -> None:
        """The wait has ended with a grant."""
        attempt = self.attempts[-1]
        attempt.waited_for = reason
        attempt.waited_s = waited_s

    def on_begun(self, now: float, replica_id: str, route: str, earlier_tokens: int = 0) -> None:
        """A replica is granted."""
        attempt = self.attempts[-1]
        attempt.began_at = now
        attempt.replica_id = replica_id
        attempt.route = route
        attempt.earlier_tokens = earlier_tokens

    def on_refused(self, code: str) -> None:
        """The wait has ended with an error, if it had begun."""
        if self.attempts and self.attempts[-1].began_at is None:
            self.attempts[-1].end = AttemptEnd.REFUSED
            self.attempts[-1].error = code

    def on_first_frame(self, now: float) -> None:
        """The first frame of the run has come, and goes on to the client."""
        self.attempts[-1].relayed_at = now

    def on_done(self, now: float) -> None:
        """The replica is done with the run."""
        self.attempts[-1].done_at = now

    def on_ended(self, now: float, end: AttemptEnd, code: str) -> None:
        """The run has ended, and its answer is sent as far as it came."""
        attempt = self.attempts[-1]
        attempt.ended_at = now
        attempt.end = end
        attempt.error = code

    def on_tokens(self, tokens: int, first_at: float | None) -> None:
        """How many tokens this run and those that it continues have made, and when their first ones came."""
        attempt = self.attempts[-1]
        attempt.tokens = tokens - attempt.earlier_tokens
        if first_at is not None and attempt.began_at is not None and first_at >= attempt.began_at:
            attempt.first_token_at = first_at
