"""Runs the engine operations: reads a request, charges it, waits for its grant, relays its frames, records its end.

Invariant: every request that is run here ends in exactly one `Outcome` and leaves one receipt; no byte of a client's
header goes on to an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from serve_app.core.estimate import Estimator
from serve_app.core.queue import Arrival
from serve_app.core.spans import caller_trace
from serve_app.errors import EngineFailed
from serve_app.http import contract
from serve_app.http.api import RouterParts, model_named
from serve_app.http.body import HeaderMap, Receive, read_object
from serve_app.http.engine_call import EngineCall
from serve_app.http.error_responses import CLIENT_ID_HEADER
from serve_app.http.keyed import KeyedRequest, fingerprint
from serve_app.http.keys import KeyRing, tenant_salt
from serve_app.http.measuring import with_costs
from serve_app.http.prompt_list import MergedExchange, PromptExchange, PromptTurns, run_together
from serve_app.http.queue_status import QueueComments, queue_status
from serve_app.http.request_limits import RETRY_COUNT_HEADER, RequestLimits
from serve_app.http.request_record import RequestRecord, recorded
from serve_app.http.response import HttpExchange
from serve_app.http.split_body import split_body
from serve_app.http.tracing import RequestTracing, reopened
from serve_app.router import ModelRouter, RequestRuns
from serve_app.settings import Settings
from serve_app.system import enter_request, same_request
from serve_app.transport import Frame, ResponseStream, Submit
from serve_app.types import Identity, Operation, RequestClass


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
        self._tracing: RequestTracing | None = None

    def configure(self, settings: Settings) -> None:
        """Apply changed settings to requests that arrive from now on; called once before the first."""
        self._settings = settings
        self._limits.configure(settings)
        self.estimator.quantile = settings.admission.output_quantile
        self._service_levels = settings.admission.service_levels
        self._tracing = reopened(self._tracing, settings.traces, self._parts.name)

    async def close(self) -> None:
        """Send the spans that wait."""
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
    ) -> None:
        """Run an engine operation, from reading the body to recording the outcome. `query`: in place of a body."""
        record = self._record_arrival(operation, identity, headers, exchange)
        http = self._settings.http
        thread = self._parts.body_thread
        with recorded(record, exchange, self._record_end):
            sent, raw = await read_object(headers, receive, http, thread) if query is None else (query, b"")
            sent_bytes = len(raw)
            model = model_named(self._parts.models, sent.get("model"), identity)
            record.model = model.settings.name
            body, wanted, size = await thread.run(
                sent_bytes, lambda: contract.split(operation, sent, headers, identity, http, model.limits.max_model_len)
            )
            record.request_class = wanted.request_class
            record.deadline_s = wanted.deadline_s
            self._parts.metrics.count_arrived(record.model, record.tenant, record.request_class)
            if operation.generates:
                record.service_level = self._service_levels.get(wanted.request_class)
                record.streamed = bool(body.get("stream"))
            comments = None
            if wanted.queue_status or record.streamed:
                comments = _comments(model, record, exchange, from_start=wanted.queue_status)
            scopes = self._limits.scopes(identity, record.model)
            exchange.limit_headers = functools.partial(self._limits.headers, scopes)
            split = await thread.run(sent_bytes, lambda: split_body(operation, body, size, http))
            split = with_costs(split, identity.tenant, wanted.session_id, self.estimator, model.settings, model.limits)
            charge = self._limits.limited_request(scopes, record, split.measure, raw, headers.get(RETRY_COUNT_HEADER))
            del raw  # megabytes, perhaps, for as long as the request runs
            call = EngineCall(record, wanted, split, split.body, split.measure, model, exchange, comments, charge)
            if wanted.idempotency_key is None:
                await self._run(call)
            else:
                body_fingerprint = await thread.run(sent_bytes, lambda: fingerprint(operation, body))
                await self._run_keyed(call, body_fingerprint)

    def _record_arrival(
        self, operation: Operation, identity: Identity, headers: HeaderMap, exchange: HttpExchange
    ) -> RequestRecord:
        """The record of a request that arrives now, under an id of its own."""
        client_id = headers[CLIENT_ID_HEADER].decode("latin-1") if CLIENT_ID_HEADER in headers else None
        exchange.request_id = secrets.token_hex(16)
        enter_request(exchange.request_id, caller_trace(headers.get(b"traceparent")))
        exchange.operation = operation
        record = RequestRecord(
            exchange.request_id, client_id, operation, identity.tenant, identity.default_class, time.monotonic()
        )
        record.recorder = exchange
        record.key_id = identity.key_id
        record.trace.is_row = identity.is_row
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
        self._parts.receipts.add(receipt)
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
        """Charge the request against its limits, and run it."""
        measure = call.split.measure
        async with self._limits.charged(call.charge, call.record, measure, lambda: call.exchange.status):
            await self._run_charged(call)

    async def _run_charged(self, call: EngineCall) -> None:
        """Wait for a replica, and relay its answer."""
        if not call.record.operation.takes_slot:
            submit = functools.partial(self._submit, call)
            relay = functools.partial(self._relay, call)
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
        record.on_submit(time.monotonic(), time.time())
        if record.operation.takes_slot:
            prices = None if (given := call.model.settings.prices) is None else given.token_prices()
            # a list of prompts is one request, and has the id of its answer
            self._parts.usage.begin(call.exchange.request_id, record.key_id, record.tenant, record.used_model, prices)
        if call.on_granted is not None:
            call.on_granted()
        return Submit(
            number=number,
            request_id=record.request_id,
            operation=record.operation,
            body=call.body,
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
        )

    async def _relay(self, call: EngineCall, stream: ResponseStream, frames: list[Frame]) -> None:
        """Send the answer to the client, from the first frames of a run on."""
        record = call.record
        exchange = call.exchange
        part = call.part
        if call.comments is not None:
            await call.comments.end()
        if not record.runs.client_has_part:
            tokens = call.measure.cost.tokens if record.operation.takes_slot else 0
            self._parts.metrics.count_granted(record.model, record.request_class, record.trace, tokens)
        first_token_s = record.on_first_frames(stream)
        if first_token_s is not None and (part is None or part.merged.begin()):  # a list has one
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
        record.usage = used = last.usage
        if used is not None:
            self._parts.metrics.count_tokens(record.model, record.tenant, used.prompt_tokens, used.completion_tokens)


def _comments(model: ModelRouter, record: RequestRecord, exchange: HttpExchange, *, from_start: bool) -> QueueComments:
    """The comments of a stream that tell its client the request's place in the queue."""
    status = functools.partial(queue_status, model, record)
    return QueueComments(status, exchange.send_comment, from_start=from_start)
