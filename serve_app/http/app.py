"""The ASGI application of a router replica: checks a request, waits for its grant, relays its frames.

Invariant: every request with a key that reaches an engine route ends in exactly one `Outcome` and leaves one receipt
(who has no key leaves none, or strangers could push the others out); no byte of a client's header goes
on to an engine; nothing is answered without a key. Of a header sent twice, the last one counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl

from serve_app.core.continuation import is_preemptible
from serve_app.core.estimate import Estimator
from serve_app.core.queue import Arrival
from serve_app.core.receipts import Receipts
from serve_app.errors import TASK_ENDS, EngineFailed, ServeAppError, Unauthorized
from serve_app.http import contract, request_size, routes
from serve_app.http.asgi_bridge import ROW_OWNER
from serve_app.http.batch_lane import BatchLane
from serve_app.http.batch_routes import BatchRoutes
from serve_app.http.body import BodyThread, Receive, decode, inflate, is_gzip, read
from serve_app.http.cors import Handler, with_cors
from serve_app.http.error_responses import CLIENT_ID_HEADER, Answer
from serve_app.http.file_routes import FileRoutes
from serve_app.http.idempotency import fingerprint
from serve_app.http.key_routes import KeyRoutes
from serve_app.http.keyed_runs import KeyedRequest, KeyedRuns
from serve_app.http.keys import KeyRing, tenant_salt
from serve_app.http.local_routes import LocalRoutes, model_named, not_an_operator
from serve_app.http.malformed_requests import check_headers
from serve_app.http.multipart import FormReader
from serve_app.http.prompt_list import MergedExchange, PromptExchange, PromptTurns, bodies_of, run_together
from serve_app.http.queue_status import QueueComments, queue_status
from serve_app.http.request_limits import RETRY_COUNT_HEADER, Charge, RequestLimits
from serve_app.http.request_record import RequestRecord, recorded
from serve_app.http.response import HttpExchange, PieceAnswer, Send
from serve_app.http.session_routes import SessionRoutes
from serve_app.http.stored_keys import KeyFollower
from serve_app.router import LimitClient, ModelRouter, RequestTrace, RouterMetrics, SessionClient, UsageReporter
from serve_app.settings import Settings
from serve_app.transport import Frame, ResponseStream, Submit
from serve_app.types import Contract, Identity, Operation, Outcome, RequestClass

logger = logging.getLogger("ray.serve")

Scope = MutableMapping[str, Any]
HeaderMap = Mapping[bytes, bytes]  # by name in lower case


@dataclass(slots=True)
class _HttpCall:
    """A request for an engine, once its body has been read."""

    record: RequestRecord
    contract: Contract
    body: dict[str, Any]
    prompt_bytes: int
    model: ModelRouter
    exchange: HttpExchange
    comments: QueueComments | None
    charge: Charge
    part: PromptExchange | None = None  # of a list of prompts
    on_granted: Callable[[], None] | None = None  # of such a part


class RouterApp:
    """The ASGI callable.

    Args:
        settings: the whole configuration.
        models: the models served now, by name.
        salt_secret: makes each tenant's prefix-cache salt; the same in every router replica.
        session_client: finds and opens agent sessions.
        local_routes: answers the routes that need no engine.
        receipts: keeps the receipts of this router's requests.
        limits: charges requests against the limits of keys and tenants, together with all routers.
        usage: counts what they use.
        keyed_runs: runs the requests with an Idempotency-Key.
        follower: follows the keys of the store; None: there is none.
        batches: where batches and their files are; None: nowhere.

    Raises:
        ConfigError: there is no key; so does `configure`, which changes nothing then.
    """

    def __init__(
        self,
        settings: Settings,
        models: Mapping[str, ModelRouter],
        metrics: RouterMetrics,
        salt_secret: bytes,
        session_client: SessionClient,
        local_routes: LocalRoutes,
        receipts: Receipts,
        limits: LimitClient,
        usage: UsageReporter,
        keyed_runs: KeyedRuns,
        follower: KeyFollower | None = None,
        batches: BatchLane | None = None,
    ) -> None:
        self.models = models
        self._metrics = metrics
        self._salt = functools.cache(functools.partial(tenant_salt, salt_secret))
        self._session_client = session_client
        self._session_routes = SessionRoutes(session_client, models)
        self._local_routes = local_routes
        self._stored = None if follower is None else follower.stored
        self._key_routes = KeyRoutes(follower, lambda: self.keys, lambda: self.settings)
        self.receipts = receipts
        self.usage = usage
        self.keyed_runs = keyed_runs
        self._body_thread = BodyThread()
        self._file_routes = FileRoutes(batches, lambda: self.settings, self._body_thread)
        self._batch_routes = BatchRoutes(batches, lambda: self.settings)
        self.estimator = Estimator()
        self._limits = RequestLimits(limits, self.estimator, metrics, lambda: self.keys)
        self.configure(settings)

    def configure(self, settings: Settings) -> None:
        """Apply changed settings to requests that arrive from now on."""
        self.keys = KeyRing(settings.auth, self._stored)
        self.settings = settings
        self._limits.configure(settings)
        self.estimator.configure(settings.admission.output_quantile)
        self._service_levels = settings.admission.service_levels
        origins = settings.http.cors_origins
        self._handler: Handler = with_cors(self._handle_http, origins) if origins else self._handle_http

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._handler(scope, receive, send)
        elif scope["type"] == "lifespan":  # the router replica's constructor does the set-up
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()  # Serve sends it once the last request has ended
            await self.usage.close()
            await send({"type": "lifespan.shutdown.complete"})
        else:  # a websocket: not supported
            await send({"type": "websocket.close", "code": 1000})

    async def _handle_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = HttpExchange(send)
        try:
            headers = dict(scope["headers"])
            identity = self.keys.identify(headers, scope.get(ROW_OWNER))
            check_headers(scope, headers)
            route = routes.permitted(routes.resolve(scope["method"], scope["path"]), identity)
            if isinstance(route.target, Operation):
                query = self._operator_s_query(identity, scope) if route.target is Operation.TOKENIZER_INFO else None
                await self._run_operation(route.target, identity, headers, receive, exchange, query)
                return
            answer = await self._answer(route, identity, headers, scope, receive)
            if isinstance(answer, PieceAnswer):
                await exchange.send_pieces(answer, is_head=scope["method"] == "HEAD")
            else:
                await exchange.send_answer(*answer, is_head=scope["method"] == "HEAD")
        except Unauthorized as error:
            self._metrics.count_ended("", "", RequestClass.NORMAL, Outcome.UNAUTHORIZED)
            await exchange.send_error(error)
        except ServeAppError as error:
            await exchange.send_error(error)
        except TASK_ENDS:
            raise
        except BaseException:
            logger.exception("request %s failed inside the router", exchange.request_id)
            await exchange.send_error(ServeAppError("the server failed; its log says more"))

    async def _answer(
        self, route: routes.HttpRoute, identity: Identity, headers: HeaderMap, scope: Scope, receive: Receive
    ) -> Answer | PieceAnswer:
        """The answer of a route that needs no engine."""
        query = scope.get("query_string", b"")
        read_body = functools.partial(self._read_body, headers, receive)
        if isinstance(route.target, routes.SessionCall):
            body = (await read_body())[0] if route.target is routes.SessionCall.OPEN else {}
            session_id = headers.get(b"x-session-id")
            per_tenant = self.settings.sessions.per_tenant
            return await self._session_routes.answer(route, identity, session_id, body, per_tenant)
        if isinstance(route.target, routes.KeyCall):
            changes = route.target is routes.KeyCall.UPDATE
            return await self._key_routes.answer(route, identity, functools.partial(read_body, changes))
        if isinstance(route.target, routes.FileCall):
            open_form = functools.partial(FormReader, headers, receive)
            return await self._file_routes.answer(route, identity, query, open_form)
        if isinstance(route.target, routes.BatchCall):
            return await self._batch_routes.answer(route, identity, query, headers, read_body)
        return await self._local_routes.answer(route, identity, query)

    async def _run_operation(
        self,
        operation: Operation,
        identity: Identity,
        headers: HeaderMap,
        receive: Receive,
        exchange: HttpExchange,
        query: dict[str, Any] | None,
    ) -> None:
        """Run an engine operation, from reading the body to recording the outcome. `query`: in place of a body."""
        client_id = headers[CLIENT_ID_HEADER].decode("latin-1") if CLIENT_ID_HEADER in headers else None
        exchange.request_id = secrets.token_hex(16)
        exchange.operation = operation
        record = RequestRecord(
            exchange.request_id, client_id, operation, identity.tenant, identity.default_class, time.monotonic()
        )
        record.recorder = exchange
        record.key_id = identity.key_id
        record.trace.is_row = identity.is_row
        with recorded(record, exchange, self._record_end):
            sent, raw = await self._read_body(headers, receive) if query is None else (query, b"")
            size = len(raw)
            model = model_named(self.models, sent.get("model"), identity)
            record.model = model.settings.name
            http = self.settings.http
            longest = model.limits.max_model_len
            body, wanted = await self._body_thread.run(
                size, lambda: contract.split(operation, sent, headers, identity, http, longest)
            )
            prompt_bytes = await self._body_thread.run(size, lambda: request_size.prompt_bytes(operation, body))
            record.request_class = wanted.request_class
            record.deadline_s = wanted.deadline_s
            if operation.generates:
                record.service_level = self._service_levels.get(wanted.request_class)
                record.streamed = bool(body.get("stream"))
            comments = None
            status = functools.partial(queue_status, model, record)
            if wanted.queue_status or record.streamed:
                comments = QueueComments(status, exchange.send_comment, from_start=wanted.queue_status)
            retry_count = headers.get(RETRY_COUNT_HEADER)
            charge = self._limits.charge(identity, record, body, prompt_bytes, raw, retry_count, longest)
            del raw  # megabytes, perhaps, for as long as the request runs
            exchange.limit_headers = functools.partial(self._limits.headers, charge.scopes)
            call = _HttpCall(record, wanted, body, prompt_bytes, model, exchange, comments, charge)
            if wanted.idempotency_key is None:
                await self._run(call)
            else:
                await self._run_keyed(call, await self._body_thread.run(size, lambda: fingerprint(operation, body)))

    def _operator_s_query(self, identity: Identity, scope: Scope) -> dict[str, Any]:
        """The fields of the query; without `model`, the only model there is. Raises Forbidden."""
        if not identity.admin:
            raise not_an_operator()
        query: dict[str, Any] = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1")))
        return {"model": next(iter(self.models)), **query} if len(self.models) == 1 else query

    async def _read_body(
        self, headers: HeaderMap, receive: Receive, with_nulls: bool = False
    ) -> tuple[dict[str, Any], bytes]:
        """The decoded body, and its bytes. Raises as `read`, `inflate` and `decode`."""
        bounds = self.settings.http
        raw = sent = await read(headers, receive, bounds)
        if is_gzip(headers):
            raw = await self._body_thread.run(bounds.max_body_bytes, lambda: inflate(sent, bounds.max_body_bytes))
        return await self._body_thread.run(len(raw), lambda: decode(raw, bounds, with_nulls=with_nulls)), raw

    def _record_end(self, record: RequestRecord) -> None:
        """Report the ended request to the metrics, the receipts and the cost estimator."""
        self._metrics.count_ended(record.model, record.tenant, record.request_class, record.outcome)
        self.usage.end(record.request_id, record.use())
        self._metrics.count_continued(record.model, record.request_class, record.trace)
        receipt = record.receipt(time.monotonic())
        self.receipts.add(receipt)
        self._metrics.count_served(receipt, is_streamed=record.streamed)
        for part in record.parts or [record]:
            use = part.token_use()
            cost = part.cost
            if use is not None:
                self.estimator.observe(use)
                if part.usage is not None:
                    given = (cost.prompt_tokens, cost.output_tokens)
                    used = (use.prompt_tokens, use.output_tokens)
                    self._metrics.count_estimated(part.model, part.tenant, given, used)

    async def _run_keyed(self, call: _HttpCall, body_fingerprint: bytes) -> None:
        """Run a request with an Idempotency-Key, or repeat its answer."""
        record = call.record

        async def run(exchange: HttpExchange) -> None:
            with recorded(record, exchange, self._record_end):
                await self._run(replace(call, exchange=exchange, comments=None))

        count = functools.partial(self._metrics.count_keyed, record.model)
        request = KeyedRequest(record, call.contract, body_fingerprint, call.exchange, call.comments, run, count)
        await self.keyed_runs.answer(request)

    async def _run(self, call: _HttpCall) -> None:
        """Charge the request against its limits, and run it."""
        async with self._limits.charged(call.charge, call.record, lambda: call.exchange.status):
            await self._run_charged(call)

    async def _run_charged(self, call: _HttpCall) -> None:
        """Wait for a replica, and relay its answer."""
        operation = call.record.operation
        body = call.body
        model = call.model
        if not operation.takes_slot:
            submit = functools.partial(self._submit, call)
            relay = functools.partial(self._relay, call)
            await model.serve_unqueued(submit, relay, call.record.trace, call.record.tenant)
            return
        sequences = request_size.sequence_count(operation, body, self.settings.http)
        bodies = bodies_of(operation, body)
        async with call.comments or contextlib.nullcontext():
            if len(bodies) == 1:
                await self._run_queued(call, sequences)
            else:
                await self._run_list(call, bodies)

    async def _run_list(self, call: _HttpCall, bodies: list[dict[str, Any]]) -> None:
        """Run the parts of a list, each as a request of its own."""
        record = call.record
        parts = []
        operation = call.record.operation
        counts = [request_size.sequence_count(operation, body, self.settings.http) for body in bodies]
        merged = MergedExchange(call.exchange, operation, call.body, counts)
        turns = PromptTurns(max(1, call.model.limits.slots // max(counts)))  # as many as an engine runs

        async def run(part: _HttpCall, sequences: int) -> None:
            async with turns.turn() as part.on_granted:
                has_begun = any(one.granted_at is not None for one in record.parts)
                if has_begun:
                    part.record.deadline_s = None  # it bounds the start of the list
                await self._run_queued(part, sequences, accepted=has_begun)

        for number, body in enumerate(bodies):
            part = replace(record, request_id=f"{record.request_id}-{number}", trace=RequestTrace(is_row=record.is_row))
            size = request_size.prompt_bytes(operation, body)
            parts.append(replace(call, record=part, body=body, prompt_bytes=size, part=PromptExchange(merged, number)))
        record.parts = [part.record for part in parts]
        try:
            tasks = [asyncio.ensure_future(run(*one)) for one in zip(parts, counts, strict=True)]
            await merged.end(await run_together(tasks, merged))
        finally:
            record.add_up_parts()

    async def _run_queued(self, call: _HttpCall, sequences: int, *, accepted: bool = False) -> None:
        """Wait for a grant of so many sequences on a replica, and relay the answer. `accepted`: see `Arrival`."""
        operation = call.record.operation
        body = call.body
        record = call.record
        model = call.model
        limits = model.limits
        tenant = record.tenant
        session_id = call.contract.session_id
        session = None
        if session_id is not None and operation.generates:
            session = self._session_client.find(tenant, session_id, record.model)
        cost = record.cost = request_size.estimate(
            self.estimator, operation, body, tenant, record.model, call.prompt_bytes, limits.max_model_len
        )
        rule = model.settings.length_rule
        slots = record.slots = request_size.slots_of(operation, sequences, cost, rule, limits.slots)
        record.trace.max_output_tokens = cost.max_output_tokens
        record.trace.sequences = min(sequences, slots)
        arrival = Arrival(
            request_id=record.request_id,
            request_class=record.request_class,
            tenant=tenant,
            slots=slots,
            cost_tokens=cost.tokens,
            prompt_tokens=cost.prompt_tokens,
            deadline=None if record.deadline_s is None else record.started + record.deadline_s,
            affinity=None if session is None else session.engine,
            accepted=accepted,
            session=None if session is None or sequences > 1 or call.part is not None else session.lease,
            preemptible=is_preemptible(operation, body),
        )
        key = request_size.routing_key(operation, body, tenant, session_id, cost.prompt_tokens, limits.kv_block_tokens)
        submit = functools.partial(self._submit, call)
        await model.serve(arrival, submit, functools.partial(self._relay, call), key, record.trace)

    def _submit(self, call: _HttpCall, number: int) -> Submit:
        """The message for the granted replica."""
        record = call.record
        record.on_submit(time.monotonic(), time.time())
        if record.operation.takes_slot:
            prices = None if (given := call.model.settings.prices) is None else given.token_prices()
            # a list of prompts is one request, and has the id of its answer
            self.usage.begin(call.exchange.request_id, record.key_id, record.tenant, record.used_model, prices)
        if call.on_granted is not None:
            call.on_granted()
        return Submit(
            number=number,
            request_id=record.request_id,
            operation=record.operation,
            body=call.body,
            priority=RequestClass.CRITICAL - record.request_class,
            cache_salt=self._salt(record.tenant),
            slots=record.trace.sequences,
            service_tier=call.contract.service_tier,
            prompt_tokens=record.cost.prompt_tokens,
            output_tokens=record.cost.output_tokens,
            created=record.created,
            is_load=call.model.settings.replicas.counts(is_row=record.is_row),
            query_counted=call.part is not None and call.part.query_counted,
        )

    async def _relay(self, call: _HttpCall, stream: ResponseStream, frames: list[Frame]) -> None:
        """Send the answer to the client, from the first frames of a run on."""
        record = call.record
        exchange = call.exchange
        part = call.part
        if call.comments is not None:
            await call.comments.end()
        if not record.trace.client_has_part:
            tokens = record.cost.tokens if record.operation.takes_slot else 0
            self._metrics.count_granted(record.model, record.request_class, record.trace, tokens)
        first_token_s = record.on_first_frames(stream)
        if first_token_s is not None and (part is None or part.begin()):  # a list has one
            self._metrics.observe_first_token(record.model, record.request_class, first_token_s)
        relay = exchange.relay(stream, frames, record.time_headers) if part is None else part.relay(stream, frames)
        try:
            last = await relay
        except EngineFailed:
            if call.comments is not None and part is None and stream.client_has_seen:
                call.comments.resume()  # for the wait of a stream that goes on
            raise
        record.usage = used = last.usage
        if used is not None:
            self._metrics.count_tokens(record.model, record.tenant, used.prompt_tokens, used.completion_tokens)
