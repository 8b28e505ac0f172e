"""What is noted of a request on its way through a router, for its receipt. Pure.

Invariant: KV tokens are counted from when they were given until they are given back, however the request ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.budget import Budget
from serve_app.core.routing import Route
from serve_app.types import RequestClass


@dataclass(slots=True)
class Trail:
    """Filled as the request goes. Moments are seconds of the host's monotonic clock.

    Args:
        most_tokens: what it can come to use, prompt and all answers, by the client's bound; None: there is none.
        sequences: how many it runs at once; 0: as many as it takes slots.
        ahead: who waited before it when it came, by class.
        replica_id: where it was handed in last; `route` is how that was found, None: the line's own choice.
        losses: replicas that were lost under it.
        kv_token_s: KV tokens held, times seconds.
    """

    most_tokens: int | None = None
    sequences: int = 0
    ahead: tuple[tuple[RequestClass, int], ...] = ()
    replica_id: str | None = None
    route: Route | None = None
    losses: int = 0
    kv_token_s: float = 0.0
    _budget: Budget | None = None
    _since: float = 0.0

    def hold(self, budget: Budget, now: float) -> None:
        """It was given these tokens."""
        self.release(now)
        self._budget, self._since = budget, now

    def release(self, now: float) -> None:
        """It has given them back; again changes nothing. What they had grown to counts for the whole time."""
        if self._budget is not None:
            self.kv_token_s += self._budget.tokens * (now - self._since)
            self._budget = None

    @property
    def output_tokens(self) -> int | None:
        """Made in the place that it holds; None: it holds none, or nobody counts."""
        return None if self._budget is None else self._budget.output_tokens

    def lost(self, now: float) -> None:
        """Its replica was lost, and it waits again."""
        self.losses += 1
        self.release(now)
