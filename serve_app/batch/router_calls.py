"""What a batch worker asks the routers and the quota actor: rows, models, and the figures of the queues.

A call goes to any router replica, by gRPC, and its answer comes in pieces: answers may be larger than one message. If
the router dies, the call fails, and the row may have run.

Invariant: a row is never asked for without an Idempotency-Key, so that one that is repeated joins its run.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from serve_app.batch.interfaces import Figures, RowAnswer
from serve_app.core.batches import BatchRecord, ModelFigures, RowError
from serve_app.core.names import ModelRoute
from serve_app.core.responses import BackgroundJob
from serve_app.errors import DROPPED, BodyTooLarge, Unavailable
from serve_app.quota import QuotaActor
from serve_app.ray_adapter import IngressHandle

METHOD = "run_row"  # of `serve_app.http.deployment.RouterReplica`
ROW_HEADER = b"x-serve-app-batch-row"  # see `serve_app.http.tracing`
RESPONSES = "/v1/responses"
MODEL_CHECK_S = 10.0  # an answer from a router's memory
FORBIDDEN = (401, 403, 404)  # the key is not valid any more or may not use the model, or there is no such model

Headers = list[tuple[bytes, bytes]]


class RouterCalls:
    """Rows and questions to the routers of an application. Made in the loop that uses it.

    Args:
        handle: of `METHOD` of the routers.
        now: seconds since 1970 UTC.
    """

    def __init__(self, handle: IngressHandle, now: Callable[[], float] = time.time) -> None:
        self._handle = handle
        self._now = now

    async def run(self, batch: BatchRecord, path: str, body: bytes, key: str) -> RowAnswer:
        """See `interfaces.RowRunner`. Raises Unavailable: no router answered; the row may have run."""
        number = key.removeprefix(f"{batch.batch_id}-").partition("-")[0]  # of the row: attempts may follow
        row = f"{batch.batch_id}-{number}"
        return await self.run_as(batch.key_id, batch.tenant, path, body, key, row)

    async def run_as(self, key_id: str, tenant: str, path: str, body: bytes, key: str, row: str = "") -> RowAnswer:
        """A row of this key. Raises as `run`. `row`: names it in its trace; empty: it is of no batch."""
        headers = [(b"content-type", b"application/json"), (b"idempotency-key", key.encode())]
        headers += [(ROW_HEADER, row.encode())] if row else []
        try:
            status, answered, answer = await self._ask(key_id, tenant, "POST", path, headers, body)
        except BodyTooLarge as error:
            return RowAnswer.of_error(error)
        return _answer_of((status, answered, answer))

    async def run_response(self, job: BackgroundJob) -> RowAnswer:
        """Run a background response, or join its run. Raises as `run`."""
        key = f"{job.response_id}-{job.attempts}"
        headers = [(b"content-type", b"application/json"), (b"idempotency-key", key.encode())]
        headers += [] if job.session_id is None else [(b"x-session-id", job.session_id.encode())]
        if job.deadline_at is not None:
            left_ms = max(1, round(1000 * (job.deadline_at - self._now())))
            headers.append((b"x-deadline-ms", b"%d" % left_ms))
        text = json.dumps(dict(job.request), separators=(",", ":"), ensure_ascii=False)
        body = text.encode()  # as many bytes as were sent: a router bounds them
        arguments = job.key_id, job.tenant, "POST", RESPONSES, headers, body, job.response_id
        return _answer_of(await self._ask(*arguments))

    async def refusal(self, batch: BatchRecord, model: str) -> RowError | None:
        """See `interfaces.ModelCheck`. Raises Unavailable, TimeoutError."""
        async with asyncio.timeout(MODEL_CHECK_S):
            path = f"/v1/models/{model}"
            status, _, answer = await self._ask(batch.key_id, batch.tenant, "GET", path, [], b"")
        if status not in FORBIDDEN:
            return None
        error = json.loads(answer)["error"]
        return RowError(str(error["code"] or "invalid_request"), str(error["message"]), param="model")

    async def close(self) -> None:
        """End the open calls."""
        if self._handle.loop is asyncio.get_running_loop():
            await self._handle.close()
        else:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._handle.close(), self._handle.loop))

    async def _ask(self, *arguments: Any) -> tuple[int, Headers, bytes]:
        """The whole answer, read in the loop of the handle."""
        if self._handle.loop is asyncio.get_running_loop():
            return await self._read(arguments)
        reading = asyncio.run_coroutine_threadsafe(self._read(arguments), self._handle.loop)
        return await asyncio.wrap_future(reading)

    async def _read(self, arguments: tuple[Any, ...]) -> tuple[int, Headers, bytes]:
        pieces = [piece async for piece in self._handle.stream(*arguments)]
        if not pieces or not isinstance(pieces[0], tuple):
            raise Unavailable("the answer ended before it began", code=DROPPED)
        status, headers, first = pieces[0]
        return status, headers, b"".join([first, *pieces[1:]])


def _answer_of(answered: tuple[int, Headers, bytes]) -> RowAnswer:
    status, headers, body = answered
    found = dict(headers)
    retry_ms = found.get(b"retry-after-ms")
    request_id = found.get(b"x-serve-app-request-id", b"").decode("latin-1")
    return RowAnswer(status, body, None if retry_ms is None else int(retry_ms) / 1000, request_id)


class NamedFigures:
    """The same figures, also for names that stand for models: of each name those of its target with the most weight.

    Args:
        routes: of the configuration.
    """

    def __init__(self, figures: Figures, routes: Iterable[ModelRoute]) -> None:
        self._figures = figures
        self._models = {route.name: max(route.targets, key=lambda target: target.weight).model for route in routes}

    async def get(self) -> Mapping[str, ModelFigures]:
        """See `interfaces.Figures`. Raises as the figures."""
        found = await self._figures.get()
        return {**{name: found[model] for name, model in self._models.items() if model in found}, **found}


class ActorFigures:
    """The figures of the models' queues, from the quota actor."""

    def __init__(self, quota: QuotaActor) -> None:
        self._quota = quota

    async def get(self) -> Mapping[str, ModelFigures]:
        """See `interfaces.Figures`. Raises AWAY."""
        return await self._quota.model_figures()
