"""Whose work is next: tenants take turns, and the work of each is taken in order of arrival.

Invariant: no more works run than the caller allows, in all and of one tenant; of one tenant no more than `max_waiting`
wait. A tenant that waits gets its next turn after at most one work of each other tenant.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class TenantTurns(Generic[T]):
    """Works of tenants that wait, and how many run. Each event is O(tenants that are at their bound) but for `leave`,
    which is O(waiting works of the tenant).

    Args:
        max_waiting: of one tenant, at least 1; None: any number.
    """

    def __init__(self, max_waiting: int | None = None) -> None:
        self._max_waiting = max_waiting
        self._waiting: dict[str, deque[T]] = {}  # by tenant; the next tenant first
        self._running: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        """Works that wait."""
        return sum(map(len, self._waiting.values()))

    def arrive(self, tenant: str, work: T) -> bool:
        """A work waits for its turn; False: too many of its tenant do, and it does not."""
        works = self._waiting.setdefault(tenant, deque())
        if self._max_waiting is not None and len(works) >= self._max_waiting:
            return False
        works.append(work)
        return True

    def begin(self, at_once: int = 1, of_tenant: int = 1) -> tuple[str, T] | None:
        """Begin the next work, if it may run now; returns its tenant and it.

        Args:
            at_once: works that may run; `of_tenant`: of one tenant.
        """
        if self._running.total() >= at_once:
            return None
        tenant = next((name for name in self._waiting if self._running[name] < of_tenant), None)
        return None if tenant is None else self._begin(tenant)

    def begin_if(self, fits: Callable[[T], bool]) -> tuple[str, T] | None:
        """Begin the next work if it fits beside those that run, however many these are. One that does not keeps its
        turn: no other work begins before it."""
        tenant = next(iter(self._waiting), None)
        return None if tenant is None or not fits(self._waiting[tenant][0]) else self._begin(tenant)

    def _begin(self, tenant: str) -> tuple[str, T]:
        works = self._waiting.pop(tenant)
        work = works.popleft()
        if works:
            self._waiting[tenant] = works  # behind the other tenants
        self._running[tenant] += 1
        return tenant, work

    def end(self, tenant: str) -> None:
        """A work of this tenant that ran has ended."""
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]

    def go_on(self, tenant: str, work: T) -> None:
        """A work that ran goes on in the next turn of its tenant, before the others of it."""
        self.end(tenant)
        self._waiting.setdefault(tenant, deque()).appendleft(work)

    def leave(self, tenant: str, work: T) -> None:
        """A work that waits wants its turn no more."""
        works = self._waiting[tenant]
        works.remove(work)
        if not works:
            del self._waiting[tenant]
