"""The ASGI application of a router replica: checks a request, lets it wait its turn, relays its frames.

Invariant: every request with a key that reaches an engine route ends in exactly one `Outcome` and leaves one receipt
(who has no key leaves none, or strangers could push the others out); no byte of a client's header goes
on to an engine; nothing is answered without a key.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from serve_app.core.queue import Arrival
from serve_app.core.receipts import Receipts
from serve_app.core.routing import Key
from serve_app.errors import BadRequest, NotFound, ServeAppError, Unauthorized
from serve_app.http import contract, request_size, routes
from serve_app.http.admin_routes import AdminRoutes
from serve_app.http.body import Apart, Receive, decode, read
from serve_app.http.idempotency import Owner, Replays, fingerprint
from serve_app.http.keys import KeyRing, tenant_salt
from serve_app.http.local_routes import LocalRoutes
from serve_app.http.queue_status import QueueComments
from serve_app.http.request_cost import Costs, slots_of
from serve_app.http.request_record import Record, answered
from serve_app.http.response import REPLAYED, Exchange, Headers, Send
from serve_app.http.session_routes import SessionRoutes
from serve_app.router import ModelRouter, RouterMetrics, SessionBook
from serve_app.settings import Settings
from serve_app.transport import Frame, Stream, Submit
from serve_app.types import Contract, Identity, Operation, Outcome, RequestClass

logger = logging.getLogger("ray.serve")

Scope = MutableMapping[str, Any]

CLIENT_ID_HEADER = b"x-request-id"  # the client's, or HAProxy's own; Serve sends it back
MAX_BYTES_PER_TOKEN = 32  # of text to tokenize, against the model's length: eight times what language needs


@dataclass(slots=True)
class _Call:
    """A request for an engine, once its body has been read."""

    operation: Operation
    identity: Identity
    wanted: Contract
    body: dict[str, Any]
    prompt_bytes: int
    model: ModelRouter
    exchange: Exchange
    record: Record
    comments: QueueComments | None = None


class RouterApp:
    """The ASGI callable.

    Args:
        settings: the whole configuration.
        keys: who may call.
        models: by name; always the present ones.
        salt_secret: makes each tenant's prefix-cache salt; the same in every router replica.
        book: the agent sessions; None: there are none (no quota actor, in tests).
        admin: answers operators; None likewise.
        receipts: where those of this router's requests are kept; None: seen by nobody but this.
    """

    def __init__(
        self,
        settings: Settings,
        keys: KeyRing,
        models: Mapping[str, ModelRouter],
        metrics: RouterMetrics,
        salt_secret: bytes,
        book: SessionBook | None = None,
        admin: AdminRoutes | None = None,
        receipts: Receipts | None = None,
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._models = models
        self._metrics = metrics
        self._salt_secret = salt_secret
        self._salts: dict[str, str] = {}
        self._local = LocalRoutes(models, metrics)
        self._replays = Replays(time.monotonic)
        self._apart = Apart()
        self._book = book
        self._admin = admin
        self._receipts = Receipts() if receipts is None else receipts
        self._costs = Costs(settings.admission.output_quantile)
        self._levels = settings.admission.levels
        self._sessions = None if book is None else SessionRoutes(book, self._model)

    def configure(self, settings: Settings, keys: KeyRing) -> None:
        """Take over changed settings: they hold for requests that come from now on."""
        self._settings = settings
        self._keys = keys
        self._costs.configure(settings.admission.output_quantile)
        self._levels = settings.admission.levels

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:  # a websocket: not spoken here
            await send({"type": "websocket.close", "code": 1000})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(send)
        try:
            headers = scope["headers"]
            _refuse_serve_headers(headers)
            identity = self._keys.identify(headers)
            route = routes.resolve(scope["method"], scope["path"])
            if isinstance(route.target, Operation):
                await self._operate(route.target, identity, headers, receive, exchange)
            elif isinstance(route.target, routes.SessionCall):
                opens = route.target is routes.SessionCall.OPEN
                body = (await self._decoded(headers, receive))[0] if opens else {}
                if self._sessions is None:
                    raise NotFound("there are no sessions here", code="unknown_url")
                answer = await self._sessions.answer(route, identity, headers, body, self._settings.sessions)
                await exchange.whole(*answer, head=route.head)
            elif isinstance(route.target, routes.AdminCall):
                if self._admin is None:
                    raise NotFound("there is no quota actor here", code="unknown_url")
                await exchange.whole(*await self._admin.answer(route, identity), head=route.head)
            else:
                await exchange.whole(*await self._local.answer(route, identity), head=route.head)
        except Unauthorized as error:
            self._metrics.ended("", "", RequestClass.NORMAL, Outcome.UNAUTHORIZED)
            await exchange.fail(error)
        except ServeAppError as error:
            await exchange.fail(error)
        except Exception:
            logger.exception("request %s failed inside the router", exchange.request_id)
            await exchange.fail(ServeAppError("the server failed; its log says more"))

    async def _operate(
        self, operation: Operation, identity: Identity, headers: Headers, receive: Receive, exchange: Exchange
    ) -> None:
        """An engine operation, from its body to its outcome."""
        client_id = next((value.decode("latin-1") for name, value in headers if name == CLIENT_ID_HEADER), None)
        exchange.request_id, exchange.operation = secrets.token_hex(16), operation
        record = Record(
            exchange.request_id, client_id, operation, identity.tenant, identity.default_class, time.monotonic()
        )
        try:
            sent, size = await self._decoded(headers, receive)
            model = self._model(sent.get("model"))
            record.model = model.settings.name
            http, longest = self._settings.http, model.max_model_len
            body, wanted = await self._apart.run(
                size, lambda: contract.split(operation, sent, headers, identity, http, longest)
            )
            prompt_bytes = await self._apart.run(size, lambda: request_size.prompt_bytes(operation, body))
            record.request_class, record.deadline_s = wanted.request_class, wanted.deadline_s
            if operation.generates:
                record.level, record.streamed = self._levels.get(wanted.request_class), bool(body.get("stream"))
            call = _Call(operation, identity, wanted, body, prompt_bytes, model, exchange, record)
            if wanted.queue_status:
                call.comments = QueueComments(lambda: model.status(record.request_id), exchange.comment)
            if wanted.idempotency_key is None:
                await self._run(call)
            else:
                print_ = await self._apart.run(size, lambda: fingerprint(operation, body))
                await self._run_once(call, (identity.tenant, wanted.idempotency_key), print_)
            record.outcome = answered(exchange.status)
        except asyncio.CancelledError:
            record.outcome = Outcome.CANCELLED_RUNNING if record.granted else Outcome.CANCELLED_QUEUED
            raise
        except ServeAppError as error:
            record.failed(error)
            raise
        finally:
            self._ended(record)

    async def _decoded(self, headers: Headers, receive: Receive) -> tuple[dict[str, Any], int]:
        """The body, and its size in bytes as it came. Raises as `read` and `decode`."""
        raw, bounds = await read(headers, receive, self._settings.http), self._settings.http
        return await self._apart.run(len(raw), lambda: decode(raw, bounds)), len(raw)

    def _ended(self, record: Record) -> None:
        """Tell whoever keeps account of requests."""
        self._metrics.ended(record.model, record.tenant, record.request_class, record.outcome)
        receipt = record.receipt(time.monotonic())
        self._receipts.add(receipt)
        if receipt.slo is not None:
            self._metrics.judged(record.model, record.request_class, receipt.slo, receipt.output_tokens or 0)
        use, cost = record.use(), record.cost
        if use is not None and cost is not None:
            self._costs.observe(use)
            if record.usage is not None:
                given, used = (cost.prompt_tokens, cost.output_tokens), (use.prompt_tokens, use.output_tokens)
                self._metrics.estimated(record.model, record.tenant, given, used)

    async def _run_once(self, call: _Call, owner: Owner, print_: bytes) -> None:
        """Run a request with an Idempotency-Key, or repeat its kept answer."""
        exchange = call.exchange
        kept = await self._replays.claim(owner, print_)
        if kept is not None:
            await exchange.whole(kept.status, [*kept.headers, REPLAYED], kept.body)
            return
        head = None
        try:
            exchange.keep = functools.partial(self._replays.add, owner)
            await self._run(call)
            head = exchange.final()
        finally:
            exchange.keep = None
            self._replays.settle(owner, head)

    def _model(self, name: object) -> ModelRouter:
        if not isinstance(name, str):
            raise BadRequest("`model` must be a string, the name of a model", param="model")
        model = self._models.get(name)
        if model is None:
            known = ", ".join(sorted(self._models))
            raise NotFound(
                f"the model {name!r} does not exist here; there is {known}", param="model", code="model_not_found"
            )
        return model

    async def _run(self, call: _Call) -> None:
        """Wait for a replica, and relay its answer."""
        submit, relay = functools.partial(self._submit, call), functools.partial(self._relay, call)
        if not call.operation.takes_slot:
            _bound_aside(call.prompt_bytes, call.model.max_model_len)
            await call.model.serve_aside(submit, relay, call.record.trace)
            return
        arrival, key = self._arrival(call), self._key(call)
        async with call.comments or contextlib.nullcontext():
            await call.model.serve(arrival, submit, relay, key, call.record.trace)

    def _arrival(self, call: _Call) -> Arrival:
        """The request as the queue sees it, with what it is estimated to cost."""
        operation, body, record, model = call.operation, call.body, call.record, call.model
        sequences = request_size.slots(operation, body, self._settings.http)
        tenant, session_id, session = call.identity.tenant, call.wanted.session_id, None
        if self._book is not None and session_id is not None and operation.generates:
            session = self._book.find(tenant, session_id, record.model)
        cost = record.cost = self._costs.of(operation, body, tenant, record.model, call.prompt_bytes)
        slots = record.slots = slots_of(operation, sequences, cost, model.settings.lengths, model.largest)
        record.trace.most_tokens, record.trace.sequences = cost.most_tokens, min(sequences, slots)
        return Arrival(
            request_id=record.request_id,
            request_class=call.wanted.request_class,
            tenant=tenant,
            slots=slots,
            cost_tokens=cost.tokens,
            prompt_tokens=cost.prompt_tokens,
            deadline=None if record.deadline_s is None else record.started + record.deadline_s,
            affinity=None if session is None else session.engine,
            session=None if session is None or sequences > 1 else session.lease,
        )

    def _key(self, call: _Call) -> Key | None:
        """What its session or its prompt has in common with others; where they run, its prefix is cached."""
        assert call.record.cost is not None  # `_arrival` comes first
        tenant, session_id, prompt_tokens = call.identity.tenant, call.wanted.session_id, call.record.cost.prompt_tokens
        return request_size.key(
            call.operation, call.body, tenant, session_id, prompt_tokens, call.model.kv_block_tokens
        )

    def _submit(self, call: _Call, number: int) -> Submit:
        """What a replica is handed, once there is one."""
        call.record.granted_at = time.monotonic()
        return Submit(
            number=number,
            request_id=call.record.request_id,
            operation=call.operation,
            body=call.body,
            priority=RequestClass.CRITICAL - call.wanted.request_class,
            cache_salt=self._salt(call.identity.tenant),
            slots=call.record.trace.sequences,
        )

    async def _relay(self, call: _Call, stream: Stream, frames: list[Frame]) -> None:
        """Send the answer to the client, from its first frames on."""
        record, request_class = call.record, call.wanted.request_class
        if call.comments is not None:
            await call.comments.end()
        tokens = 0 if record.cost is None else record.cost.tokens
        self._metrics.granted(record.model, request_class, record.trace.waited_s, tokens)
        record.stream = stream
        if call.operation.generates:
            first, record.first_token_s = record.first_token_s is None, time.monotonic() - record.started
            if first:  # and not lost, to run again
                self._metrics.first_token(record.model, request_class, record.first_token_s)
        record.usage = used = (await call.exchange.relay(stream, frames)).usage
        if used is not None:
            self._metrics.tokens(record.model, record.tenant, used.prompt_tokens, used.completion_tokens)

    def _salt(self, tenant: str) -> str:
        salt = self._salts.get(tenant)
        if salt is None:
            salt = self._salts[tenant] = tenant_salt(self._salt_secret, tenant)
        return salt


def _bound_aside(prompt_bytes: int, max_model_len: int | None) -> None:
    """Work that takes no slot is bounded by its size instead: the tokenizer serves everybody, one text at a time."""
    if max_model_len is not None and prompt_bytes > MAX_BYTES_PER_TOKEN * max_model_len:
        raise BadRequest(
            f"the text is longer than {MAX_BYTES_PER_TOKEN} bytes for each of the {max_model_len} tokens of the model",
            param="prompt",
        )


def _refuse_serve_headers(headers: Headers) -> None:
    """Serve acts on these before we see the request: one would let an abandoned request keep its slot to the end."""
    for name, _ in headers:
        if name == b"x-request-disconnect-disabled":
            raise BadRequest("this header is not accepted here", param="x-request-disconnect-disabled")


async def _lifespan(receive: Receive, send: Send) -> None:
    """Nothing to set up here: the router replica's constructor has done it."""
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        elif message["type"] == "lifespan.shutdown":
            await send({"type": "lifespan.shutdown.complete"})
            return
