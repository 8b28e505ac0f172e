"""How often the requests of a model may run again on replicas that fail them and stay in use. Pure.

A loss that takes its replica out of use costs each of its requests one more run, and is not counted here. A replica
that fails what it gets and stays in use could get the same requests again and again, beside those that come.

Rules
- Each answer earns `SHARE` of a retry, up to `BURST`; besides, `LEAST_PER_S` retries a second are free, so that a model
  with little load retries at once.
- A retry beyond that is not refused. It waits for its turn: no request fails for the budget.

Invariant: over any time, retries begin no faster than `SHARE` of the answers, `LEAST_PER_S` and one `BURST`.

Source: Envoy's retry budgets (a share of the requests, and a least), as a token bucket with debt (GCRA).
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 0.2  # as Envoy's `budget_percent`
LEAST_PER_S = 20.0  # a request that fails three times, alone, is through at once
BURST = 100.0  # of requests that fail together, as those of one batch


@dataclass(slots=True)
class RetryBudget:
    """The budget of one model in one router."""

    left: float = BURST  # below zero: retries that wait for their turn
    counted_at: float | None = None

    def on_answer(self) -> None:
        """A request has got its answer."""
        self.left = min(BURST, self.left + SHARE)

    def take(self, now: float) -> float:
        """A request is to run again; returns the seconds that it has to wait."""
        if self.counted_at is not None:
            self.left = min(BURST, self.left + LEAST_PER_S * (now - self.counted_at))
        self.counted_at = now
        self.left -= 1.0
        return max(0.0, -self.left / LEAST_PER_S)
