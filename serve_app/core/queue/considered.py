"""The waiting requests of a class for which room is made at once.

The tenants in fair order take turns, each with its oldest request. Once no room could be made for one, none of its size
follows, as in the queue itself. So neither a tenant nor a placement constraint with very many requests hides others.

Invariant: the work is bounded, however many wait.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from itertools import islice

from serve_app.core.queue.class_queue import ClassQueue
from serve_app.core.queue.tenant_queue import QueuedRequest, SizeClass, TenantQueue

MAX_CONSIDERED = 32  # waiting requests of a class for which room is made at once
MAX_TENANTS = 256  # whose requests are looked at; more than the above, since no room is made for those of some


def considered(class_queue: ClassQueue, failed: set[SizeClass]) -> Iterator[QueuedRequest]:
    """At most `MAX_CONSIDERED`. `failed`: the sizes for which no room could be made; the caller adds to it."""
    fresh = (_oldest_first(one, failed) for one in islice(class_queue.in_fair_order(MAX_TENANTS), MAX_TENANTS))
    turns = deque[Iterator[QueuedRequest]]()
    found = 0
    while found < MAX_CONSIDERED:
        tenant = next(fresh, None)
        if tenant is None:
            if not turns:
                return
            tenant = turns.popleft()
        waiting = next((one for one in tenant if one.size not in failed), None)
        if waiting is not None:
            turns.append(tenant)
            found += 1
            yield waiting


def _oldest_first(tenant_queue: TenantQueue, failed: set[SizeClass]) -> Iterator[QueuedRequest]:
    sizes = (islice(same, MAX_CONSIDERED) for size, same in tenant_queue.by_size.items() if size not in failed)
    return (entry[2] for entry in heapq.merge(*sizes))
