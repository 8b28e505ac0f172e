"""Reads the turns that a request continues from the store, and stores the turn that it makes.

Invariant: a request that asks for nothing of the store is not changed, and needs no store; of any other the store has
answered before it runs. An answer is kept before its last bytes are sent: a client that has them can continue, unless
they say `store: false`. A client that leaves a stream before that leaves a response with the status `cancelled`, and
what it was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from serve_app.core.responses import (
    CANCELLED,
    FAILED,
    BackgroundJob,
    EventPiece,
    StoredResponse,
    asked_of,
    input_items,
    previous_not_found,
    queued_response,
    record_of,
    response_event,
)
from serve_app.errors import BadRequest, BodyTooLarge, Forbidden, NotFound, ServeAppError, StoreAway
from serve_app.http.body import BodyThread
from serve_app.http.error_responses import JSON
from serve_app.http.response import HttpExchange
from serve_app.http.responses.background_runs import BackgroundRuns
from serve_app.http.responses.following import follow
from serve_app.http.responses.sent_answer import SentAnswer
from serve_app.http.responses.turn import Turn, new_id, turn_of
from serve_app.ray_adapter import in_fresh_context
from serve_app.settings import Settings
from serve_app.store import Store
from serve_app.types import Identity, Operation

logger = logging.getLogger("ray.serve")

KEEP_S = 10.0  # for a store that is away to take a turn: the client waits for its last bytes meanwhile
RETRY_S = 0.25  # between two attempts
NOT_KEPT = {"store": False}  # in a response that was to be kept


class BackgroundKey(NamedTuple):
    """The Idempotency-Key of a background response: its digest, and the fingerprint of what it was sent with."""

    digest: bytes
    fingerprint: bytes


class ResponseMemory:
    """The conversations of one router's requests.

    Args:
        get_store: the store that holds now.
        now: seconds since 1970 UTC.
    """

    def __init__(
        self, get_store: Callable[[], Store], thread: BodyThread, now: Callable[[], float] = time.time
    ) -> None:
        self._get_store = get_store
        self._thread = thread
        self._now = now
        self._runs = BackgroundRuns(lambda: get_store().background, now)
        self._tasks: set[asyncio.Task[bool]] = set()  # else they may be collected

    def configure(self, settings: Settings) -> None:
        """Apply changed settings to requests that arrive from now on; called once before the first."""
        self._settings = settings.responses
        self._http = settings.http
        self._has_workers = bool(settings.batch.workers)
        self._runs.settings = settings.responses

    async def open(
        self,
        operation: Operation,
        sent: Mapping[str, Any],
        identity: Identity,
        sent_bytes: int,
        response_id: str = "",
    ) -> Turn | None:
        """The turn that a body of `sent_bytes` begins; None: it asks for nothing of the store. `response_id`: it is the
        background run of this response.

        Raises:
            BadRequest: a field of a wrong type; nothing is made in the background here; the response before has not
            ended; or the conversation has more values than a body may have. BodyTooLarge: the same of bytes. NotFound:
            it continues a response, or refers to an item, that is not the tenant's or not there. Forbidden: a token
            asks for a background response. StoreAway.
        """
        if operation not in (Operation.RESPONSES, Operation.INPUT_TOKENS):
            return None
        asked = asked_of(sent, by_default=self._settings.store_by_default)
        if operation is Operation.INPUT_TOKENS:
            asked = replace(asked, store=False, background=False)
        if not asked.needs_store:
            return None
        if asked.background:
            self._check_background(identity)
        if asked.store and sent_bytes > self._settings.max_bytes_per_tenant:
            raise BodyTooLarge(
                f"a tenant's stored responses have {self._settings.max_bytes_per_tenant} bytes at most",
                param="store",
                code="storage_quota_exceeded",
            )
        room = max(0, self._http.max_body_bytes - sent_bytes)
        chain = await self._get_store().responses.chain(identity.tenant, asked.previous_id, asked.references, room)
        if chain.missing is not None:
            raise previous_not_found(chain.missing)
        if chain.is_running:
            raise BadRequest(
                f"the response {asked.previous_id} has not ended",
                param="previous_response_id",
                code="response_in_progress",
            )
        if chain.is_too_large:
            raise BodyTooLarge(
                f"the whole conversation may have {self._http.max_body_bytes} bytes at most, and it has more",
                param="input" if asked.previous_id is None else "previous_response_id",
            )
        size = sent_bytes + chain.size
        turn = Turn(asked, identity.tenant, {}, [], size, sent, response_id)
        return await self._thread.run(size, lambda: turn_of(turn, chain, self._http))

    @contextlib.asynccontextmanager
    async def kept(self, turn: Turn | None, exchange: HttpExchange) -> AsyncIterator[None]:
        """Send the answer of the block as the turn's, and keep it if that was asked for. An answer that cannot be kept
        within `KEEP_S` has `store: false` at its end."""
        if turn is None or exchange.operation is Operation.INPUT_TOKENS:  # a count is no response
            yield
            return
        if turn.response_id:
            async with self._runs.logged(turn, exchange):
                yield
            return
        answer = SentAnswer(turn.fields, turn.stored)
        try:
            with exchange.through(answer.over):
                yield
        except asyncio.CancelledError:
            self._keep_left(turn, answer.left(CANCELLED))
            raise
        except ServeAppError as error:
            self._keep_left(turn, answer.left(FAILED, {"code": "server_error", "message": error.message}))
            raise
        response = answer.response()
        if response is not None and turn.asked.store:
            is_kept = await asyncio.shield(self._task(self._keep(turn, response)))
            if not is_kept:  # it was made, and paid for
                answer.change_end(NOT_KEPT)
        await answer.finish()

    async def create(
        self,
        turn: Turn,
        model: str,
        identity: Identity,
        session_id: str | None,
        deadline_s: float | None,
        key: BackgroundKey | None,
    ) -> StoredResponse:
        """Store a background response, which a worker runs; the response as it is stored now.

        Args:
            model: as the client named it.
            deadline_s: from now; it starts before that, or fails.
            key: a repeat under it gets the same response.

        Raises:
            StoreAway. BodyTooLarge: the tenant's bytes have no room for it. ValueError: the key was used with another
            body.
        """
        name = new_id("resp") if key is None else f"resp_{key.digest.hex()}"
        request = {field: value for field, value in turn.sent.items() if field != "background"}
        now = self._now()
        job = BackgroundJob(
            name,
            turn.tenant,
            identity.key_id,
            {**request, "store": True, "stream": True},
            session_id,
            deadline_at=None if deadline_s is None else now + deadline_s,
        )
        queued = queued_response(name, model, turn.body, {**turn.fields, "background": True}, now)
        record = await self._thread.run(turn.size, lambda: self._record(turn, queued))
        events = "".join(response_event(kind, number, queued) for number, kind in enumerate(("created", "queued")))
        bound = self._settings.max_bytes_per_tenant
        beginning = EventPiece(0, 1, events)
        fingerprint = None if key is None else key.fingerprint
        return await self._get_store().background.create(record, job, beginning, bound, fingerprint)

    async def answer(self, turn: Turn, made: StoredResponse, exchange: HttpExchange) -> None:
        """Answer with a background response, or with its stream. Raises StoreAway; NotFound: it was deleted while its
        stream was read."""
        if not turn.body.get("stream"):
            await exchange.send_answer(200, JSON, msgspec.json.encode(made.shown()))
            return
        try:
            await follow(self._get_store().background, made.response_id, turn.tenant, -1, exchange)
        except KeyError:
            raise NotFound(f"{made.response_id} was deleted", code="response_not_found") from None

    def _check_background(self, identity: Identity) -> None:
        """Raises as `open`."""
        if not self._has_workers:
            raise BadRequest(
                "`background` is not supported here: batch.workers is 0", param="background", code="no_batch_workers"
            )
        if identity.is_token:
            raise Forbidden(
                "a background response needs an API key: it runs longer than a token is valid",
                param="background",
                code="needs_api_key",
            )

    def _keep_left(self, turn: Turn, response: dict[str, Any] | None) -> None:
        """Keep what was sent of an answer that does not end, beside whatever its request does next."""
        if response is not None and turn.asked.store:
            self._task(self._keep(turn, response))

    def _task(self, keeping: Coroutine[Any, Any, bool]) -> asyncio.Task[bool]:
        task = in_fresh_context(keeping, "response")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # logged there, or raised to a waiter
        return task

    def _record(self, turn: Turn, response: Mapping[str, Any]) -> StoredResponse:
        inputs = input_items(turn.own, new_id)
        keep_s = self._settings.keep_s
        return record_of(response, inputs, tenant=turn.tenant, now=self._now(), keep_s=keep_s, new_id=new_id)

    async def _keep(self, turn: Turn, response: Mapping[str, Any]) -> bool:
        """Store a turn. False: it could not be stored."""
        record = await self._thread.run(turn.size, lambda: self._record(turn, response))
        bound = self._settings.max_bytes_per_tenant
        name = record.response_id
        if record.size > bound:
            logger.warning("Response %s has more bytes than responses.max_bytes_per_tenant and is not kept", name)
            return False
        loop = asyncio.get_running_loop()
        deadline = loop.time() + KEEP_S
        while True:
            try:
                removed = await self._get_store().responses.add(record, bound)
                break
            except StoreAway as error:
                if loop.time() > deadline:
                    logger.warning("Response %s is not kept, and cannot be continued: %s", name, error)
                    return False
            except Exception:
                logger.exception("Response %s is not kept, and cannot be continued. Report this traceback", name)
                return False
            await asyncio.sleep(RETRY_S)
        if removed:
            logger.info("Response %s takes the place of %d older ones of its tenant", name, removed)
        return True
