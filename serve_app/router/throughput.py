"""How many requests have ended and how many output tokens have come at one router, by model and tenant.

Tokens of running requests are read where they are counted, so a long stream counts while it runs.

Invariant: what is kept is bounded by models and tenants with a key; counts only grow, but for a request that stops and
runs again: its tokens are missing until then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from serve_app.core.live import Counts
from serve_app.core.shared_queue import RouterQueue

Key = tuple[str, str | None]  # model and tenant; None: all of them


class Throughput:
    """The counts of ended requests."""

    def __init__(self) -> None:
        self._requests: Counter[Key] = Counter()
        self._tokens: Counter[Key] = Counter()

    def count_ended(self, model: str, tenant: str, output_tokens: int) -> None:
        """A request has ended, with so many output tokens in all its runs."""
        for key in ((model, tenant), (model, None)):
            self._requests[key] += 1
            self._tokens[key] += output_tokens

    def counts(self, core: RouterQueue, models: Iterable[str], tenants: Collection[str]) -> Counts:
        """What has ended and what runs, of each model in all and for these tenants. O(requests here)."""
        tokens = self._tokens.copy()
        for run in core.in_flight.running.values():
            made = run.arrival.produced_tokens + run.output_tokens
            tokens[run.model, run.arrival.tenant] += made
            tokens[run.model, None] += made
        for waiting in core.pending.by_request_id.values():
            tokens[waiting.model, waiting.arrival.tenant] += waiting.arrival.produced_tokens
            tokens[waiting.model, None] += waiting.arrival.produced_tokens
        wanted = [(model, tenant) for model in models for tenant in (None, *tenants)]
        return {key: (self._requests[key], tokens[key]) for key in wanted}
