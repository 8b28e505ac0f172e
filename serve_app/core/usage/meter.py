"""The use of one router's requests, until the store has it.

A request is in flight from the moment it is handed to an engine until its end, and then in the sums. A batch takes the
sums and names what is in flight at the same moment. While it is not acknowledged, it is sent again as it is, and later
use is summed for the next one.

Invariant: every request that has begun is in exactly one of: in flight, the sums, the batch on its way, an acknowledged
batch, or not counted. Memory is bounded by the requests in flight and the distinct rows, however long the store is
away.
"""

from __future__ import annotations

from collections import Counter

from serve_app.core.limits import TokenPrices
from serve_app.core.usage.records import InFlightUse, RequestUse, UsageBatch, UsageKey, UsageRow


class UsageMeter:
    """Args:
    source: the router's name; no other router has ever had it.
    sent: its last batch, which may not have arrived.
    """

    def __init__(self, source: str, sent: UsageBatch | None = None) -> None:
        self.source = source
        self._seq = 0 if sent is None else sent.seq
        self.in_flight: dict[str, tuple[UsageKey, TokenPrices | None]] = {}  # by request id: begun and not ended
        self._sums: dict[UsageKey, list[int]] = {}  # in the order of `USAGE_COUNTS`
        self.sent = sent  # not acknowledged; whoever has the meter only reads it
        self._reported: tuple[InFlightUse, ...] = () if sent is None else sent.in_flight  # as in the last batch

    def begin(self, request_id: str, key: UsageKey, prices: TokenPrices | None = None) -> None:
        """A request is handed to an engine. Again, after the loss of the first one: it keeps its day and prices."""
        if request_id not in self.in_flight:
            self.in_flight[request_id] = key, prices

    def end(self, request_id: str, use: RequestUse | None) -> None:
        """A request has ended. None: it is not counted. One that never began changes nothing."""
        begun = self.in_flight.pop(request_id, None)
        if begun is None or use is None:
            return
        key, prices = begun
        sums = self._sums.get(key)
        if sums is None:
            sums = self._sums[key] = [0] * 8
        sums[0] += use.is_settled
        sums[1] += use.prompt_tokens
        sums[2] += use.cached_tokens
        sums[3] += use.output_tokens
        sums[4] += use.kv_token_ms
        sums[5] += use.wait_ms
        if prices is not None:
            sums[6] += prices.cost_micro(use.prompt_tokens, use.cached_tokens, use.output_tokens)
        sums[7] += not use.is_settled

    @property
    def has_news(self) -> bool:
        """Whether the store lacks something: use, or a change of what is in flight."""
        return self.sent is not None or bool(self._sums) or self._counts() != self._reported

    @property
    def pending(self) -> int:
        """Ended requests whose use the store has not acknowledged."""
        sent = () if self.sent is None else self.sent.rows
        ended = sum(sums[0] + sums[7] for sums in self._sums.values())
        return ended + sum(row.requests + row.unsettled for row in sent)

    def _counts(self) -> tuple[InFlightUse, ...]:
        counts = Counter(key.of_model for key, _ in self.in_flight.values())
        return tuple(InFlightUse(*key, count) for key, count in sorted(counts.items()))

    def next_batch(self, *, heartbeat: bool = False) -> UsageBatch | None:
        """What to send now; None: the store knows all. `heartbeat`: also what it knows, if anything is in flight."""
        if self.sent is None:
            in_flight = self._counts()
            if self._sums or in_flight != self._reported or (heartbeat and in_flight):
                rows = tuple(UsageRow.of(key, sums) for key, sums in self._sums.items())
                self._seq += 1
                self._sums = {}
                self._reported = in_flight
                self.sent = UsageBatch(self.source, self._seq, rows, in_flight)
        return self.sent

    def acknowledge(self, seq: int) -> None:
        """The store has the batch of this number."""
        if self.sent is not None and self.sent.seq == seq:
            self.sent = None
