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
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from serve_app.channel import Stream
from serve_app.core.admission import Arrival
from serve_app.core.receipts import Receipts
from serve_app.dispatch import Granted, ModelLine
from serve_app.engine.protocol import Frame, Submit
from serve_app.errors import BadRequest, NotFound, ServeAppError, Unauthorized
from serve_app.http import contract, measure, routes
from serve_app.http.admin_routes import AdminRoutes
from serve_app.http.body import Apart, Receive, decode, read
from serve_app.http.cost import Costs, slots_of
from serve_app.http.exchange import REPLAYED, Exchange, Headers, Send
from serve_app.http.idempotency import Owner, Replays, fingerprint
from serve_app.http.keys import KeyRing, tenant_salt
from serve_app.http.local_routes import LocalRoutes
from serve_app.http.queue_status import QueueComments
from serve_app.http.record import Record, answered
from serve_app.http.session_routes import SessionRoutes
from serve_app.session_book import SessionBook
from serve_app.settings import Settings
from serve_app.telemetry.metrics import RouterMetrics
from serve_app.types import Contract, Identity, Operation, Outcome, RequestClass

logger = logging.getLogger("ray.serve")

Scope = MutableMapping[str, Any]

CLIENT_ID_HEADER = b"x-request-id"  # the client's, or HAProxy's own; Serve sends it back
MAX_BYTES_PER_TOKEN = 32  # of text to tokenize, against the model's length: eight times what language needs


class Edge:
    """The ASGI callable.

    Args:
        settings: the whole configuration.
        keys: who may call.
        lines: one line per model, by the model's name; always the present ones.
        salt_secret: makes each tenant's prefix-cache salt; the same in every router replica.
        book: the agent sessions; None: there are none (no quota actor, in tests).
        admin: answers operators; None likewise.
        receipts: where those of this router's requests are kept; None: seen by nobody but this.
    """

    def __init__(
        self,
        settings: Settings,
        keys: KeyRing,
        lines: Mapping[str, ModelLine],
        metrics: RouterMetrics,
        salt_secret: bytes,
        book: SessionBook | None = None,
        admin: AdminRoutes | None = None,
        receipts: Receipts | None = None,
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._lines = lines
        self._metrics = metrics
        self._salt_secret = salt_secret
        self._salts: dict[str, str] = {}
        self._local = LocalRoutes(lines, metrics)
        self._replays = Replays(time.monotonic)
        self._apart = Apart()
        self._book = book
        self._admin = admin
        self._receipts = Receipts() if receipts is None else receipts
        self._costs = Costs(settings.admission.output_quantile)
        self._levels = settings.admission.levels
        self._sessions = None if book is None else SessionRoutes(book, self._line)

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
                status, found, body = await self._local.answer(route, identity)
                await exchange.whole(status, found, body, head=route.head)
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
            line = self._line(sent.get("model"))
            record.model = line.model.name
            http, longest = self._settings.http, line.max_model_len
            body, wanted = await self._apart.run(
                size, lambda: contract.split(operation, sent, headers, identity, http, longest)
            )
            prompt_bytes = await self._apart.run(size, lambda: measure.prompt_bytes(operation, body))
            record.request_class, record.deadline_s = wanted.request_class, wanted.deadline_s
            if operation.generates:
                record.level, record.streamed = self._levels.get(wanted.request_class), bool(body.get("stream"))
            run = functools.partial(self._run, operation, body, prompt_bytes, wanted, identity, line, exchange, record)
            if wanted.idempotency_key is None:
                await run()
            else:
                owner = (identity.tenant, wanted.idempotency_key)
                print_ = await self._apart.run(size, lambda: fingerprint(operation, body))
                await self._run_once(owner, print_, exchange, run)
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

    async def _run_once(
        self, owner: Owner, print_: bytes, exchange: Exchange, run: Callable[[], Awaitable[None]]
    ) -> None:
        """Run a request with an Idempotency-Key, or repeat its kept answer."""
        kept = await self._replays.claim(owner, print_)
        if kept is not None:
            await exchange.whole(kept.status, [*kept.headers, REPLAYED], kept.body)
            return
        head = None
        try:
            exchange.keep = functools.partial(self._replays.add, owner)
            await run()
            head = exchange.final()
        finally:
            exchange.keep = None
            self._replays.settle(owner, head)

    def _line(self, name: object) -> ModelLine:
        if not isinstance(name, str):
            raise BadRequest("`model` must be a string, the name of a model", param="model")
        line = self._lines.get(name)
        if line is None:
            known = ", ".join(sorted(self._lines))
            raise NotFound(
                f"the model {name!r} does not exist here; there is {known}", param="model", code="model_not_found"
            )
        return line

    async def _run(
        self,
        operation: Operation,
        body: dict[str, Any],
        prompt_bytes: int,
        wanted: Contract,
        identity: Identity,
        line: ModelLine,
        exchange: Exchange,
        record: Record,
    ) -> None:
        sequences = measure.slots(operation, body, self._settings.http)

        comments = None
        if wanted.queue_status:
            comments = QueueComments(lambda: line.status(record.request_id), exchange.comment)

        def make(number: int) -> Submit:
            record.granted_at = time.monotonic()
            return Submit(
                number=number,
                request_id=record.request_id,
                operation=operation,
                body=body,
                priority=RequestClass.CRITICAL - wanted.request_class,
                cache_salt=self._salt(identity.tenant),
                slots=record.trail.sequences,
            )

        async def relay(stream: Stream, frames: list[Frame], granted: Granted) -> None:
            if comments is not None:
                await comments.end()
            tokens = 0 if record.cost is None else record.cost.tokens
            self._metrics.granted(record.model, wanted.request_class, granted.waited_s, tokens)
            record.stream = stream
            if operation.generates:
                first, record.first_token_s = record.first_token_s is None, time.monotonic() - record.started
                if first:  # and not lost, to run again
                    self._metrics.first_token(record.model, wanted.request_class, record.first_token_s)
            record.usage = used = (await exchange.relay(stream, frames)).usage
            if used is not None:
                self._metrics.tokens(record.model, identity.tenant, used.prompt_tokens, used.completion_tokens)

        if not operation.takes_slot:
            _bound_aside(prompt_bytes, line.max_model_len)
            await line.serve_aside(make, relay, record.trail)
            return
        session = None
        if self._book is not None and wanted.session_id is not None and operation.generates:
            session = await self._book.find(identity.tenant, wanted.session_id, line.model.name)
        cost = record.cost = self._costs.of(operation, body, identity.tenant, record.model, prompt_bytes)
        slots = record.slots = slots_of(operation, sequences, cost, line.model.lengths, line.largest)
        record.trail.most_tokens, record.trail.sequences = cost.most_tokens, min(sequences, slots)
        arrival = Arrival(
            request_id=record.request_id,
            request_class=wanted.request_class,
            tenant=identity.tenant,
            slots=slots,
            cost_tokens=cost.tokens,
            prompt_tokens=cost.prompt_tokens,
            deadline=None if wanted.deadline_s is None else record.started + wanted.deadline_s,
            affinity=None if session is None else session.pool,
        )
        block = line.kv_block_tokens
        key = measure.key(operation, body, identity.tenant, wanted.session_id, cost.prompt_tokens, block)
        async with comments or contextlib.nullcontext():
            await line.serve(arrival, make, relay, session, key, record.trail)

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
