"""What is limited, in numbers: the limits of one scope (a key, a tenant, a tenant's use of one model), and prices.

A limit a minute is a token bucket: it refills steadily and holds its burst at most, so that in any window of t seconds
at most burst + rate x t is charged. A limit a day is whole again at midnight UTC, a budget on the first of the month.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

MICRO = 1_000_000  # costs are counted in millionths of the prices' currency: sums of whole numbers are exact


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one scope; None: none. The bursts default to one minute's."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    burst_requests: int | None = None
    burst_tokens: int | None = None
    max_concurrent: int | None = None
    requests_per_day: int | None = None
    tokens_per_day: int | None = None
    budget_per_month: float | None = None  # in the currency of the prices


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """What a million tokens of one model cost."""

    prompt_per_million: float = 0.0
    cached_per_million: float | None = None  # of the prompt tokens that were cached; None: as the others
    output_per_million: float = 0.0

    def cost_micro(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> int:
        """The cost in millionths, rounded. `prompt_tokens` include the cached ones."""
        cached = self.prompt_per_million if self.cached_per_million is None else self.cached_per_million
        fresh = prompt_tokens - cached_tokens  # a price per million tokens is one in millionths per token
        return round(fresh * self.prompt_per_million + cached_tokens * cached + output_tokens * self.output_per_million)


class LimitReason(enum.StrEnum):
    """Why a limit refuses a request: the error's code."""

    RATE_LIMIT = "rate_limit"  # requests or tokens a minute
    CONCURRENCY = "concurrency"
    QUOTA = "quota"  # of the day or the month


@dataclass(frozen=True, slots=True)
class LimitedRequest:
    request_id: str
    scopes: tuple[tuple[str, Limits], ...]
    tokens: int
    cost_micro: int
    fingerprint: bytes
    may_wait: bool


@dataclass(frozen=True, slots=True)
class BucketStanding:
    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class Standing:
    requests: BucketStanding | None = None
    tokens: BucketStanding | None = None
