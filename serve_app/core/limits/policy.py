"""What is limited, in numbers: the limits of one scope (a key, a tenant, a tenant's use of one model), and prices.

A limit a minute is a token bucket: it refills steadily and holds its burst at most, so that in any window of t seconds
at most burst + rate x t is charged. A limit a day is whole again at midnight UTC, a budget on the first of the month.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import NamedTuple

from serve_app.core.messages import message

MICRO = 1_000_000  # costs are counted in millionths of the prices' currency: sums of whole numbers are exact
MINUTE_S = 60.0


class Kind(enum.IntEnum):
    """What is limited; the position in an `Amounts`."""

    REQUESTS = 0
    TOKENS = 1
    CONCURRENT = 2
    REQUESTS_OF_DAY = 3
    TOKENS_OF_DAY = 4
    COST_OF_MONTH = 5


BUCKETS = (Kind.REQUESTS, Kind.TOKENS)
ALLOWANCES = (Kind.REQUESTS_OF_DAY, Kind.TOKENS_OF_DAY, Kind.COST_OF_MONTH)

NO_KINDS = frozenset[Kind]()

FIGURES = {  # the field of `Limits`
    Kind.REQUESTS: "requests_per_minute",
    Kind.TOKENS: "tokens_per_minute",
    Kind.CONCURRENT: "max_concurrent",
    Kind.REQUESTS_OF_DAY: "requests_per_day",
    Kind.TOKENS_OF_DAY: "tokens_per_day",
    Kind.COST_OF_MONTH: "budget_per_month",
}
Period = tuple[int, int]  # a day and a month, as days since 1970 on which they begin

Amounts = tuple[float, ...]  # one number for each `Kind`
NOTHING: Amounts = (0.0,) * len(Kind)


class LimitReason(enum.StrEnum):
    """Why a limit refuses a request: the code of its error."""

    RATE_LIMIT = "rate_limit"  # requests or tokens a minute
    CONCURRENCY = "concurrency"
    ALLOWANCE = "quota"  # of the day or the month; the value is the public code


REASONS = {
    **dict.fromkeys(BUCKETS, LimitReason.RATE_LIMIT),
    **dict.fromkeys(ALLOWANCES, LimitReason.ALLOWANCE),
    Kind.CONCURRENT: LimitReason.CONCURRENCY,
}


def ended_allowances(then: Period, now: Period) -> frozenset[Kind]:
    """The allowances that have begun anew since a period."""
    if then == now:
        return NO_KINDS
    of_day = NO_KINDS if then[0] == now[0] else frozenset((Kind.REQUESTS_OF_DAY, Kind.TOKENS_OF_DAY))
    return of_day if then[1] == now[1] else of_day | {Kind.COST_OF_MONTH}


@message
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

    def capacities(self) -> dict[Kind, float]:
        """The capacity of each pool that this scope has. A bucket holds one request at least."""
        budget = self.budget_per_month
        found = {
            Kind.REQUESTS: _burst(self.requests_per_minute, self.burst_requests),
            Kind.TOKENS: _burst(self.tokens_per_minute, self.burst_tokens),
            Kind.CONCURRENT: self.max_concurrent,
            Kind.REQUESTS_OF_DAY: self.requests_per_day,
            Kind.TOKENS_OF_DAY: self.tokens_per_day,
            Kind.COST_OF_MONTH: None if budget is None else round(budget * MICRO),
        }
        return {kind: float(capacity) for kind, capacity in found.items() if capacity is not None}

    @property
    def of_periods(self) -> Limits:
        """Those of a day and a month alone."""
        return Limits(
            requests_per_day=self.requests_per_day,
            tokens_per_day=self.tokens_per_day,
            budget_per_month=self.budget_per_month,
        )

    @property
    def of_rates(self) -> Limits:
        """The others: those a minute, and of concurrency."""
        return replace(self, requests_per_day=None, tokens_per_day=None, budget_per_month=None)

    def rate(self, kind: Kind) -> float:
        """What a pool refills a second."""
        minute = {Kind.REQUESTS: self.requests_per_minute, Kind.TOKENS: self.tokens_per_minute}.get(kind)
        return 0.0 if minute is None else minute / MINUTE_S


def _burst(per_minute: float | None, burst: int | None) -> float | None:
    if per_minute is None:
        return None
    return max(1.0, per_minute) if burst is None else float(burst)


Scopes = tuple[tuple[str, Limits], ...]  # with the id of each: a kind of `SCOPE_NAMES`, a colon, and whose it is
SCOPE_NAMES = {
    "key": "this key",
    "allowance": "this key",  # its limits of a day and a month, for its requests and its rows together
    "rows": "the batches of this key",
    "tenant": "this tenant",
    "model": "this tenant for this model",
    "batch": "the batches of this tenant",
}


def in_words(limits: Limits | None, kind: Kind, scope: str) -> str:
    """A limit as an error names it: `60 requests per minute of this key`."""
    name = "requests at once" if kind is Kind.CONCURRENT else FIGURES[kind].replace("_", " ")
    if limits is None:
        return name
    figure = getattr(limits, FIGURES[kind])
    of = scope.partition(":")[0]
    return f"{figure:,g} {name} of {SCOPE_NAMES.get(of, of)}"


class LimitedRequest(NamedTuple):
    """A request to charge.

    Args:
        scopes: the scopes with limits that it is charged to.
        tokens: of prompt and answers, by estimate; `cost_micro`: what they cost, in millionths.
        fingerprint: of its body: clients repeat a refused request with the same bytes.
        may_wait: it waits aside rather than being refused.
        is_repeat: whether the client says that it repeats a request; None: it does not say.
    """

    request_id: str
    scopes: Scopes
    tokens: int
    cost_micro: int
    fingerprint: bytes = b""
    may_wait: bool = False
    is_repeat: bool | None = None

    @property
    def need(self) -> Amounts:
        """What it takes of each scope."""
        return need_of(self.tokens, self.cost_micro)


def need_of(tokens: int, cost_micro: int) -> Amounts:
    """What a request of so many tokens takes of each scope."""
    return (1.0, float(tokens), 1.0, 1.0, float(tokens), float(cost_micro))


class Bucket(NamedTuple):
    """A limit a minute, as a client is told. `reset_s`: seconds until it is whole, if nothing more is charged."""

    limit: int
    remaining: int
    reset_s: float


class Standing(NamedTuple):
    """The limits a minute that concern a request, of each kind the one with the least left; None: there is none."""

    requests: Bucket | None = None
    tokens: Bucket | None = None


class TokenPrices(NamedTuple):
    """What a million tokens of one model cost."""

    prompt_per_million: float = 0.0
    cached_per_million: float | None = None  # of the prompt tokens that were cached; None: as the others
    output_per_million: float = 0.0

    def cost_micro(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> int:
        """The cost in millionths, rounded. `prompt_tokens` include the cached ones."""
        cached = self.prompt_per_million if self.cached_per_million is None else self.cached_per_million
        fresh = prompt_tokens - cached_tokens  # a price per million tokens is one in millionths per token
        return round(fresh * self.prompt_per_million + cached_tokens * cached + output_tokens * self.output_per_million)
