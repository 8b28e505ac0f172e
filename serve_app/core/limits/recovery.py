"""After a restart of the quota actor: what the routers hold of each scope, and the newest state that one remembers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from serve_app.core.limits.messages import LimitAccounts, LimitReport, ScopeAccount, ToldReservation
from serve_app.core.limits.policy import NOTHING, Amounts, Kind
from serve_app.core.limits.scopes import Calendar, Scope, restored


@dataclass(slots=True)
class Recovery:
    """The reports of the routers so far.

    Args:
        newest: by scope: the report with the newest state, and the moment at which that router received it.
        returned: by scope: what routers gave back since their reports.
    """

    newest: dict[str, tuple[ScopeAccount, float]] = field(default_factory=dict)
    accounts: defaultdict[str, dict[str, Amounts]] = field(default_factory=lambda: defaultdict(dict))
    returned: dict[str, Amounts] = field(default_factory=dict)
    reservations: list[ToldReservation] = field(default_factory=list)

    def add(self, router: str, report: LimitAccounts, now: float) -> None:
        """Add a router's report; it replaces an earlier one."""
        self.remove(router)
        for reported in report.accounts:
            self.accounts[reported.scope][router] = reported.account
            known = self.newest.get(reported.scope)
            if known is None or known[0].version < reported.version:
                self.newest[reported.scope] = reported, now - reported.age_s
        self.reservations += report.reservations

    def report(self, router: str, report: LimitReport) -> None:
        """A router that has told its accounts has spent of them, and gives some back."""
        account = self.accounts[report.scope].get(router)
        if account is not None:
            changes = zip(account, report.spent, report.returned, strict=True)
            self.accounts[report.scope][router] = tuple(had - spent - back for had, spent, back in changes)
            before = self.returned.get(report.scope, NOTHING)
            self.returned[report.scope] = tuple(map(sum, zip(before, report.returned, strict=True)))

    def remove(self, router: str) -> None:
        """Forget what a router holds: it is gone."""
        for booked in self.accounts.values():
            booked.pop(router, None)

    def scopes(
        self, calendar: Calendar, now: float, empty_since: float | None
    ) -> Iterator[tuple[Scope, frozenset[Kind]]]:
        """The scopes as the last actor had them. Allowances that have begun anew since are whole; see `restored`."""
        for name, (reported, last_seen) in self.newest.items():
            booked = self.accounts[name]
            credit = tuple(sum(account[kind] for account in booked.values()) for kind in Kind)
            back = self.returned.get(name, NOTHING)
            reported = reported._replace(level=tuple(map(sum, zip(reported.level, back, strict=True))))
            reported = reported._replace(age_s=max(0.0, now - last_seen))
            scope, unheard = restored(reported, credit, calendar, now, empty_since)
            for router, account in booked.items():
                scope.book(router, account)
            yield scope, unheard
