"""A request of the second admission."""

from __future__ import annotations

import math
from dataclasses import dataclass

from serve_app.core.queue import Arrival


@dataclass
class Request:
    arrival: Arrival
    arrived: float
    number: int
    level: int
    since: int
    wait_from: float  # from when its longest wait counts
    status: str = "waiting"  # or "granted", "refused", "cancelled"
    replica: str = ""  # set while it runs
    prompt: int = 0  # charged
    produced: int = 0

    @property
    def unconfirmed(self) -> int:
        """What its prompt is charged while it runs: an estimate, as no engine of these tests counts a prompt before."""
        return 0 if self.arrival.has_begun else self.prompt

    @property
    def slots(self) -> int:
        return self.arrival.slots

    @property
    def cost(self) -> int:
        return max(1, self.arrival.cost_tokens)

    @property
    def unpaid(self) -> int:
        """What its class pays: not what its earlier runs have produced."""
        return max(1, self.cost - self.arrival.produced_tokens)

    @property
    def tenant(self) -> str:
        return self.arrival.tenant

    @property
    def size(self) -> tuple[int, int, str | None, frozenset[str]]:
        return self.slots, math.floor(math.log2(self.cost)), self.arrival.only_replica, self.arrival.avoid_replicas

    def may_use(self, replica: str) -> bool:
        return self.arrival.only_replica in (None, replica) and replica not in self.arrival.avoid_replicas


def beyond(requests: list[Request], max_requests: int | None, max_tokens: int | None, new: Request) -> tuple[int, int]:
    count = 0 if max_requests is None else len(requests) - max_requests
    tokens = 0 if max_tokens is None else sum(r.cost for r in requests) - max_tokens
    return max(0, min(1, count)), max(0, min(new.cost, tokens))


def lacks(room: tuple[int, int], gone: list[Request]) -> bool:
    return room[0] > len(gone) or room[1] > sum(r.cost for r in gone)
