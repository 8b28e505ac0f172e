"""Makes the call of a request for an engine: which models may run it, its body checked, split and measured for one of
them, and what it is charged there.

Invariant: a call is made anew for each model that its request goes to; what the client sent is not changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from serve_app.core.body_bounds import BodySize
from serve_app.core.estimate import Estimator
from serve_app.core.limits import Scopes
from serve_app.core.names import ModelHops
from serve_app.errors import BadRequest, NotFound
from serve_app.http import contract
from serve_app.http.api import RouterParts, model_named, require_right
from serve_app.http.audio_form import check_file
from serve_app.http.body import HeaderMap
from serve_app.http.engine_call import AskedCall, EngineCall
from serve_app.http.error_responses import MODEL_HEADER, Headers
from serve_app.http.measuring import name_key, with_costs
from serve_app.http.media_bounds import check_media
from serve_app.http.prefix_blocks import prefix_blocks
from serve_app.http.prompt_log import log_prompt, prompt_text
from serve_app.http.queue_status import QueueComments, queue_status
from serve_app.http.request_limits import RETRY_COUNT_HEADER, RequestLimits
from serve_app.http.request_record import RequestRecord
from serve_app.http.response import HttpExchange
from serve_app.http.responses import ResponseMemory
from serve_app.http.split_body import split_body
from serve_app.router import ModelRouter
from serve_app.settings import Settings
from serve_app.types import Contract, Identity


class _ReadBody(NamedTuple):
    """A body as a model gets it, with its size and what the client asks for beside it."""

    body: dict[str, Any]
    contract: Contract
    size: BodySize


class CallMaker:
    """Makes the calls of one router.

    Args:
        limits, memory, estimator: of the router.
        salt: of a tenant, for the hashes of its prompts.
    """

    def __init__(
        self,
        parts: RouterParts,
        limits: RequestLimits,
        memory: ResponseMemory,
        estimator: Estimator,
        salt: Callable[[str], str],
    ) -> None:
        self._parts = parts
        self._thread = parts.body_thread
        self._limits = limits
        self._memory = memory
        self._estimator = estimator
        self._salt = salt

    def configure(self, settings: Settings) -> None:
        """Apply changed settings to requests that arrive from now on; called once before the first."""
        self._settings = settings
        self._service_levels = settings.admission.service_levels

    async def asked(
        self,
        record: RequestRecord,
        identity: Identity,
        headers: HeaderMap,
        sent: dict[str, Any],
        sent_bytes: int,
        response_id: str,
    ) -> AskedCall:
        """The request, with the models that it may run on, and the conversation that it continues. Raises as
        `model_named` and `ResponseMemory.open`; BadRequest."""
        operation = record.operation
        name = sent.get("model")
        route = self._parts.names.find(name)
        if route is None:
            record.model = model_named(self._parts.models, self._parts.names, name, identity).settings.name
        else:
            require_right(route.name, identity)
            record.trace.asked_model = route.name
        turn = await self._memory.open(operation, sent, identity, sent_bytes, response_id)
        body, size = (sent, sent_bytes) if turn is None else (turn.body, turn.size)
        if route is None:
            hops = ModelHops([record.model])
        else:
            session = contract.session_of(headers, body)
            asked_by = identity.tenant, session, record.request_id
            key = await self._thread.run(size, lambda: name_key(operation, body, *asked_by))
            hops = ModelHops(route.models(key))
        return AskedCall(operation, identity, headers, body, size, hops, route, turn)

    async def first(self, asked: AskedCall, record: RequestRecord, exchange: HttpExchange, raw: bytes) -> EngineCall:
        """The call of the first model, with which the request counts as arrived. `raw`: the bytes of the client, whose
        retries are known by them. Raises as `on_model`."""
        operation = asked.operation
        model, read = await self._first_read(asked, record)
        if self._settings.logs.prompts:
            prompt = await self._thread.run(asked.sent_bytes, lambda: prompt_text(read.body))
            log_prompt(record.request_id, record.tenant, prompt)
        wanted = read.contract
        record.request_class = wanted.request_class
        record.deadline_s = wanted.deadline_s
        record.session_id = wanted.session_id
        self._parts.metrics.count_arrived(record.model, record.tenant, record.request_class)
        self._parts.log.arrived(record.model, record.request_class.label, record.tenant)
        if operation.generates:
            record.service_level = self._service_levels.get(wanted.request_class)
        record.streamed = bool(read.body.get("stream")) and (operation.generates or operation.hears)
        comments = None
        if wanted.queue_status or record.streamed:
            comments = _comments(self._parts.models, record, exchange, from_start=wanted.queue_status)
        call = await self._made(asked, model, read, record, exchange, raw)
        call.comments = comments
        if self._parts.log.keeps:
            salt = self._salt(record.tenant)
            blocks = self._thread.run(asked.sent_bytes, lambda: prefix_blocks(operation, call.body, salt))
            record.prefix_blocks = await blocks
        return call

    async def on_model(self, asked: AskedCall, record: RequestRecord, exchange: HttpExchange, raw: bytes) -> EngineCall:
        """The call of the model that the request has come to. `raw`: see `RequestLimits.limited_request`. Raises as
        `_read` and `split_body`; NotFound: the model leaves."""
        model = self._model(asked, record)
        return await self._made(asked, model, await self._read(asked, model), record, exchange, raw)

    async def _first_read(self, asked: AskedCall, record: RequestRecord) -> tuple[ModelRouter, _ReadBody]:
        """The first model that is not too small for the body, as far as that is known here, and the body for it."""
        while True:
            try:
                model = self._model(asked, record)
                return model, await self._read(asked, model)
            except (BadRequest, NotFound) as error:
                reason = asked.hops.reason(error, has_answer=False, deadline=None, now=0.0)
                if reason is None:
                    raise asked.hops.last_error(error) from None
                record.on_hop(reason)
                asked.hops.leave(error)

    def _model(self, asked: AskedCall, record: RequestRecord) -> ModelRouter:
        """The model on which a request runs now. Raises NotFound: it leaves the configuration."""
        record.model = asked.hops.model
        found = self._parts.models.get(record.model)
        if found is None:
            raise NotFound(f"the model {record.model!r} leaves", param="model", code="model_not_found")
        return found

    async def _read(self, asked: AskedCall, model: ModelRouter) -> _ReadBody:
        """See `contract.split`, `check_media` and `check_file`."""

        def read() -> _ReadBody:
            of_client = asked.operation, asked.sent, asked.headers, asked.identity
            found = _ReadBody(*contract.split(*of_client, self._settings.http, model.limits.max_model_len))
            check_media(asked.operation, found.body, model.settings)
            check_file(asked.operation, found.body, model.settings)
            return found

        return await self._thread.run(asked.sent_bytes, read)

    async def _made(
        self,
        asked: AskedCall,
        model: ModelRouter,
        read: _ReadBody,
        record: RequestRecord,
        exchange: HttpExchange,
        raw: bytes,
    ) -> EngineCall:
        """The call of a body that was read: its parts at a model, and its charge."""
        operation = asked.operation
        scopes = self._limits.scopes(asked.identity, model.settings.name)
        exchange.limit_headers = functools.partial(self._own_headers, record, scopes)
        bounds = self._settings.http
        parts = self._thread.run(asked.sent_bytes, lambda: split_body(operation, read.body, read.size, bounds))
        of_session = asked.identity.tenant, read.contract.session_id
        split = with_costs(await parts, *of_session, self._estimator, model.settings, model.limits)
        repeats = asked.headers.get(RETRY_COUNT_HEADER)
        charge = self._limits.limited_request(scopes, record, split.measure, raw, repeats)
        of_body = split, split.body, split.measure
        return EngineCall(asked, record, read.contract, *of_body, model, exchange, None, charge)

    def _own_headers(self, record: RequestRecord, scopes: Scopes) -> Headers:
        """The headers of one exchange alone: its limits, and the model that ran, if its client knows another name."""
        found = self._limits.headers(scopes, record.operation)
        if record.trace.asked_model is not None and record.submitted_at is not None:
            found.append((MODEL_HEADER, record.model.encode()))
        return found


def _comments(
    models: Mapping[str, ModelRouter], record: RequestRecord, exchange: HttpExchange, *, from_start: bool
) -> QueueComments:
    """The comments of a stream that tell its client the request's place in the queue."""
    status = functools.partial(queue_status, models, record)
    return QueueComments(status, exchange.send_comment, from_start=from_start)
