"""Room for a newcomer in a full line: the lowest class gives first, in it the tenant with most, of it the youngest.

Within the newcomer's own class only a tenant gives that, for its weight, has no less left than the newcomer's has: so a
heavy tenant cannot keep a light one out of the line, nor the other way. The bound of a class is kept by that class
alone. A newcomer answers for its own size: in a line that is too long for another reason nobody else goes.

Invariant: it is known that there is enough to give before anybody goes: either the newcomer has room or all stay.
"""

from __future__ import annotations

from serve_app.core.queue.evictable import Room
from serve_app.core.queue.policy import ClassBound, Policy
from serve_app.core.queue.queue import Line
from serve_app.core.queue.tenant_queue import Waiting

NO_BOUND = ClassBound()
WITHIN = Room()  # beyond no bound, which is what most arrivals are


def make_room(line: Line, policy: Policy, newcomer: Waiting) -> list[Waiting] | None:
    """Keep the line within its bounds now that a newcomer, which is not accepted, is in it.

    Returns those who left the line for it; None: there is no room for it, and nothing has changed. O(log n) for each.
    """
    level = newcomer.arrival.request_class
    bound = policy.classes.get(level, NO_BOUND)
    cost = newcomer.cost
    of_class = _beyond(line.claimed[level], bound.max_queued, line.claimed_tokens[level], bound.max_queued_tokens, cost)
    of_all = _beyond(len(line), policy.max_queued, line.tokens, policy.max_queued_tokens, cost)
    if not of_class and not of_all:
        return []
    below, same = line.sheddable[:level], line.sheddable[level]
    rest = of_all.without(sum(one.requests for one in below), sum(one.tokens for one in below))
    own = of_class.both(rest)
    giver = same.heaviest(own)
    if own and (giver is None or not same.can_give(giver, own, newcomer.arrival.tenant)):
        return None
    gone: list[Waiting] = []
    while own and giver is not None:
        gone.append(_leave(line, same.youngest(giver)))
        own, of_all = _less(own, gone[-1]), _less(of_all, gone[-1])
    for lower in below:
        while of_all and (heaviest := lower.heaviest(of_all)) is not None:
            gone.append(_leave(line, lower.youngest(heaviest)))
            of_all = _less(of_all, gone[-1])
    return gone


def _beyond(requests: int, max_requests: int | None, tokens: int, max_tokens: int | None, cost: int) -> Room:
    """By how much of its own size a newcomer of this cost is beyond a bound."""
    more_requests = 0 if max_requests is None else min(1, requests - max_requests)
    more_tokens = 0 if max_tokens is None else min(cost, tokens - max_tokens)
    if more_requests <= 0 and more_tokens <= 0:
        return WITHIN
    return Room(max(0, more_requests), max(0, more_tokens))


def _leave(line: Line, waiting: Waiting) -> Waiting:
    line.remove(waiting.request_id)
    return waiting


def _less(room: Room, gone: Waiting) -> Room:
    return room.without(1, gone.cost)
