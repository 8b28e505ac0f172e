"""Requests with an `Idempotency-Key`: each runs once, whatever router its repeats reach.

The quota actor says what becomes of a request (`claim_client`). A run is a task of its own that writes into a log
(`idempotency`); the client that began it reads the log like every repeat, here or through another router. A complete
answer is copied to a second router before its last bytes go out.

Invariant: a run that nobody reads for its grace is aborted. Once a client has received bytes of one run, it gets no
bytes of another. No wait for another process is longer than a constant below.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Hashable, Iterator, MutableMapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from serve_app.core.claims import Claim, ClaimReply, ClaimRequest, ClaimState, ClaimVerdict
from serve_app.core.times import JOIN_S, PART_WAIT_S, RUN_GRACE_S
from serve_app.errors import DROPPED, AnswerNotKept, EngineFailed, ServeAppError, Unavailable
from serve_app.http.engine_call import EngineCall
from serve_app.http.error_responses import Headers
from serve_app.http.idempotency import AnswerCopy, AnswerPart
from serve_app.http.keyed.answers import AnswerLog, AnswerStore, key_digest
from serve_app.http.keyed.claim_client import Call, ClaimClient
from serve_app.http.response import REPLAYED, HttpExchange
from serve_app.ray_adapter import CALL_ERRORS, NO_ANSWER, in_fresh_context

logger = logging.getLogger("ray.serve")

COPY_S = 1.0  # for the copy of an answer, and the actor's word of it; the client waits meanwhile
RETRY_S = 0.25  # between two attempts to reach it


class Routers(Protocol):
    """The router replicas."""

    def names(self) -> frozenset[str]:
        """Their ids, this one's included."""

    def call(self, replica_id: str, method: str, *arguments: Any) -> Awaitable[Any]:
        """Call a method of one of them. Raises CALL_ERRORS."""


@dataclass(frozen=True, slots=True)
class KeyedRequest:
    """One request with a key.

    Args:
        call: the id of its record is the name of its run, if it runs.
        fingerprint: of its body.
        run: runs it into another exchange, and records it.
        count: counts what became of it.
    """

    call: EngineCall
    fingerprint: bytes
    run: Callable[[HttpExchange], Coroutine[Any, Any, None]]
    count: Callable[[str], None]

    @property
    def grace_s(self) -> float:
        return RUN_GRACE_S if self.call.contract.grace_s is None else self.call.contract.grace_s


@dataclass(slots=True)
class _Run:
    """A run in progress here. `abort`: pending while nobody reads it."""

    log: AnswerLog
    grace_s: float
    task: asyncio.Task[None] | None = None
    abort: asyncio.TimerHandle | None = None


class _Gone(Exception):
    """The run has to be found again: this router does not have it (`is_sure`), or does not answer."""

    def __init__(self, router: str, *, is_sure: bool) -> None:
        super().__init__(router)
        self.router = router
        self.is_sure = is_sure


class KeyedRuns:
    """The runs of one router; see the module.

    Args:
        router: its id.
        call, router_session: as `ClaimClient`.
        routers: all of them.
    """

    def __init__(self, router: str, call: Call, routers: Routers, router_session: Callable[[], Hashable]) -> None:
        self._router = router
        self._routers = routers
        self.store = AnswerStore(time.monotonic)
        self.claims = ClaimClient(router, call, self.store, router_session)
        self.runs: dict[str, _Run] = {}

    async def start(self) -> None:
        """Begin to report to the actor and to follow the other routers, in the context of the caller, which must not be
        a request's."""
        await self.claims.start()
        self._routers.names()  # Serve sends them from now on

    async def answer(self, request: KeyedRequest) -> None:
        """Answer a request: by its own run, by joining one, or by a kept answer.

        Raises:
            ServeAppError: as `ClaimClient.claim`, and what its run raises. Unavailable: the run cannot be reached.
        """
        async with request.call.comments or contextlib.nullcontext():
            relay = _Relay(request.call)
            gone = None
            deadline = None
            while True:
                reply = await self._claim(request, relay, gone)
                try:
                    await relay.send(self._parts(reply, relay), reply)
                    break
                except _Gone as error:
                    gone = (error.router, reply.run) if error.is_sure else None
                    relay.unreachable.add(error.router)
                deadline = deadline or time.monotonic() + JOIN_S
                if time.monotonic() > deadline:
                    raise Unavailable("the router of this run does not answer", code="no_router", retry_after_s=1.0)
                await asyncio.sleep(0.0 if gone else RETRY_S)
        if reply.run == request.call.record.request_id:
            request.count("restarted" if reply.restarts else "run")
        else:
            request.count("joined" if reply.verdict is ClaimVerdict.JOIN else "replayed")

    async def _claim(self, request: KeyedRequest, relay: _Relay, gone: tuple[str, str] | None) -> ClaimReply:
        """The run whose answer the client gets; begun here if it is the request's own."""
        record = request.call.record
        key = key_digest(record.key_owner, request.call.contract.idempotency_key or "")
        may_run = not relay.sent and not request.call.contract.replay_only
        asked = ClaimRequest(self._router, record.key_owner, key, request.fingerprint, record.request_id, may_run, gone)
        reply = await self.claims.claim(asked)
        if reply.verdict is ClaimVerdict.UNKNOWN or (relay.sent and reply.run != relay.run):
            raise EngineFailed("the router that ran this request has died, or the run has failed", code="run_lost")
        relay.run = reply.run
        if reply.verdict is ClaimVerdict.RUN and reply.run not in self.runs:
            self._begin(request, asked, reply.restarts)
        elif reply.run in self.runs:
            run = self.runs[reply.run]
            run.grace_s = max(run.grace_s, request.grace_s)
        return reply

    def _begin(self, request: KeyedRequest, asked: ClaimRequest, restarts: int) -> None:
        """Start the run of a request as a task of its own."""
        routers = (self._router,)
        claim = Claim(asked.tenant, asked.key, asked.fingerprint, asked.run, ClaimState.RUNNING, routers, restarts)
        run = self.runs[claim.run] = _Run(self.store.begin(claim), request.grace_s)

        async def write(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.body":
                is_last = not message.get("more_body", False)
                await self.store.append(run.log, exchange.head, message["body"], is_last=is_last)

        exchange = HttpExchange(write)
        call = request.call
        exchange.request_id = call.exchange.request_id
        exchange.operation = call.exchange.operation
        call.record.recorder = exchange
        call.record.trace.router_losses = restarts
        run.task = in_fresh_context(self._execute(run, request.run(exchange)), f"run-{claim.run}")
        self.claims.changed(claim.run)

    async def _execute(self, run: _Run, running: Coroutine[Any, Any, None]) -> None:
        """A run from its start until its last bytes may go out."""
        log = run.log
        error = None
        try:
            await running
        except ServeAppError as raised:
            error = raised
        except asyncio.CancelledError:  # by the timer: nobody reads it
            error = Unavailable("the client has left, and its run was aborted", code=DROPPED)
        except BaseException:  # else its readers would wait for ever
            logger.exception(
                "Run %s failed inside the router, and its clients get a 500. Report this traceback", log.claim.run
            )
            error = ServeAppError("the server failed; its log says more")
        del self.runs[log.claim.run]  # from here on nothing aborts it
        if run.abort is not None:
            run.abort.cancel()
        if error is None and log.head is not None and is_repeatable(log.head[0]):
            self.store.keep(log)
            try:
                await self._spread(log)
            finally:
                self.store.seal(log)
        else:
            self.store.seal(log, error)
            self.store.forget(log)

    async def _spread(self, log: AnswerLog) -> None:
        """Copy a complete answer to a second router and report it to the actor, within `COPY_S`."""
        run = log.claim.run
        try:
            async with asyncio.timeout(COPY_S):
                others = list(self._routers.names() - {self._router}) if log.is_kept else []
                for other in random.sample(others, len(others)):
                    both = replace(log.claim, routers=(self._router, other))
                    if await self._copy(other, AnswerCopy(both, log.head or (0, []), bytes(log.body))):
                        log.claim = both
                        break
                self.claims.changed(run)
                await self.claims.reported(run)
        except NO_ANSWER as error:
            self.claims.changed(run)  # for the next beat
            logger.warning("Run %s has its answer on this router only and loses it with this router: %r", run, error)

    async def _copy(self, other: str, copy: AnswerCopy) -> bool:
        try:
            await self._routers.call(other, "keep_answer", copy)
        except CALL_ERRORS as error:
            run = copy.claim.run
            logger.warning("Router %s did not keep a copy of run %s; another router is asked: %r", other, run, error)
            return False
        return True

    async def _parts(self, reply: ClaimReply, relay: _Relay) -> AsyncGenerator[AnswerPart, None]:
        """The answer of a run from `relay.sent` on, wherever it is. Raises _Gone."""
        offset = relay.sent
        log = await self._log(reply.run)
        if log is not None:
            with self._reading(log, offset) as reader:
                while True:
                    part = log.part(offset)
                    if part is None:
                        await log.changed()
                        continue
                    yield part
                    offset = log.offsets[reader] = offset + len(part.body)
                    self.store.trim(log)
        others = [one for one in reply.routers if one != self._router]
        if len(others) < len(reply.routers):
            raise _Gone(self._router, is_sure=True)
        router = min(others, key=lambda name: name in relay.unreachable)
        while True:
            try:
                # in a context of its own: the calling HTTP request must not decide how replies are read
                async with asyncio.timeout(2 * PART_WAIT_S):
                    part = await in_fresh_context(self._ask_part(router, reply.run, offset), "part")
            except NO_ANSWER as error:
                logger.warning(
                    "Router %s did not send the answer of run %s; it is looked up again: %r", router, reply.run, error
                )
                raise _Gone(router, is_sure=False) from None
            if part is None:
                raise _Gone(router, is_sure=True)
            yield part
            offset += len(part.body)

    async def _log(self, run: str) -> AnswerLog | None:
        """The log of a run; None: it is not here. A run whose claim is not answered yet is waited for: that ends
        within `CLAIM_WAIT_S` and a call."""
        if (asked := self.claims.asked.get(run)) is not None:
            await asked.wait()
        return self.store.logs.get(run)

    async def _ask_part(self, router: str, run: str, offset: int) -> AnswerPart | None:
        part: AnswerPart | None = await self._routers.call(router, "answer_part", run, offset)
        return part

    @contextlib.contextmanager
    def _reading(self, log: AnswerLog, offset: int) -> Iterator[object]:
        """A reader of a log: while there is one, its run is not aborted."""
        run = self.runs.get(log.claim.run)
        reader = object()
        log.offsets[reader] = offset
        if run is not None and run.abort is not None:
            run.abort.cancel()
        log.notify()
        try:
            yield reader
        finally:
            del log.offsets[reader]
            self.store.trim(log)
            log.notify()
            if not log.offsets and (run := self.runs.get(log.claim.run)) is not None and run.task is not None:
                run.abort = asyncio.get_running_loop().call_later(run.grace_s, run.task.cancel)

    # What other routers call.

    async def part(self, run: str, offset: int) -> AnswerPart | None:
        """The answer of a run from an offset on; without a body if there is nothing new in `PART_WAIT_S`. None: the run
        is not here."""
        try:
            async with asyncio.timeout(PART_WAIT_S):
                log = await self._log(run)
                if log is None:
                    return None
                with self._reading(log, offset):
                    while (part := log.part(offset)) is None:
                        await log.changed()
                    return part
        except TimeoutError:
            return AnswerPart(None)

    def keep(self, copy: AnswerCopy) -> None:
        """Keep the answer of another router's run."""
        self.store.keep_copy(copy)
        self.claims.changed(copy.claim.run)


class _Relay:
    """Sends the answer of a run to one client.

    Args:
        sent: bytes of the answer that the client has; `run`: the run they are of.
        unreachable: routers that did not answer this request.
    """

    def __init__(self, call: EngineCall) -> None:
        self._call = call
        self.sent = 0
        self.run = ""
        self.unreachable: set[str] = set()

    async def send(self, parts: AsyncGenerator[AnswerPart, None], reply: ClaimReply) -> None:
        """Send the parts to their end.

        Raises:
            ServeAppError: what the run raised. _Gone: a repeat has received nothing, and the run has no answer.
        """
        exchange = self._call.exchange
        is_own = reply.run == self._call.record.request_id
        body = b""
        async with contextlib.aclosing(parts):
            async for part in parts:
                if part.error is not None:
                    if is_own or self.sent or isinstance(part.error, AnswerNotKept):
                        raise part.error
                    raise _Gone(reply.routers[0], is_sure=True)
                if part.head is None:
                    continue
                status, headers = part.head
                more = [] if is_own else [REPLAYED]
                if is_stream(headers):
                    if part.body or part.is_last:
                        await self._end_comments()
                        await exchange.send_part(status, [*headers, *more], part.body, is_last=part.is_last)
                        self.sent += len(part.body)
                else:
                    body += part.body
                if not part.is_last:
                    continue
                if not is_own and not is_repeatable(status):
                    raise _Gone(reply.routers[0], is_sure=True)
                if not is_stream(headers):
                    await self._end_comments()
                    times = self._call.record.time_headers() if is_own else []
                    await exchange.send_answer(status, [*headers, *more], body, times=times)
                return

    async def _end_comments(self) -> None:
        if self._call.comments is not None:
            await self._call.comments.end()


def is_repeatable(status: int) -> bool:
    """Whether a repeat gets this answer again; after others the request runs again."""
    return 200 <= status < 500 and status != 429


def is_stream(headers: Headers) -> bool:
    """Whether an answer with these headers is sent as it comes."""
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)
