"""The ASGI application of a router replica: checks a request, waits for its grant, relays its frames.

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
from serve_app.core.routing import AffinityKey
from serve_app.errors import BadRequest, NotFound, ServeAppError, Unauthorized
from serve_app.http import contract, request_size, routes
from serve_app.http.admin_routes import AdminRoutes
from serve_app.http.body import BodyThread, Receive, decode, read
from serve_app.http.idempotency import IdempotencyCache, Owner, fingerprint
from serve_app.http.keys import KeyRing, tenant_salt
from serve_app.http.local_routes import LocalRoutes
from serve_app.http.queue_status import QueueComments
from serve_app.http.request_cost import CostEstimator, slots_of
from serve_app.http.request_record import RequestRecord, outcome_of_status
from serve_app.http.response import REPLAYED, Headers, HttpExchange, Send
from serve_app.http.session_routes import SessionRoutes
from serve_app.router import ModelRouter, RouterMetrics, SessionClient
from serve_app.settings import Settings
from serve_app.transport import Frame, ResponseStream, Submit
from serve_app.types import Contract, Identity, Operation, Outcome, RequestClass

logger = logging.getLogger("ray.serve")

Scope = MutableMapping[str, Any]

CLIENT_ID_HEADER = b"x-request-id"  # the client's, or HAProxy's own; Serve sends it back
MAX_BYTES_PER_TOKEN = 32  # of text to tokenize, against the model's length: eight times what language needs


@dataclass(slots=True)
class _HttpCall:
    """A request for an engine, once its body has been read."""

    operation: Operation
    identity: Identity
    contract: Contract
    body: dict[str, Any]
    prompt_bytes: int
    model: ModelRouter
    exchange: HttpExchange
    record: RequestRecord
    comments: QueueComments | None = None


class RouterApp:
    """The ASGI callable.

    Args:
        settings: the whole configuration.
        keys: who may call.
        models: the models served now, by name.
        salt_secret: makes each tenant's prefix-cache salt; the same in every router replica.
        session_client: opens agent sessions; None: there are none (no quota actor, in tests).
        admin: answers the admin routes; None: there are none.
        receipts: keeps the receipts of this router's requests; None: a store that only this app reads.
    """

    def __init__(
        self,
        settings: Settings,
        keys: KeyRing,
        models: Mapping[str, ModelRouter],
        metrics: RouterMetrics,
        salt_secret: bytes,
        session_client: SessionClient | None = None,
        admin: AdminRoutes | None = None,
        receipts: Receipts | None = None,
    ) -> None:
        self.settings = settings
        self.keys = keys
        self.models = models
        self._metrics = metrics
        self._salt_secret = salt_secret
        self._salts: dict[str, str] = {}
        self._local_routes = LocalRoutes(models, metrics)
        self.kept_answers = IdempotencyCache(time.monotonic)
        self._body_thread = BodyThread()
        self._session_client = session_client
        self._admin_routes = admin
        self.receipts = Receipts() if receipts is None else receipts
        self.costs = CostEstimator(settings.admission.output_quantile)
        self._service_levels = settings.admission.service_levels
        self._session_routes = None if session_client is None else SessionRoutes(session_client, self._model)

    def configure(self, settings: Settings, keys: KeyRing) -> None:
        """Apply changed settings to requests that arrive from now on."""
        self.settings = settings
        self.keys = keys
        self.costs.configure(settings.admission.output_quantile)
        self._service_levels = settings.admission.service_levels

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            await self._handle_http(scope, receive, send)
        else:  # a websocket: not supported
            await send({"type": "websocket.close", "code": 1000})

    async def _handle_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = HttpExchange(send)
        try:
            headers = scope["headers"]
            _refuse_serve_headers(headers)
            identity = self.keys.identify(headers)
            route = routes.resolve(scope["method"], scope["path"])
            if isinstance(route.target, Operation):
                await self._run_operation(route.target, identity, headers, receive, exchange)
            elif isinstance(route.target, routes.SessionCall):
                opens = route.target is routes.SessionCall.OPEN
                body = (await self._read_body(headers, receive))[0] if opens else {}
                if self._session_routes is None:
                    raise NotFound("there are no sessions here", code="unknown_url")
                answer = await self._session_routes.answer(route, identity, headers, body, self.settings.sessions)
                await exchange.send_answer(*answer, is_head=route.is_head)
            elif isinstance(route.target, routes.AdminCall):
                if self._admin_routes is None:
                    raise NotFound("there is no quota actor here", code="unknown_url")
                await exchange.send_answer(*await self._admin_routes.answer(route, identity), is_head=route.is_head)
            else:
                await exchange.send_answer(*await self._local_routes.answer(route, identity), is_head=route.is_head)
        except Unauthorized as error:
            self._metrics.count_ended("", "", RequestClass.NORMAL, Outcome.UNAUTHORIZED)
            await exchange.send_error(error)
        except ServeAppError as error:
            await exchange.send_error(error)
        except Exception:
            logger.exception("request %s failed inside the router", exchange.request_id)
            await exchange.send_error(ServeAppError("the server failed; its log says more"))

    async def _run_operation(
        self, operation: Operation, identity: Identity, headers: Headers, receive: Receive, exchange: HttpExchange
    ) -> None:
        """Run an engine operation, from reading the body to recording the outcome."""
        client_id = next((value.decode("latin-1") for name, value in headers if name == CLIENT_ID_HEADER), None)
        exchange.request_id, exchange.operation = secrets.token_hex(16), operation
        record = RequestRecord(
            exchange.request_id, client_id, operation, identity.tenant, identity.default_class, time.monotonic()
        )
        try:
            sent, size = await self._read_body(headers, receive)
            model = self._model(sent.get("model"))
            record.model = model.settings.name
            http, longest = self.settings.http, model.max_model_len
            body, wanted = await self._body_thread.run(
                size, lambda: contract.split(operation, sent, headers, identity, http, longest)
            )
            prompt_bytes = await self._body_thread.run(size, lambda: request_size.prompt_bytes(operation, body))
            record.request_class, record.deadline_s = wanted.request_class, wanted.deadline_s
            if operation.generates:
                record.service_level, record.streamed = (
                    self._service_levels.get(wanted.request_class),
                    bool(body.get("stream")),
                )
            call = _HttpCall(operation, identity, wanted, body, prompt_bytes, model, exchange, record)
            if wanted.queue_status:
                call.comments = QueueComments(lambda: model.queue.status(record.request_id), exchange.send_comment)
            if wanted.idempotency_key is None:
                await self._run(call)
            else:
                print_ = await self._body_thread.run(size, lambda: fingerprint(operation, body))
                await self._run_idempotent(call, (identity.tenant, wanted.idempotency_key), print_)
            record.outcome = outcome_of_status(exchange.status)
        except asyncio.CancelledError:
            record.outcome = Outcome.CANCELLED_RUNNING if record.is_granted else Outcome.CANCELLED_QUEUED
            raise
        except ServeAppError as error:
            record.set_error(error)
            raise
        finally:
            self._record_end(record)

    async def _read_body(self, headers: Headers, receive: Receive) -> tuple[dict[str, Any], int]:
        """The decoded body, and its size in bytes on arrival. Raises as `read` and `decode`."""
        raw, bounds = await read(headers, receive, self.settings.http), self.settings.http
        return await self._body_thread.run(len(raw), lambda: decode(raw, bounds)), len(raw)

    def _record_end(self, record: RequestRecord) -> None:
        """Report the ended request to the metrics, the receipts and the cost estimator."""
        self._metrics.count_ended(record.model, record.tenant, record.request_class, record.outcome)
        receipt = record.receipt(time.monotonic())
        self.receipts.add(receipt)
        if receipt.slo is not None:
            self._metrics.count_slo(record.model, record.request_class, receipt.slo, receipt.output_tokens or 0)
        use, cost = record.token_use(), record.cost
        if use is not None and cost is not None:
            self.costs.observe(use)
            if record.usage is not None:
                given, used = (cost.prompt_tokens, cost.output_tokens), (use.prompt_tokens, use.output_tokens)
                self._metrics.count_estimated(record.model, record.tenant, given, used)

    async def _run_idempotent(self, call: _HttpCall, owner: Owner, body_fingerprint: bytes) -> None:
        """Run a request with an Idempotency-Key, or repeat its kept answer."""
        exchange = call.exchange
        kept = await self.kept_answers.claim(owner, body_fingerprint)
        if kept is not None:
            await exchange.send_answer(kept.status, [*kept.headers, REPLAYED], kept.body)
            return
        head = None
        try:
            exchange.on_sent = functools.partial(self.kept_answers.add, owner)
            await self._run(call)
            head = exchange.repeatable_head()
        finally:
            exchange.on_sent = None
            self.kept_answers.finish(owner, head)

    def _model(self, name: object) -> ModelRouter:
        if not isinstance(name, str):
            raise BadRequest("`model` must be a string, the name of a model", param="model")
        model = self.models.get(name)
        if model is None:
            known = ", ".join(sorted(self.models))
            raise NotFound(
                f"the model {name!r} does not exist here; there is {known}", param="model", code="model_not_found"
            )
        return model

    async def _run(self, call: _HttpCall) -> None:
        """Wait for a replica, and relay its answer."""
        submit, relay = functools.partial(self._submit, call), functools.partial(self._relay, call)
        if not call.operation.takes_slot:
            check_unqueued_size(call.prompt_bytes, call.model.max_model_len)
            await call.model.serve_unqueued(submit, relay, call.record.trace)
            return
        arrival, key = self._arrival(call), self._routing_key(call)
        async with call.comments or contextlib.nullcontext():
            await call.model.serve(arrival, submit, relay, key, call.record.trace)

    def _arrival(self, call: _HttpCall) -> Arrival:
        """The request as the queue sees it, with its estimated cost."""
        operation, body, record, model = call.operation, call.body, call.record, call.model
        sequences = request_size.sequence_count(operation, body, self.settings.http)
        tenant, session_id, session = call.identity.tenant, call.contract.session_id, None
        if self._session_client is not None and session_id is not None and operation.generates:
            session = self._session_client.find(tenant, session_id, record.model)
        cost = record.cost = self.costs.estimate(operation, body, tenant, record.model, call.prompt_bytes)
        slots = record.slots = slots_of(operation, sequences, cost, model.settings.length_rule, model.max_request_slots)
        record.trace.max_kv_tokens, record.trace.sequences = cost.max_kv_tokens, min(sequences, slots)
        return Arrival(
            request_id=record.request_id,
            request_class=call.contract.request_class,
            tenant=tenant,
            slots=slots,
            cost_tokens=cost.tokens,
            prompt_tokens=cost.prompt_tokens,
            deadline=None if record.deadline_s is None else record.started + record.deadline_s,
            affinity=None if session is None else session.engine,
            session=None if session is None or sequences > 1 else session.lease,
        )

    def _routing_key(self, call: _HttpCall) -> AffinityKey | None:
        """The key that requests of one session or one prefix share; replicas that run them have the prefix cached."""
        assert call.record.cost is not None  # `_arrival` comes first
        tenant, session_id, prompt_tokens = (
            call.identity.tenant,
            call.contract.session_id,
            call.record.cost.prompt_tokens,
        )
        return request_size.routing_key(
            call.operation, call.body, tenant, session_id, prompt_tokens, call.model.kv_block_tokens
        )

    def _submit(self, call: _HttpCall, number: int) -> Submit:
        """The message for the granted replica."""
        call.record.granted_at = time.monotonic()
        return Submit(
            number=number,
            request_id=call.record.request_id,
            operation=call.operation,
            body=call.body,
            priority=RequestClass.CRITICAL - call.contract.request_class,
            cache_salt=self._salt(call.identity.tenant),
            slots=call.record.trace.sequences,
        )

    async def _relay(self, call: _HttpCall, stream: ResponseStream, frames: list[Frame]) -> None:
        """Send the answer to the client, from its first frames on."""
        record, request_class = call.record, call.contract.request_class
        if call.comments is not None:
            await call.comments.end()
        tokens = 0 if record.cost is None else record.cost.tokens
        self._metrics.count_granted(record.model, request_class, record.trace.waited_s, tokens)
        record.stream = stream
        if call.operation.generates:
            first, record.first_token_s = record.first_token_s is None, time.monotonic() - record.started
            if first:  # a repeat after a lost replica has had its first token already
                self._metrics.observe_first_token(record.model, request_class, record.first_token_s)
        record.usage = used = (await call.exchange.relay(stream, frames)).usage
        if used is not None:
            self._metrics.count_tokens(record.model, record.tenant, used.prompt_tokens, used.completion_tokens)

    def _salt(self, tenant: str) -> str:
        salt = self._salts.get(tenant)
        if salt is None:
            salt = self._salts[tenant] = tenant_salt(self._salt_secret, tenant)
        return salt


def check_unqueued_size(prompt_bytes: int, max_model_len: int | None) -> None:
    """Work that takes no slot is bounded by its size: the tokenizer serves all tenants, one text at a time."""
    if max_model_len is not None and prompt_bytes > MAX_BYTES_PER_TOKEN * max_model_len:
        raise BadRequest(
            f"the text is longer than {MAX_BYTES_PER_TOKEN} bytes for each of the {max_model_len} tokens of the model",
            param="prompt",
        )


def _refuse_serve_headers(headers: Headers) -> None:
    """Serve acts on such headers before this app runs: this one lets an abandoned request keep its slot to the end."""
    for name, _ in headers:
        if name == b"x-request-disconnect-disabled":
            raise BadRequest("this header is not accepted here", param="x-request-disconnect-disabled")


async def _lifespan(receive: Receive, send: Send) -> None:
    """Acknowledges startup and shutdown; the router replica's constructor does the set-up."""
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        elif message["type"] == "lifespan.shutdown":
            await send({"type": "lifespan.shutdown.complete"})
            return
