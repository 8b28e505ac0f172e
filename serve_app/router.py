"""The router replica: Serve's ingress deployment around the HTTP edge and one line per model."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app.cluster_store import cluster_secret
from serve_app.core.receipts import Receipts
from serve_app.desk import Desk
from serve_app.fleet import Fleet
from serve_app.http.admin_routes import AdminRoutes
from serve_app.http.edge import Edge
from serve_app.http.keys import KeyRing
from serve_app.http.strict import install
from serve_app.inside.calls import CHAT, COMPLETE, EMBED, STREAM, STREAM_COMPLETE, Asked, Headers, Piece
from serve_app.inside.exchange import Inside, RefusalsAreNoFailures
from serve_app.names import BLOCKED_PREFIX, GRANTED_PREFIX, ROUTER, WAITING_PREFIX, deployment_of
from serve_app.quota_actor import AWAY, QuotaActor
from serve_app.receipt_search import ReceiptSearch
from serve_app.serve_adapter import EngineHandle, EveryReplica, deployment_handle, in_fresh_context, on_fast_path
from serve_app.session_book import SessionBook
from serve_app.settings import ModelSettings, parse
from serve_app.shared_line import SharedLine
from serve_app.telemetry.metrics import RouterMetrics
from serve_app.wire import WiredHandle

logger = logging.getLogger("ray.serve")


@serve.ingress()
class RouterReplica:
    """Serve deployment class of the router; a raw ASGI ingress.

    Args:
        config: the whole configuration, as a plain mapping, with hashed keys only. It comes again through
            `reconfigure` when it changes, and is taken over without a restart.
        engines: bound only for Serve to deploy them; the handles are made by name, since models come and go.
    """

    async def __init__(self, config: dict[str, Any], engines: Mapping[str, DeploymentHandle[Any]]) -> None:
        settings = parse(config)
        replica = serve.get_replica_context()
        install()  # before Serve starts the server of this process
        if not on_fast_path():
            logger.warning(
                "serving without the fast path: set RAY_SERVE_ENABLE_HA_PROXY=1 and "
                "RAY_SERVE_THROUGHPUT_OPTIMIZED=1 in the environment of `ray start` (about three times the throughput)"
            )

        def connect(model: ModelSettings) -> WiredHandle:
            return WiredHandle(EngineHandle(deployment_handle(deployment_of(model.name), replica.app_name)))

        self._config = config
        self._metrics = RouterMetrics()
        quota = QuotaActor(settings.quota)
        name = replica.replica_id.unique_id
        self._desk = Desk(name, quota.router, AWAY)
        in_fresh_context(self._desk.start(), "desk")
        self._shared = SharedLine(name, quota.exchange, quota.watch, AWAY)
        in_fresh_context(self._shared.start(), "line")
        self._fleet = Fleet(connect, name, self._shared, self._desk)
        book = SessionBook(quota.call, lambda: self._desk.opened, AWAY)
        keys = KeyRing(settings.auth)
        receipts = Receipts()
        self._receipts = ReceiptSearch(receipts, EveryReplica(ROUTER, replica.app_name, "receipt"))
        admin = AdminRoutes(lambda: quota.call("figures"), AWAY, self._receipts.anywhere)
        self._edge = Edge(settings, keys, self._fleet.lines, self._metrics, cluster_secret(), book, admin, receipts)
        self._inside = Inside(self._edge)
        logger.addFilter(RefusalsAreNoFailures())
        self._fleet.apply(settings)
        await self._fleet.settled()

    async def reconfigure(self, config: dict[str, Any]) -> None:
        """Take over a changed configuration; called by Serve at the start, too, and for each change after that."""
        if config == self._config:
            return
        settings = parse(config)
        self._edge.configure(settings, KeyRing(settings.auth))
        for model in self._fleet.apply(settings):
            self._metrics.forget(model)
        self._config = config

    async def record_autoscaling_stats(self) -> dict[str, int]:
        """Called by Serve every `metrics_interval_s`, for scaling: each model's requests here, waiting or granted. One
        moment for all: a request that has just been granted must not be told as both, or as neither."""
        lines = self._fleet.lines
        waiting = {f"{WAITING_PREFIX}{name}": line.waiting for name, line in lines.items()}
        blocked = {f"{BLOCKED_PREFIX}{name}": line.blocked for name, line in lines.items()}
        return waiting | blocked | {f"{GRANTED_PREFIX}{name}": line.granted for name, line in lines.items()}

    async def receipt(self, request_id: str) -> dict[str, Any] | None:
        """What became of a request that came to this replica: called by the other router replicas."""
        return self._receipts.here(request_id)

    def __serve_build_asgi_app__(self) -> Edge:
        """Serve asks for the ASGI application once the constructor has run."""
        return self._edge

    # What follows is called by handle, from inside the cluster: see the README, "From Python". Keywords are those of
    # `serve_app.handle.Client` and `api_key`; errors are those of `serve_app.errors`.

    async def chat(self, messages: Any = None, **call: Any) -> dict[str, Any]:
        """A whole chat completion, as plain data."""
        return await self._inside.answer(CHAT, {"messages": messages, **call})

    async def stream(self, messages: Any = None, **call: Any) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a chat completion; for `handle.options(stream=True)`."""
        return self._inside.stream(STREAM, {"messages": messages, **call})

    async def complete(self, prompt: Any = None, **call: Any) -> dict[str, Any]:
        """A whole completion, as plain data."""
        return await self._inside.answer(COMPLETE, {"prompt": prompt, **call})

    async def stream_complete(self, prompt: Any = None, **call: Any) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a completion; for `handle.options(stream=True)`."""
        return self._inside.stream(STREAM_COMPLETE, {"prompt": prompt, **call})

    async def embed(self, input: Any = None, **call: Any) -> dict[str, Any]:
        """Embeddings, as plain data."""
        return await self._inside.answer(EMBED, {"input": input, **call})

    async def models(self, api_key: str | None = None) -> dict[str, Any]:
        """The list of models, as GET /v1/models."""
        return await self._inside.models(api_key)

    async def exchange(self, method: str, path: str, headers: Headers, body: bytes) -> AsyncGenerator[Piece, None]:
        """One HTTP request and its answer in pieces: what `serve_app.connect` calls."""
        return self._inside.exchange(Asked(method, path, headers, body))
