"""Runs the engine operations: reads a request, charges it, waits for its grant, relays its frames, records its end.

Invariant: every request that is run here ends in exactly one `Outcome` and leaves one receipt; of a client's headers
its trace alone goes on to an engine, and only where it is valid.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import secrets
import time
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from typing import Any

from serve_app.core.estimate import Estimator
from serve_app.core.names import TOO_LARGE_CODES, ModelHops
from serve_app.core.queue import Arrival
from serve_app.core.spans import passed_on, trace_of
from serve_app.errors import BadRequest, EngineFailed, NotFound, RequestFailed, ServeAppError
from serve_app.http.api import RouterParts
from serve_app.http.audio_form import read_sent
from serve_app.http.body import HeaderMap, Receive
from serve_app.http.call_maker import CallMaker
from serve_app.http.engine_call import AskedCall, EngineCall
from serve_app.http.error_responses import CLIENT_ID_HEADER
from serve_app.http.keyed import KeyedRequest, fingerprint, key_digest, reused
from serve_app.http.keys import KeyRing, tenant_salt
from serve_app.http.open_requests import OpenRequests
from serve_app.http.prompt_list import MergedExchange, PromptExchange, PromptTurns, run_together
from serve_app.http.prompt_log import warn_of_prompts
from serve_app.http.request_limits import RequestLimits
from serve_app.http.request_record import RequestRecord, recorded
from serve_app.http.response import HttpExchange
from serve_app.http.responses import BackgroundKey, ResponseMemory, Turn, own_paths
from serve_app.http.shadow_runs import SHADOW_TENANT, ShadowRuns
from serve_app.http.tracing import RequestTracing, reopened
from serve_app.router import ModelRouter, RequestRuns
from serve_app.settings import Settings
from serve_app.system import enter_request, same_request
from serve_app.transport import Frame, ResponseStream, Submit
from serve_app.types import Identity, Operation, RequestClass

logger = logging.getLogger("ray.serve")


class EngineCalls:
    """The calls of one router.

    Args:
        keys: those that hold now.
    """

    def __init__(self, parts: RouterParts, keys: Callable[[], KeyRing]) -> None:
        self._parts = parts
        self._salt = functools.cache(functools.partial(tenant_salt, parts.salt_secret))
        self.estimator = Estimator()
        self._limits = RequestLimits(parts.limits, parts.metrics, keys)
        self._memory = ResponseMemory(lambda: parts.follower.store, parts.body_thread)
        self._maker = CallMaker(parts, self._limits, self._memory, self.estimator, self._salt)
        self._tracing: RequestTracing | None = None
        self.open_requests = OpenRequests(parts.models, parts.log)
        self.shadows = ShadowRuns(parts.models, self._run_shadow)

    def configure(self, settings: Settings) -> None:
        """Apply changed settings to requests that arrive from now on; called once before the first."""
        self._settings = settings
        self._limits.configure(settings)
        self._memory.configure(settings)
        self._maker.configure(settings)
        self.estimator.quantile = settings.admission.output_quantile
        if settings.logs.prompts:
            warn_of_prompts()
        count = self._parts.metrics.count_dropped_spans
        self._tracing = reopened(self._tracing, settings.traces, self._parts.name, count)

    async def close(self) -> None:
        """End the runs of shadows, and send the spans that wait."""
        self.shadows.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.export.close)

    async def run(
        self,
        operation: Operation,
        identity: Identity,
        headers: HeaderMap,
        receive: Receive,
        exchange: HttpExchange,
        query: dict[str, Any] | None,
        response_id: str = "",
    ) -> None:
        """Run an engine operation, from reading the body to recording the outcome. `query`: in place of a body;
        `response_id`: of the response that this is the background run of."""
        record = self._record_arrival(operation, identity, headers, exchange)
        http = self._settings.http
        thread = self._parts.body_thread
        with recorded(record, exchange, self._record_end):
            of_client = operation, headers, receive
            sent, raw = await read_sent(*of_client, http, thread) if query is None else (query, b"")
            asked = await self._maker.asked(record, identity, headers, sent, len(raw), response_id)
            turn = asked.turn
            with own_paths(turn):
                call = await self._maker.first(asked, record, exchange, raw)
            del raw, sent  # megabytes, perhaps, for as long as the request runs
            if turn is not None and turn.asked.background:
                await self._answer_later(turn, call)
            elif call.contract.idempotency_key is None:
                await self._run(call)
            else:
                fields = call.body  # as any router's of this model: its settings and its length are in it
                if turn is not None or asked.route is not None:  # as it was sent: targets and stored turns change
                    fields = dict(asked.sent if turn is None else turn.sent)
                body_fingerprint = await thread.run(asked.sent_bytes, lambda: fingerprint(operation, fields))
                await self._run_keyed(call, body_fingerprint)

    def _record_arrival(
        self, operation: Operation, identity: Identity, headers: HeaderMap, exchange: HttpExchange
    ) -> RequestRecord:
        """The record of a request that arrives now, under an id of its own."""
        client_id = headers[CLIENT_ID_HEADER].decode("latin-1") if CLIENT_ID_HEADER in headers else None
        exchange.request_id = secrets.token_hex(16)
        caller = passed_on(headers.get(b"traceparent"))
        enter_request(exchange.request_id, trace_of(caller))
        exchange.operation = operation
        record = RequestRecord(
            exchange.request_id, client_id, operation, identity.tenant, identity.default_class, time.monotonic()
        )
        record.recorder = exchange
        record.key_id = identity.key_id
        record.traceparent = caller
        record.trace.is_row = identity.is_row
        self.open_requests.add(record)
        if self._tracing is not None:
            self._tracing.begin(record, headers, exchange)
        return record

    def _record_end(self, record: RequestRecord) -> None:
        """Report the ended request to the metrics, the receipts, the cost estimator and its trace."""
        now = time.monotonic()
        tracing = self._tracing
        timeline = record.runs.timeline
        if tracing is not None and timeline is not None:
            tracing.decide(record, timeline, now)
        self._parts.usage.end(record.request_id, record.use())
        receipt = record.receipt(now)
        self.open_requests.remove(record)
        self._parts.receipts.add(receipt)
        self._parts.log.ended(receipt, record.own_fields())
        self._parts.throughput.count_ended(receipt.model, receipt.tenant, receipt.output_tokens or 0)
        self._parts.metrics.count_ended(
            receipt,
            is_streamed=record.streamed,
            takes_slot=record.operation.takes_slot,
            is_list=bool(record.parts),
        )
        for part in record.parts or [record]:
            use = part.token_use()
            cost = part.trace.measure.cost
            if use is not None:
                self.estimator.observe(use)
                if part.usage is not None:
                    given = (cost.prompt_tokens, cost.output_tokens)
                    used = (use.prompt_tokens, use.output_tokens)
                    self._parts.metrics.count_estimated(part.model, part.tenant, given, used)
        if tracing is not None and timeline is not None:
            tracing.send(record, timeline, receipt)

    async def _answer_later(self, turn: Turn, call: EngineCall) -> None:
        """Store a background response, and answer with it."""
        record = call.record
        key = None
        if (given := call.contract.idempotency_key) is not None:
            asked = await self._parts.body_thread.run(turn.size, lambda: fingerprint(record.operation, turn.sent))
            key = BackgroundKey(key_digest(record.key_owner, given), asked)
        shown = record.trace.asked_model or record.model
        wanted = call.contract
        left_s = None if wanted.deadline_s is None else wanted.deadline_s - (time.monotonic() - record.started)
        try:
            made = await self._memory.create(turn, shown, call.asked.identity, wanted.session_id, left_s, key)
        except ValueError:
            if key is None:
                raise
            raise reused() from None
        await self._memory.answer(turn, made, call.exchange)

    async def _run_keyed(self, call: EngineCall, body_fingerprint: bytes) -> None:
        """Run a request with an Idempotency-Key, or repeat its answer."""
        record = call.record
        name_in_log = same_request()

        async def run(exchange: HttpExchange) -> None:
            name_in_log()
            with recorded(record, exchange, self._record_end):
                await self._run(replace(call, exchange=exchange, comments=None))

        count = functools.partial(self._parts.metrics.count_keyed, record.model)
        await self._parts.keyed_runs.answer(KeyedRequest(call, body_fingerprint, run, count))

    async def _run(self, call: EngineCall) -> None:
        """Run the request; at the next model of its name, where one cannot. What it was charged for one model is given
        back before the next one charges it. Its answer is kept if that was asked for."""
        hops = call.asked.hops
        turn = call.asked.turn
        async with self._memory.kept(turn, call.exchange):
            while True:
                try:
                    with own_paths(turn):
                        await self._run_here(call)
                    return
                except ServeAppError as error:
                    following = await self._next_call(call, error)
                    if following is None and (last := hops.last_error(error)) is not error:
                        raise last from None
                    if following is None:
                        raise
                    left = call.record.request_id, call.model.settings.name, error
                    logger.info("Request %s left model %s for the next one of its name: %s", *left)
                    call = following

    async def _run_shadow(self, asked: AskedCall, model: ModelRouter, request_id: str) -> None:
        """Run a request on the shadow of its name, as class `low`, and keep its record alone. Raises as its run."""
        exchange = HttpExchange(_discard)
        exchange.operation = asked.operation
        exchange.request_id = request_id
        low = RequestClass.LOW
        record = RequestRecord(
            request_id, None, asked.operation, SHADOW_TENANT, low, time.monotonic(), model.settings.name
        )
        record.recorder = exchange
        record.trace.asked_model = None if asked.route is None else asked.route.name
        record.trace.is_shadow = True
        own = replace(
            asked, identity=replace(asked.identity, tenant=SHADOW_TENANT), hops=ModelHops([model.settings.name])
        )
        self._parts.log.arrived(record.model, low.label, record.tenant)
        with recorded(record, exchange, self._record_shadow):
            call = await self._maker.on_model(own, record, exchange, b"")
            record.streamed = bool(call.body.get("stream"))
            await self._run_charged(call)

    def _record_shadow(self, record: RequestRecord) -> None:
        self._parts.log.ended(record.receipt(time.monotonic()), record.own_fields())

    async def _next_call(self, call: EngineCall, error: ServeAppError) -> EngineCall | None:
        """The call of the next model after this error; None: there is none that takes the request."""
        asked = call.asked
        record = call.record
        deadline = None if record.deadline_s is None else record.started + record.deadline_s
        tried = record.model
        while reason := asked.hops.reason(
            error, has_answer=bool(call.exchange.status), deadline=deadline, now=time.monotonic()
        ):
            self._parts.usage.end(call.exchange.request_id, None)
            record.on_hop(reason)
            asked.hops.leave(error)
            own = record.request_id.encode()  # the client repeats no charge of a fallback
            try:
                following = await self._maker.on_model(asked, record, call.exchange, own)
            except (BadRequest, NotFound) as refused:  # it fits this model less than the one before
                logger.info("Request %s is nothing for model %s: %s", record.request_id, record.model, refused)
                error = refused
                continue
            following.comments = call.comments
            return following
        record.model = tried
        return None

    async def _run_here(self, call: EngineCall) -> None:
        """Charge the request for its present model, and run it there."""
        measure = call.split.measure
        async with self._limits.charged(call.charge, call.record, measure, lambda: call.exchange.status):
            if call.asked.route is not None and not call.record.trace.hops:
                self.shadows.begin(call.asked.route, call.asked, call.record.request_id)
            await self._run_charged(call)

    async def _run_charged(self, call: EngineCall) -> None:
        """Wait for a replica, and relay its answer."""
        if not call.record.operation.takes_slot:
            submit = functools.partial(self._submit, call)
            relay = functools.partial(self._relay, call)
            call.record.runs.may_leave = call.asked.hops.has_next
            await call.model.serve_unqueued(submit, relay, call.record.runs, call.record.tenant)
            return
        async with call.comments or contextlib.nullcontext():
            if len(call.split.parts) == 1:
                await self._run_queued(call)
            else:
                await self._run_list(call)

    async def _run_list(self, call: EngineCall) -> None:
        """Run the parts of a list, each as a request of its own."""
        record = call.record
        parts = list[EngineCall]()
        merged = MergedExchange(call.exchange, call.split)
        most = max(measure.sequences for _, measure in call.split.parts)
        turns = PromptTurns(max(1, call.model.limits.slots // most))  # as many as an engine runs

        async def run(part: EngineCall) -> None:
            async with turns.turn() as part.on_granted:
                has_begun = any(one.submitted_at is not None for one in record.parts)
                if has_begun:
                    part.record.deadline_s = None  # it bounds the start of the list
                await self._run_queued(part, accepted=has_begun)

        for number, (body, measure) in enumerate(call.split.parts):
            timeline = record.runs.timeline
            runs = RequestRuns(replace(record.trace), timeline=None if timeline is None else timeline.part())
            part = replace(record, request_id=f"{record.request_id}-{number}", runs=runs)
            own = PromptExchange(merged, number)
            parts.append(replace(call, record=part, body=body, measure=measure, part=own))
        record.parts = [part.record for part in parts]
        try:
            tasks = [asyncio.ensure_future(run(part)) for part in parts]
            await merged.end(await run_together(tasks, merged))
        finally:
            record.add_up_parts()

    async def _run_queued(self, call: EngineCall, *, accepted: bool = False) -> None:
        """Wait for a grant on a replica, and relay the answer. `accepted`: see `Arrival`."""
        record = call.record
        measure = call.measure
        session = None
        if call.contract.session_id is not None and record.operation.generates:
            session = self._parts.sessions.find(record.tenant, call.contract.session_id, record.model)
        record.trace.measure = measure
        # a stream of several prompts may have begun with the first ones
        record.runs.may_leave = call.asked.hops.has_next and not (call.part is not None and record.streamed)
        arrival = Arrival(
            request_id=record.request_id,
            request_class=record.request_class,
            tenant=record.tenant,
            slots=measure.slots,
            cost_tokens=measure.cost.tokens,
            prompt_tokens=measure.cost.prompt_tokens,
            deadline=None if record.deadline_s is None else record.started + record.deadline_s,
            affinity=None if session is None else session.engine,
            accepted=accepted,
            session=None if session is None or measure.sequences > 1 or call.part is not None else session.lease,
            preemptible=measure.is_preemptible,
        )
        submit = functools.partial(self._submit, call)
        relay = functools.partial(self._relay, call)
        await call.model.serve(arrival, submit, relay, measure.key, record.runs)

    def _submit(self, call: EngineCall, number: int) -> Submit:
        """The message for the granted replica."""
        record = call.record
        measure = call.measure
        shown = record.trace.asked_model
        record.on_submit(time.monotonic(), time.time())
        if record.operation.takes_slot and not record.trace.is_shadow:
            prices = None if (given := call.model.settings.prices) is None else given.token_prices()
            # a list of prompts is one request, and has the id of its answer
            self._parts.usage.begin(call.exchange.request_id, record.key_id, record.tenant, record.used_model, prices)
        if call.on_granted is not None:
            call.on_granted()
        return Submit(
            number=number,
            request_id=record.request_id,
            operation=record.operation,
            body=call.body if shown is None else call.body | {"model": record.model},
            priority=RequestClass.CRITICAL - record.request_class,
            cache_salt=self._salt(record.tenant),
            slots=measure.at_once,
            service_tier=call.contract.service_tier,
            prompt_tokens=measure.cost.prompt_tokens,
            output_tokens=measure.cost.output_tokens,
            created=record.created,
            is_load=call.model.settings.replicas.counts(is_row=record.is_row),
            query_counted=call.part is not None and call.part.query_counted,
            is_large=measure.is_large,
            traceparent=record.traceparent,
            shown_model=shown or "",
        )

    async def _relay(self, call: EngineCall, stream: ResponseStream, frames: list[Frame]) -> None:
        """Send the answer to the client, from the first frames of a run on."""
        record = call.record
        exchange = call.exchange
        part = call.part
        if frames[0].media == "json" and frames[0].status >= 400:
            _raise_for_next(frames[0], call.asked.hops)
        if call.comments is not None:
            await call.comments.end()
        is_counted = not record.trace.is_shadow
        if not record.runs.client_has_part and is_counted:
            tokens = call.measure.cost.tokens if record.operation.takes_slot else 0
            self._parts.metrics.count_granted(record.model, record.request_class, record.trace, tokens)
        first_token_s = record.on_first_frames(stream)
        if first_token_s is not None and is_counted and (part is None or part.merged.begin()):  # a list has one
            self._parts.metrics.observe_first_token(
                record.model, record.tenant, record.request_class, first_token_s, exchange.request_id
            )
        relay = exchange.relay(stream, frames, record.time_headers) if part is None else part.relay(stream, frames)
        try:
            last = await relay
        except EngineFailed:
            if call.comments is not None and part is None and stream.client_has_seen:
                call.comments.resume()  # for the wait of a stream that is continued
            raise
        record.usage = last.usage


def _raise_for_next(frame: Frame, hops: ModelHops) -> None:
    """Raise what another model may mend of an engine's refusal, if the request has a choice of models."""
    if frame.status >= 500 and hops.has_next:
        raise RequestFailed("the engine could not handle this request")
    if frame.status < 500 and hops.is_choice:
        error = json.loads(frame.body)["error"]
        if error.get("code") in TOO_LARGE_CODES:
            raise BadRequest(error["message"], param=error["param"], code=error["code"])


async def _discard(message: MutableMapping[str, Any]) -> None:
    """The answer of a shadow."""
