"""Which requests are evicted from a full queue for a newcomer: lowest class, then heaviest tenant, then youngest first.

In the newcomer's own class, requests are evicted only of a tenant that then still has, for its weight, at least as much
as the newcomer's tenant: so a heavy tenant cannot keep a light one out of the queue, nor the other way. For the bound
of a class only requests of that class are evicted. Only the newcomer's own size is made up for: if the queue exceeds a
bound for another reason (a lowered bound), no further request is evicted.

Invariant: a request is evicted only after the check that enough can be evicted: the newcomer fits, or all others stay.
"""

from __future__ import annotations

from serve_app.core.queue.evictable import Excess
from serve_app.core.queue.policy import ClassBound, QueuePolicy
from serve_app.core.queue.queue import RequestQueue
from serve_app.core.queue.tenant_queue import QueuedRequest

NO_BOUND = ClassBound()
NO_EXCESS = Excess()  # shared: most arrivals exceed no bound


def evict_for(queue: RequestQueue, policy: QueuePolicy, newcomer: QueuedRequest) -> list[QueuedRequest] | None:
    """Keep the queue within its bounds after a newcomer, which is not `accepted`, was added.

    Returns the evicted requests; None: the newcomer does not fit, and nothing has changed. O(log n) per eviction.
    """
    level = newcomer.arrival.request_class
    bound = policy.classes.get(level, NO_BOUND)
    cost = newcomer.cost
    of_class = _excess(
        queue.count_by_class[level], bound.max_queued, queue.tokens_by_class[level], bound.max_queued_tokens, cost
    )
    of_all = _excess(len(queue), policy.max_queued, queue.tokens, policy.max_queued_tokens, cost)
    if not of_class and not of_all:
        return []
    below, same = queue.evictable[:level], queue.evictable[level]
    rest = of_all.minus(sum(one.requests for one in below), sum(one.tokens for one in below))
    own = of_class.larger_of(rest)
    giver = same.heaviest_tenant(own)
    if own and (giver is None or not same.can_evict(giver, own, newcomer.arrival.tenant)):
        return None
    gone: list[QueuedRequest] = []
    while own and giver is not None:
        gone.append(_evict(queue, same.youngest_request(giver)))
        own, of_all = _excess_left(own, gone[-1]), _excess_left(of_all, gone[-1])
    for lower in below:
        while of_all and (heaviest := lower.heaviest_tenant(of_all)) is not None:
            gone.append(_evict(queue, lower.youngest_request(heaviest)))
            of_all = _excess_left(of_all, gone[-1])
    return gone


def _excess(requests: int, max_requests: int | None, tokens: int, max_tokens: int | None, cost: int) -> Excess:
    """By how much a bound is exceeded, at most the newcomer's own size (one request, `cost` tokens)."""
    more_requests = 0 if max_requests is None else min(1, requests - max_requests)
    more_tokens = 0 if max_tokens is None else min(cost, tokens - max_tokens)
    if more_requests <= 0 and more_tokens <= 0:
        return NO_EXCESS
    return Excess(max(0, more_requests), max(0, more_tokens))


def _evict(queue: RequestQueue, waiting: QueuedRequest) -> QueuedRequest:
    queue.remove(waiting.request_id)
    return waiting


def _excess_left(excess: Excess, evicted: QueuedRequest) -> Excess:
    return excess.minus(1, evicted.cost)
