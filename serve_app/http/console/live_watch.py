"""The state of the whole deployment for all consoles of one router: assembled once every two seconds while somebody
watches, however many do.

Invariant: no source holds up the others: each has its own time limit, and one that has not answered within `WAIT_S` of
a turn is shown with its last answer, or as missing. Without consoles nothing runs and nothing is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from serve_app.core.batches import BatchRecord
from serve_app.core.live import Found, LiveModel, QuotaPart, Rates, RouterPart, operator_view, rates, tenant_view
from serve_app.errors import Unavailable
from serve_app.http.console.polled_source import PolledSource, Tenants
from serve_app.ray_adapter import in_fresh_context
from serve_app.types import Identity

logger = logging.getLogger("ray.serve")

PERIOD_S = 2.0  # between two states: people do not read faster
MIN_GAP_S = 0.5  # the same where a console has come: it need not wait
WAIT_S = 1.0  # of a turn for its questions, which take milliseconds
QUOTA_LIMIT_S = 2.0
ROUTERS_LIMIT_S = 3.0  # above `other_routers.ANSWER_TIMEOUT_S`, after which one router is left out
STATE_EVERY_S = 5.0  # Serve's controller has work of its own, and replicas change within seconds
STATE_LIMIT_S = 8.0  # it answers in milliseconds, on a loaded head in seconds
ADDRESSES_EVERY_S = 10.0
BATCHES_EVERY_S = 10.0  # the store counts rows, which takes a while where there are a million
STORE_LIMIT_S = 4.0

# One sends 50,000 bytes a second at most: with all of them a router sends 3 MB/s.
MAX_CONSOLES = 64
MAX_OF_TENANTS = 48  # the others are for operators, whom tenants must not lock out
MAX_OF_TENANT = 8
RETRY_S = 5.0

Scope = tuple[str, frozenset[str] | None] | None  # a tenant and the models it may use; None: everything


@dataclass(frozen=True, slots=True)
class LiveSources:
    """Who is asked. Each call may raise NO_ANSWER or a ServeAppError.

    Args:
        router: the id of this router.
        router_names: of the routers that take calls, by Serve; empty: not known yet.
        models: those that are served now.
        quota, routers: the parts with these tenants' rows and counts.
        state, addresses: as of `serve_app.http.api.operator_routes.ClusterCalls`.
        batches: of all tenants, and more of these; those that have not ended first.
    """

    router: str
    router_names: Callable[[], frozenset[str]]
    models: Callable[[], Mapping[str, LiveModel]]
    quota: Callable[[Tenants], Awaitable[QuotaPart]]
    routers: Callable[[Tenants], Awaitable[dict[str, RouterPart]]]
    state: Callable[[], Awaitable[Mapping[str, Any]]]
    addresses: Callable[[], Awaitable[Mapping[str, str]]]
    batches: Callable[[Tenants], Awaitable[list[BatchRecord]]]


class LiveWatch:
    """The owner of the state. `number`: how many states there were."""

    def __init__(self, sources: LiveSources) -> None:
        self._sources = sources
        self._quota = PolledSource("the quota actor", sources.quota, PERIOD_S, QUOTA_LIMIT_S)
        self._routers = PolledSource("the routers", sources.routers, PERIOD_S, ROUTERS_LIMIT_S)
        self._state = PolledSource("Serve's controller", lambda _: sources.state(), STATE_EVERY_S, STATE_LIMIT_S)
        self._addresses = PolledSource("Ray", lambda _: sources.addresses(), ADDRESSES_EVERY_S, STATE_LIMIT_S)
        self._batches = PolledSource("the store", sources.batches, BATCHES_EVERY_S, STORE_LIMIT_S)
        self._consoles: Counter[Scope] = Counter()
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._found: Found | None = None
        self._encoded: dict[Scope, bytes] = {}
        self._counted: Mapping[str, RouterPart] = {}
        self._rates: Rates = {}
        self._was_listed = False
        self.number = 0

    @contextlib.contextmanager
    def watching(self, identity: Identity) -> Iterator[None]:
        """One console, for the block.

        Raises:
            Unavailable: there are too many.
        """
        scope = scope_of(identity)
        self._require_room(scope)
        self._consoles[scope] += 1
        if self._task is None:
            self._task = in_fresh_context(self._run(), "console watch")
        self._wake.set()
        try:
            yield
        finally:
            self._consoles[scope] -= 1
            self._consoles += Counter()  # without those that are at zero
            if not self._consoles:
                self._end()

    async def wait_for_state(self, after: int, timeout_s: float) -> bool:
        """Until there is a state of a higher number than `after`; False: there was none in this time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.number <= after:
                    await self._changed.wait()
        return self.number > after

    def encoded(self, identity: Identity) -> bytes:
        """The last state as a JSON object, as far as this caller may see it; made once for all who see the same."""
        scope = scope_of(identity)
        found = self._encoded.get(scope)
        if found is None:
            assert self._found is not None, "a state comes first"
            view = operator_view(self._found) if scope is None else tenant_view(self._found, *scope)
            found = self._encoded[scope] = msgspec.json.encode(view)
        return found

    def is_leaving(self) -> bool:
        """Whether Serve has taken this router out of service: what is open here would hold up its end."""
        names = self._sources.router_names()
        self._was_listed = self._was_listed or self._sources.router in names
        return self._was_listed and bool(names) and self._sources.router not in names

    def _require_room(self, scope: Scope) -> None:
        of_tenants = sum(count for one, count in self._consoles.items() if one is not None)
        of_tenant = sum(count for one, count in self._consoles.items() if one and scope and one[0] == scope[0])
        is_full = self._consoles.total() >= MAX_CONSOLES
        if is_full or (scope is not None and (of_tenants >= MAX_OF_TENANTS or of_tenant >= MAX_OF_TENANT)):
            raise Unavailable("too many consoles watch at this router", retry_after_s=RETRY_S, code="too_many_consoles")

    def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None
        for source in (self._quota, self._routers, self._state, self._addresses, self._batches):
            source.close()
        self._found = None
        self._encoded = {}
        self._counted = {}
        self._rates = {}

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            self._wake.clear()
            try:
                await self._turn()
            except Exception:
                logger.exception(
                    "Console gets no state this time, and the next one in %.0f s. Report this traceback", PERIOD_S
                )
            await asyncio.sleep(max(0.0, began + MIN_GAP_S - loop.time()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(began + PERIOD_S):
                    await self._wake.wait()

    async def _turn(self) -> None:
        """Ask what is due, and make the next state."""
        tenants = tuple(sorted({scope[0] for scope in self._consoles if scope is not None}))
        polled = (self._quota, self._routers, self._state, self._addresses, self._batches)
        asked = [task for source in polled if (task := source.begin(tenants)) is not None]
        if asked:
            await asyncio.wait(asked, timeout=WAIT_S)
        routers = self._routers.value or {}
        if routers and any(part is not self._counted.get(name) for name, part in routers.items()):
            self._rates = rates(self._counted, routers)
            self._counted = routers
        self._found = self._make_found(routers)
        self._encoded = {}
        self.number += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def _make_found(self, routers: Mapping[str, RouterPart]) -> Found:
        missing = [
            name
            for name, source in (("quota_actor", self._quota), ("controller", self._state), ("store", self._batches))
            if source.value is None
        ]
        names = self._sources.router_names() or {self._sources.router}
        missing += [f"router {name}" for name in sorted(names - routers.keys())]
        found = Found(
            utc_text(datetime.now(UTC).timestamp(), "milliseconds"),
            self._sources.models(),
            self._state.value,
            self._addresses.value or {},
            self._quota.value,
            routers,
            self._rates,
            missing=tuple(missing),
        )
        if self._batches.value is None:
            return found
        times = ((one, utc_text(one.created_at), utc_text(one.expires_at)) for one in self._batches.value)
        return replace(found, batches=list(times))


def scope_of(identity: Identity) -> Scope:
    """What a caller sees."""
    return None if identity.admin else (identity.tenant, identity.models)


def utc_text(time_s: float, precision: str = "seconds") -> str:
    """A time in ISO 8601, of UTC."""
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec=precision).replace("+00:00", "Z")
