"""Charges each request against the limits of its key, of its tenant, and of its tenant's use of the model; a row of a
batch against its key's limits of a day and a month, and the limits of its key and of its tenant for batches.

Invariant: a charge is ended exactly once, however the request ends: settled by the tokens that the engine made, or
refunded if the request was refused or failed. A large request that an engine has answered with an error pays for its
prompt: it was read.

The rate-limit headers are OpenAI's, or Anthropic's on its routes. Of several limits of one kind, they tell the one with
the least left.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import time
from collections.abc import AsyncIterator, Callable

from serve_app.core.limits import LimitedRequest, Limits, Scopes, TokenPrices
from serve_app.core.queue import RefusalReason, Refuse, WaitReason, refusal_error
from serve_app.core.receipts import LIMIT_WAIT, RequestMeasure
from serve_app.errors import BadRequest, RateLimited
from serve_app.http.error_responses import Headers
from serve_app.http.keys import KeyRing, utc
from serve_app.http.request_record import RequestRecord
from serve_app.router import Aside, LimitCharge, LimitClient, RouterMetrics
from serve_app.settings import Settings
from serve_app.transport import TokenUsage
from serve_app.types import Identity, Operation

FINGERPRINT_BYTES = 16  # of the body: two requests of one key that are alike by chance only share a reservation
RETRY_COUNT_HEADER = b"x-stainless-retry-count"  # of OpenAI's SDKs: 0 with a request's first attempt

NO_PRICES = TokenPrices()


class RequestLimits:
    """The limits that concern each request, and its charge against them.

    Args:
        client: charges them, together with all other routers.
        keys: those that hold now.
    """

    def __init__(self, client: LimitClient, metrics: RouterMetrics, keys: Callable[[], KeyRing]) -> None:
        self._client = client
        self._metrics = metrics
        self._keys = keys

    def configure(self, settings: Settings) -> None:
        """Apply changed settings to requests that arrive from now on; called once before the first."""
        tenants = settings.admission.tenants
        self._of_tenant = {name: (f"tenant:{name}", one.limits.limits()) for name, one in tenants.items()}
        self._of_batches = {name: (f"batch:{name}", one.batch_limits.limits()) for name, one in tenants.items()}
        self._of_model = {
            (name, model): (f"model:{name}\0{model}", limits.limits())
            for name, one in tenants.items()
            for model, limits in one.models.items()
        }
        # whose requests wait aside instead of being refused
        self._waiting_tenants = frozenset(name for name, one in tenants.items() if one.over_limit == "wait")
        self._prices = {one.name: one.prices.token_prices() for one in settings.models if one.prices is not None}

    def scopes(self, identity: Identity, model: str) -> Scopes:
        """The scopes with limits that a request of this key to this model is charged to."""
        key_id = identity.key_id
        of_key = self._keys().limits_of(identity)
        found = list[tuple[str, Limits] | None]()
        allowance = f"allowance:{key_id}", of_key.of_periods
        if identity.is_row:
            of_rows = f"rows:{key_id}", self._keys().batch_limits_of(identity)
            found += [allowance, of_rows, self._of_batches.get(identity.tenant)]
        else:
            tenant = identity.tenant
            found += [(f"key:{key_id}", of_key.of_rates), allowance]
            found += [self._of_tenant.get(tenant), self._of_model.get((tenant, model))]
        return tuple(one for one in found if one is not None and one[1] != Limits())

    def limited_request(
        self, scopes: Scopes, record: RequestRecord, measure: RequestMeasure, raw: bytes, retry_count: bytes | None
    ) -> LimitedRequest:
        """The request as it is to be charged. Work that takes no slot is charged as one without tokens.

        Args:
            raw: the body as it was sent: clients send the same bytes again when they repeat a refused request.
            retry_count: the header `RETRY_COUNT_HEADER`.
        """
        if not scopes:
            return LimitedRequest(record.request_id, scopes, 0, 0)
        cost = measure.cost
        prices = self._prices_of(record.model)
        return LimitedRequest(
            record.request_id,
            scopes,
            tokens=cost.prompt_tokens + cost.output_tokens,
            cost_micro=prices.cost_micro(cost.prompt_tokens, 0, cost.output_tokens),
            fingerprint=hashlib.blake2b(raw, digest_size=FINGERPRINT_BYTES).digest(),
            may_wait=record.tenant in self._waiting_tenants,
            is_repeat=None if retry_count is None else retry_count != b"0",
        )

    def _prices_of(self, model: str) -> TokenPrices:
        return self._prices.get(model, NO_PRICES)

    def headers(self, scopes: Scopes, operation: Operation = Operation.CHAT) -> Headers:
        """The rate-limit headers: of the limits a minute, as far as there are any, over all routers."""
        standing = self._client.standing(scopes)
        found: Headers = []
        for kind, bucket in (("requests", standing.requests), ("tokens", standing.tokens)):
            if bucket is not None and operation.is_anthropic:
                found += [
                    (f"anthropic-ratelimit-{kind}-limit".encode(), b"%d" % bucket.limit),
                    (f"anthropic-ratelimit-{kind}-remaining".encode(), b"%d" % max(0, bucket.remaining)),
                    (f"anthropic-ratelimit-{kind}-reset".encode(), utc(time.time() + bucket.reset_s).encode()),
                ]
            elif bucket is not None:
                found += [
                    (f"x-ratelimit-limit-{kind}".encode(), b"%d" % bucket.limit),
                    (f"x-ratelimit-remaining-{kind}".encode(), b"%d" % max(0, bucket.remaining)),
                    (f"x-ratelimit-reset-{kind}".encode(), duration(bucket.reset_s).encode()),
                ]
        return found

    @contextlib.asynccontextmanager
    async def charged(
        self, request: LimitedRequest, record: RequestRecord, measure: RequestMeasure, status: Callable[[], int]
    ) -> AsyncIterator[None]:
        """Charge a request, and end the charge with it. `status`: of its answer, once it is sent.

        Raises:
            RateLimited: a limit refuses it. Overloaded: its deadline passes while it waits aside. Unavailable: the
            limits cannot be charged at the moment.
        """
        if not request.scopes:
            yield
            return
        prices = self._prices_of(record.model)
        timeline = record.runs.timeline
        if timeline is not None:
            timeline.limits_at = time.monotonic()
        waits_for = LIMIT_WAIT if request.may_wait else WaitReason.QUOTA_ACTOR
        record.runs.aside = Aside(waits_for, time.monotonic())
        left_s = None if record.deadline_s is None else max(0.0, record.started + record.deadline_s - time.monotonic())
        try:
            async with asyncio.timeout(left_s):
                charged = await self._client.acquire(request)
        except RateLimited as error:
            self._metrics.count_limited(record.model, record.tenant, error.code)
            raise
        except TimeoutError:
            raise refusal_error(Refuse(record.request_id, RefusalReason.DEADLINE, None)) from None
        finally:
            record.runs.aside = None
        if timeline is not None:
            timeline.limits_until = time.monotonic()
        record.trace.limit_wait_s = charged.waited_s
        if charged.waited_s:
            self._metrics.count_limit_wait(record.model, record.tenant, charged.waited_s)
        try:
            yield
        except asyncio.CancelledError:  # the client left: what the engine made until then is used
            used = record.tokens_used()
            if record.submitted_at is None:
                charged.refund()
            elif used.prompt_tokens or used.completion_tokens:
                self._settle(charged, prices, used)
            else:  # of an answer that is not streamed nothing is known before its end
                charged.settle(request.tokens, request.cost_micro)
            raise
        except BadRequest:
            _end_refused(charged, measure, was_read=record.submitted_at is not None)
            raise
        except BaseException:
            charged.refund()
            raise
        if status() < 400:
            self._settle(charged, prices, record.tokens_used())
        else:
            _end_refused(charged, measure, was_read=True)

    def _settle(self, charged: LimitCharge, prices: TokenPrices, used: TokenUsage) -> None:
        prompt = used.prompt_tokens
        output = used.completion_tokens
        charged.settle(prompt + output, prices.cost_micro(prompt, used.cached_tokens, output))


def _end_refused(charged: LimitCharge, measure: RequestMeasure, *, was_read: bool) -> None:
    """The request is refused. That an engine has read a large one was work, though no money's worth."""
    if was_read and measure.is_large:
        charged.settle(measure.cost.prompt_tokens, 0)
    else:
        charged.refund()


def duration(seconds: float) -> str:
    """A duration as OpenAI's headers have it: `250ms`, `8.64s`, `6m0s`, `1h2m3s`; rounded up to milliseconds."""
    ms = max(0, math.ceil(round(seconds * 1000, 3)))
    if ms < 1000:
        return f"{ms}ms"
    hours, rest = divmod(ms, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    text = f"{rest / 1000:g}s"
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text
