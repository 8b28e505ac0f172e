"""A router's end of the claims at the quota actor: asks for requests, and reports what this router has.

Invariant: what the router has is known to the actor, or is reported at the next beat; every `CLAIM_HEARTBEAT_S` the
actor is told which runs there are, so that no ended run stays claimed. A new actor gets everything, `PIECE` claims at
a time. A router without runs reports so at every tenth beat only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Any

from serve_app.core.claims import (
    MAX_RESTARTS,
    ClaimReply,
    ClaimReport,
    ClaimRequest,
    ClaimVerdict,
    Generation,
)
from serve_app.core.times import CLAIM_CALL_S, CLAIM_HEARTBEAT_S, CLAIM_WAIT_S
from serve_app.errors import Overloaded, RunLost, Unavailable
from serve_app.http.keyed.answers import AnswerStore, not_kept, reused
from serve_app.ray_adapter import AWAY, in_fresh_context

logger = logging.getLogger("ray.serve")

EMPTY_BEATS = 2  # without a run: then the actor has ended what this router no longer has (`ClaimBook.on_report`)
IDLE_BEATS = 10  # of which one is sent while nothing changes, for a claim that reached the actor later than those two
PIECE = 500  # claims in one report, about 100 kB
RETRY_S = 0.1  # between two questions

Call = Callable[..., Awaitable[Any]]  # of the quota actor: a method's name, and its arguments


class ClaimClient:
    """See the module.

    Args:
        router: its id.
        call: calls the quota actor; raises `AWAY` while it is unreachable.
        holdings: the answers that this router has.
        router_session: this router's with the actor, as its queue knows it; another one: the actor may know nothing
            from here.
    """

    def __init__(self, router: str, call: Call, holdings: AnswerStore, router_session: Callable[[], Hashable]) -> None:
        self._router = router
        self._call = call
        self._holdings = holdings
        self._router_session = router_session
        self._beat_router_session: Hashable = None  # that of the last beat
        self._empty_beats = 0  # in that session, without a run, in a row
        self._generation: Generation | None = None
        self._unreported: dict[str, None] = {}  # runs, in the order of their changes
        self.asked: dict[str, asyncio.Event] = {}  # runs whose claim is on its way; set once it is answered
        self._reporting = asyncio.Lock()
        self._beating: asyncio.Task[None] | None = None  # else it may be collected

    async def claim(self, asked: ClaimRequest) -> ClaimReply:
        """What becomes of a request: RUN, JOIN, KEPT, or UNKNOWN if it may not run.

        Raises:
            BadRequest: the key was used for another request. AnswerNotKept: its answer was too long to be repeated.
            RunLost: its routers died too often. Overloaded: the tenant has too many such requests.
            Unavailable: the actor has not answered in time.
        """
        answered = self.asked[asked.run] = asyncio.Event()
        self._empty_beats = -1  # a beat that is on its way says nothing of this run
        try:
            reply = await in_fresh_context(self._ask(asked), "claim")
        finally:
            del self.asked[asked.run]
            answered.set()
        match reply.verdict:
            case ClaimVerdict.REUSED:
                raise reused()
            case ClaimVerdict.NOT_KEPT:
                raise not_kept()
            case ClaimVerdict.LOST:
                raise RunLost(
                    f"{MAX_RESTARTS + 1} routers that ran this request have died; to run it again, send another key",
                    param="Idempotency-Key",
                )
            case ClaimVerdict.FULL:
                raise Overloaded(
                    "too many requests with an Idempotency-Key run for this tenant",
                    code="queue_full",
                    retry_after_s=1.0,
                )
        return reply

    async def _ask(self, asked: ClaimRequest) -> ClaimReply:
        deadline = time.monotonic() + CLAIM_WAIT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(*AWAY):
                async with asyncio.timeout(CLAIM_CALL_S):
                    reply: ClaimReply = await self._call("exchange", asked)
                if reply.verdict is not ClaimVerdict.WAIT:
                    return reply
            await asyncio.sleep(RETRY_S)
        raise Unavailable(
            "the quota actor, which knows the Idempotency-Keys, does not answer", code="no_quota", retry_after_s=1.0
        )

    def changed(self, run: str) -> None:
        """A claim here has a new state: it is reported at the next beat."""
        self._unreported.pop(run, None)
        self._unreported[run] = None

    async def reported(self, run: str) -> None:
        """Return once the present state of a claim is reported. Raises `AWAY`."""
        while run in self._unreported:
            async with self._reporting:  # one report has the changes of all that wait for it
                if run in self._unreported and not await in_fresh_context(self.report(), "claims"):
                    continue
            if run in self._unreported:  # the actor does not know this router yet
                await asyncio.sleep(RETRY_S)

    async def report(self, *, is_beat: bool = False) -> bool:
        """Report a piece of what is not reported yet; whether there is nothing more to be done now. Raises `AWAY`.

        `is_beat`: with the list of all runs in progress.
        """
        router_session = self._router_session()
        running = frozenset(self._holdings.running() | self.asked.keys())
        runs = list(self._unreported)[:PIECE]
        found = {run: self._holdings.claim_of(run) for run in runs}
        claims = tuple(one for one in found.values() if one is not None)
        report = ClaimReport(
            self._router,
            self._generation,
            claims,
            running if is_beat else None,
            is_whole=len(runs) == len(self._unreported),
        )
        async with asyncio.timeout(CLAIM_CALL_S):
            generation: Generation | None = await self._call("exchange", report)
        if is_beat:
            is_quiet = generation is not None and not running and router_session == self._beat_router_session
            self._empty_beats = self._empty_beats + 1 if is_quiet else 0
            self._beat_router_session = router_session
        if generation is None:
            return True  # nothing more to be had from this actor now
        if generation != self._generation:  # it knows nothing from here
            self._generation = generation
            self._unreported = dict.fromkeys(self._holdings.runs())
            return False
        for run, sent in found.items():
            now = self._holdings.claim_of(run)
            if now is None or (sent is not None and now[0] == sent[0]):
                self._unreported.pop(run, None)
        return not self._unreported

    async def start(self) -> None:
        """Begin to report, in the context of the caller, which must not be a request's."""
        self._beating = asyncio.create_task(self._beat(), name="claims")

    @property
    def is_idle(self) -> bool:
        """Whether the actor knows all of this router already."""
        if (
            self._unreported
            or self.asked
            or self._holdings.running()
            or self._router_session() != self._beat_router_session
        ):
            return False
        return self._empty_beats >= EMPTY_BEATS

    async def _report_all(self) -> None:
        """Report everything that is not reported yet, and all runs in progress. Raises `AWAY`."""
        async with self._reporting:
            is_done = await self.report(is_beat=True)
        while not is_done:
            async with self._reporting:
                is_done = await self.report()

    async def _beat(self) -> None:
        while True:
            try:
                if self.is_idle and self._empty_beats % IDLE_BEATS:
                    self._empty_beats += 1
                else:
                    with contextlib.suppress(*AWAY):
                        await self._report_all()
            except Exception:
                logger.exception(
                    "Router %s could not report its claims and repeats the report. Report this traceback", self._router
                )
            self._holdings.forget_expired()
            await asyncio.sleep(CLAIM_HEARTBEAT_S)
