"""The ASGI application of a router replica: checks a request, lets it wait its turn, relays its frames.

Invariant: every request that reaches an engine route ends in exactly one `Outcome`; no byte of a client's header goes
on to an engine; nothing is answered without a key.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from serve_app.channel import Stream
from serve_app.core.admission import Arrival
from serve_app.dispatch import Granted, ModelLine
from serve_app.engine.protocol import Frame, Submit
from serve_app.errors import BadRequest, BodyTooLarge, EngineFailed, NotFound, Overloaded, ServeAppError, Unauthorized
from serve_app.http import contract, measure, routes
from serve_app.http.body import check_content, decode
from serve_app.http.idempotency import Answer, Owner, Replays, fingerprint
from serve_app.http.keys import KeyRing, tenant_salt
from serve_app.http.local_routes import LocalRoutes
from serve_app.http.responses import error_response, sse_error
from serve_app.settings import Settings
from serve_app.telemetry.metrics import RouterMetrics
from serve_app.types import Contract, Identity, Operation, Outcome, RequestClass

logger = logging.getLogger("ray.serve")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

# The id inside the OpenAI object's; `x-request-id` is Serve's own, and echoes what the client sends.
REQUEST_ID_HEADER = b"x-serve-app-request-id"

_REPLAYED = (b"x-idempotent-replay", b"true")
_SSE_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_JSON_HEADERS: Headers = [(b"content-type", b"application/json")]


class Edge:
    """The ASGI callable.

    Args:
        settings: the whole configuration.
        keys: who may call.
        lines: one line per model, by the model's name.
        salt_secret: makes each tenant's prefix-cache salt; the same in every router replica.
    """

    def __init__(
        self,
        settings: Settings,
        keys: KeyRing,
        lines: Mapping[str, ModelLine],
        metrics: RouterMetrics,
        salt_secret: bytes,
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._lines = lines
        self._metrics = metrics
        self._salt_secret = salt_secret
        self._salts: dict[str, str] = {}
        self._local = LocalRoutes(lines, metrics)
        self._replays = Replays(time.monotonic)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:  # a websocket: not spoken here
            await send({"type": "websocket.close", "code": 1000})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = _Exchange(send)
        try:
            headers = scope["headers"]
            _refuse_serve_headers(headers)
            identity = self._keys.identify(headers)
            route = routes.resolve(scope["method"], scope["path"])
            if isinstance(route.target, Operation):
                await self._operate(route.target, identity, headers, receive, exchange)
            else:
                status, found, body = await self._local.answer(route)
                await exchange.whole(status, found, body, head=route.head)
        except ServeAppError as error:
            await exchange.fail(error)
        except Exception:
            logger.exception("request %s failed inside the router", exchange.request_id)
            await exchange.fail(ServeAppError("the server failed; its log says more"))

    async def _operate(
        self, operation: Operation, identity: Identity, headers: Headers, receive: Receive, exchange: _Exchange
    ) -> None:
        """An engine operation, from its body to its outcome."""
        started = time.monotonic()
        record = _Record(identity.tenant, identity.default_class)
        try:
            body = await self._read(headers, receive)
            line = self._line(body.get("model"))
            record.model = line.model.name
            body, wanted = contract.split(operation, body, headers, identity, self._settings.http, line.max_model_len)
            record.request_class = wanted.request_class
            run = functools.partial(self._run, operation, body, wanted, identity, line, exchange, record, started)
            if wanted.idempotency_key is None:
                await run()
            else:
                owner = (identity.tenant, wanted.idempotency_key)
                await self._run_once(owner, fingerprint(operation, body), exchange, run)
            record.outcome = Outcome.OK if exchange.status < 400 else Outcome.BAD_REQUEST
        except asyncio.CancelledError:
            record.outcome = Outcome.CANCELLED_RUNNING if record.granted else Outcome.CANCELLED_QUEUED
            raise
        except ServeAppError as error:
            record.outcome = _outcome(error)
            raise
        finally:
            self._metrics.ended(record.model, record.tenant, record.request_class, record.outcome)

    async def _run_once(
        self, owner: Owner, print_: bytes, exchange: _Exchange, run: Callable[[], Awaitable[None]]
    ) -> None:
        """Run a request with an Idempotency-Key, or repeat its kept answer."""
        kept = await self._replays.claim(owner, print_)
        if kept is not None:
            await exchange.whole(kept.status, [*kept.headers, _REPLAYED], kept.body)
            return
        answer = None
        try:
            exchange.record()
            await run()
            answer = exchange.recorded()
        finally:
            self._replays.settle(owner, answer)

    async def _read(self, headers: Headers, receive: Receive) -> dict[str, Any]:
        """The request's body, decoded; refused as soon as it is seen to be too large."""
        bound = self._settings.http.max_body_bytes
        check_content(headers, bound)
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise asyncio.CancelledError
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > bound:
                raise BodyTooLarge(f"the body is larger than {bound} bytes", param="body")
            chunks.append(chunk)
            if not message.get("more_body", False):
                break
        return decode(chunks[0] if len(chunks) == 1 else b"".join(chunks), self._settings.http)

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
        wanted: Contract,
        identity: Identity,
        line: ModelLine,
        exchange: _Exchange,
        record: _Record,
        started: float,
    ) -> None:
        request_id = secrets.token_hex(16)
        exchange.request_id, exchange.operation = request_id, operation
        slots = measure.slots(operation, body, self._settings.http)
        if operation is Operation.EMBEDDING:
            slots = min(slots, line.largest)  # inputs end one by one: a call of many takes a whole replica, not more

        def make(number: int) -> Submit:
            record.granted = True
            return Submit(
                number=number,
                request_id=request_id,
                operation=operation,
                body=body,
                priority=RequestClass.CRITICAL - wanted.request_class,
                cache_salt=self._salt(identity.tenant),
                slots=slots,
            )

        async def relay(stream: Stream, frames: list[Frame], granted: Granted) -> None:
            now = time.monotonic()
            self._metrics.waited(record.model, wanted.request_class, granted.waited_s)
            if operation.generates:
                self._metrics.first_token(record.model, wanted.request_class, now - started)
            last = await exchange.relay(stream, frames)
            if last.usage is not None:
                self._metrics.tokens(
                    record.model, identity.tenant, last.usage.prompt_tokens, last.usage.completion_tokens
                )

        if not operation.takes_slot:
            await line.serve_aside(make, relay)
            return
        arrival = Arrival(
            request_id=request_id,
            request_class=wanted.request_class,
            tenant=identity.tenant,
            slots=slots,
            cost_tokens=measure.estimate_tokens(operation, body),
            deadline=None if wanted.deadline_s is None else started + wanted.deadline_s,
            affinity=line.preferred(wanted.session_id),
        )
        await line.serve(arrival, make, relay)

    def _salt(self, tenant: str) -> str:
        salt = self._salts.get(tenant)
        if salt is None:
            salt = self._salts[tenant] = tenant_salt(self._salt_secret, tenant)
        return salt


class _Record:
    """What the metrics are told about a request when it ends."""

    __slots__ = ("granted", "model", "outcome", "request_class", "tenant")

    def __init__(self, tenant: str, request_class: RequestClass) -> None:
        self.tenant = tenant
        self.request_class = request_class
        self.model = ""
        self.granted = False
        self.outcome = Outcome.INTERNAL_ERROR


class _Exchange:
    """The answering half of one HTTP exchange."""

    __slots__ = ("_headers", "_kept", "_send", "_streaming", "operation", "request_id", "status")

    def __init__(self, send: Send) -> None:
        self._send = send
        self._streaming = False
        self.status = 0
        self.request_id = ""
        self.operation = Operation.CHAT
        self._headers: Headers = []
        self._kept: list[bytes] | None = None

    def record(self) -> None:
        """Keep a copy of what goes out from now on."""
        self._kept = []

    def recorded(self) -> Answer | None:
        """What has gone out since `record`; None where a repeat should be run again."""
        final = 200 <= self.status < 500 and self.status != 429
        return Answer(self.status, self._headers, b"".join(self._kept)) if final and self._kept is not None else None

    async def whole(self, status: int, headers: Headers, body: bytes, *, head: bool = False) -> None:
        """A complete answer; `head`: all of it but the body."""
        self.status, self._headers = status, headers
        if self._kept is not None:
            self._kept.append(body)
        headers = [*headers, (b"content-length", b"%d" % len(body))]
        if self.request_id:
            headers.append((REQUEST_ID_HEADER, self.request_id.encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": b"" if head else body, "more_body": False})

    async def relay(self, stream: Stream, frames: list[Frame]) -> Frame:
        """Send frames as they arrive, up to the last, which is returned.

        Raises:
            EngineFailed: the engine broke; what has been sent stays sent.
        """
        first = frames[0]
        if first.media == "json":
            while frames[-1].usage is None:
                frames += await stream.next()
            body = b"".join([frame.body for frame in frames])
            await self.whole(first.status, _JSON_HEADERS, body)
            return frames[-1]
        self.status, self._streaming, self._headers = first.status, True, _SSE_HEADERS
        headers = [*_SSE_HEADERS, (REQUEST_ID_HEADER, self.request_id.encode())]
        await self._send({"type": "http.response.start", "status": first.status, "headers": headers})
        while True:
            last = frames[-1].usage is not None
            body = frames[0].body if len(frames) == 1 else b"".join([frame.body for frame in frames])
            if self._kept is not None:
                self._kept.append(body)
            if body or last:
                await self._send({"type": "http.response.body", "body": body, "more_body": not last})
            if last:
                return frames[-1]
            frames = await stream.next()

    async def fail(self, error: ServeAppError) -> None:
        """Say what went wrong: as a status while nothing is sent, as an event of the stream after that."""
        if self._streaming:
            await self._send(
                {"type": "http.response.body", "body": sse_error(error, self.operation), "more_body": False}
            )
        elif not self.status:
            await self.whole(*error_response(error))


def _outcome(error: ServeAppError) -> Outcome:
    match error:
        case EngineFailed():
            return Outcome.ENGINE_FAILED
        case Overloaded():
            return Outcome.REFUSED
        case Unauthorized():
            return Outcome.UNAUTHORIZED
        case _ if error.status == 503:
            return Outcome.REFUSED
        case _ if error.status < 500:
            return Outcome.BAD_REQUEST
        case _:
            return Outcome.INTERNAL_ERROR


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
