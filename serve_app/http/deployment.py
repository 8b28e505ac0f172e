"""The router replica: Serve's ingress deployment around the ASGI application and its models."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app.batch import storage_at
from serve_app.core.live import RouterPart
from serve_app.core.receipts import Receipts
from serve_app.http.api import BatchLane, LocalRoutes, ReceiptLookup, RouterParts
from serve_app.http.app import RouterApp
from serve_app.http.asgi_bridge import AsgiBridge, is_no_refusal
from serve_app.http.cluster_calls import RayCalls
from serve_app.http.console import LiveSources, live_sources
from serve_app.http.error_responses import Headers
from serve_app.http.idempotency import AnswerCopy, AnswerPart
from serve_app.http.keyed import KeyedRuns
from serve_app.http.keys import RowOwner
from serve_app.http.malformed_requests import install_strict_protocol
from serve_app.http.python_calls import AnswerPiece, CallKind, HttpRequest, make_request, make_route_request
from serve_app.http.stored_keys import FIRST_LIST_S, KeyFollower, KeyList
from serve_app.http.tracing import load_exporter
from serve_app.names import ROUTER, deployment_of
from serve_app.quota import QuotaActor, kv_store
from serve_app.ray_adapter import (
    Handle,
    NamedReplicas,
    bound_bodies,
    end_on_sigterm,
    freeze_heap,
    in_fresh_context,
    on_fast_path,
    session_folder,
)
from serve_app.router import (
    USAGE_FOLDER,
    AllRouters,
    ClusterSources,
    LimitClient,
    ModelRegistry,
    QueueClient,
    ReceiptSearch,
    RequestLog,
    RouterMetrics,
    Scrape,
    SessionClient,
    UsageReporter,
    router_part,
    scaling_report,
)
from serve_app.settings import ModelSettings, Settings, parse
from serve_app.system import keep_events, records_folder, set_up_log, this_process

logger = logging.getLogger("ray.serve")


def _prepare_process(replica: str) -> None:
    """What has to be set before Serve starts the server of this process. `replica`: its id."""
    set_up_log("router", replica=replica)
    bound_bodies()
    end_on_sigterm()
    install_strict_protocol()
    if not on_fast_path():
        logger.warning(
            "Serve runs this router without the fast path and takes about a third of the requests. Set "
            "RAY_SERVE_ENABLE_HA_PROXY=1 and RAY_SERVE_THROUGHPUT_OPTIMIZED=1 in the environment of `ray start`"
        )


def _begun(app: RouterApp) -> RouterApp:
    """The app, with what a router does beside its requests from now on."""
    in_fresh_context(app.api.sweep.run(), "store sweep")
    in_fresh_context(app.open_requests.look(), "waiting requests")
    in_fresh_context(app.parts.issuer.run(), "JWKS")
    logger.addFilter(is_no_refusal)
    return app


def _make_log(name: str, metrics: RouterMetrics) -> RequestLog:
    """The request log of this router, and its events."""
    session = session_folder()
    keep_events(session, f"router-{name}")
    folder = None if session is None else records_folder(session)
    node = ray.get_runtime_context().get_node_id()
    return RequestLog(folder, name, node, count_lost=metrics.count_lost_records)


def _begin_queue_client(name: str, quota: QuotaActor, settings: Settings) -> QueueClient:
    process = (ray.get_runtime_context().get_node_id(), (this_process(),))
    client = QueueClient(name, quota.exchange, quota.watch, process)
    client.core.set_store(settings.store.url)
    in_fresh_context(client.start(), "queues")
    return client


@serve.ingress()
class RouterReplica:
    """Serve deployment class of the router; a raw ASGI ingress.

    Args:
        config: the whole configuration, as a plain mapping, with hashed keys only. Serve passes a changed
            configuration to `reconfigure`, which applies it without a restart.
        engines: bound only for Serve to deploy them; the handles are made by name, since the set of models changes.
        workers: of batches, the same; None: there are none.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self,
        config: dict[str, Any],
        engines: Mapping[str, DeploymentHandle[Any]],
        workers: DeploymentHandle[Any] | None = None,
    ) -> None:
        settings = parse(config)
        replica = serve.get_replica_context()
        self._name = name = replica.replica_id.unique_id
        _prepare_process(name)

        def connect(model: ModelSettings) -> Handle:
            return Handle(deployment_of(model.name), replica.app_name)

        self._config = config
        self._metrics = RouterMetrics()
        quota = QuotaActor(settings.quota)
        self._log = _make_log(name, self._metrics)
        self._queue_client = _begin_queue_client(name, quota, settings)
        self._registry = ModelRegistry(connect, name, self._queue_client)
        routers = NamedReplicas(ROUTER, replica.app_name)
        receipts = Receipts()
        self._receipt_search = ReceiptSearch(receipts, functools.partial(routers.call_all, "receipt"))
        self._cluster = RayCalls(quota.call)
        self._scrape = self._make_scrape(name, self._cluster, routers)
        self._follower = KeyFollower(settings.store.url, functools.partial(routers.call_all, "known_keys"))
        in_fresh_context(self._follower.run(), "keys of the store")
        self._keyed_runs = self._begin_keyed_runs(name, quota, routers)
        self._set_files(settings.batch.files_url)
        parts = RouterParts(
            self._registry.models,
            self._metrics,
            kv_store.cluster_secret(),
            SessionClient(quota.call, self._queue_client.core.sessions),
            self._local_routes(AllRouters(routers)),
            receipts,
            LimitClient(self._queue_client),
            self._begin_usage_reporter(name),
            self._keyed_runs,
            self._follower,
            BatchLane(lambda: self._follower.store.batches, lambda: self._files),
            self._cluster,
            self._live_sources(name, quota, routers),
            name=name,
            log=self._log,
            ask_routers=AllRouters(routers).ask,
        )
        self._app = _begun(RouterApp(settings, parts))
        self._bridge = AsgiBridge(self._app)
        self._registry.apply(settings)
        await asyncio.gather(self._registry.wait_settled(), self._follower.wait_for_list(FIRST_LIST_S))
        freeze_heap()

    def _begin_keyed_runs(self, name: str, quota: QuotaActor, routers: NamedReplicas) -> KeyedRuns:
        runs = KeyedRuns(name, quota.call, routers, lambda: self._queue_client.router_session)
        in_fresh_context(runs.start(), "claims")
        return runs

    def _set_files(self, url: str | None) -> None:
        self._files_url = url
        self._files = storage_at(url)

    def _make_scrape(self, name: str, cluster: RayCalls, routers: NamedReplicas) -> Scrape:
        sources = ClusterSources(
            functools.partial(cluster.call_quota, "figures"),
            lambda: self._follower.store.figures(),
            cluster.decisions,
            cluster.proxies,
            lambda: self._app.keys.counts(),
            lambda: self._app.settings.router.replicas,
        )

        async def ask_all(is_openmetrics: bool) -> list[Coroutine[Any, Any, Any]]:
            # without an argument where there need be none: a router of the release before takes none
            return await routers.call_all("metrics", *([True] if is_openmetrics else []))

        return Scrape(name, self._metrics, self._registry.models, ask_all, sources)

    def _live_sources(self, name: str, quota: QuotaActor, routers: NamedReplicas) -> LiveSources:
        return live_sources(
            name,
            routers.names,
            self._registry.models,
            lambda: self._app.settings,
            quota.live,
            functools.partial(routers.call_all, "live"),
            lambda: self._app.parts.cluster,
            lambda: self._follower.store.batches,
        )

    def _local_routes(self, routers: AllRouters) -> LocalRoutes:
        find_kept = self._receipt_search.find_anywhere
        lookup = ReceiptLookup(find_kept, self._cluster, routers.ask, lambda: self._app.settings.records.keep_days)
        return LocalRoutes(
            self._registry.models,
            self._scrape.everywhere,
            lookup.find,
            lambda query: self._follower.store.usage(query),
        )

    def _begin_usage_reporter(self, name: str) -> UsageReporter:
        here = ray.get_runtime_context()
        folder = Path(here.get_temp_dir(), here.get_session_name(), USAGE_FOLDER)
        usage = UsageReporter(name, lambda batch: self._follower.store.add_usage(batch), folder=folder)
        usage.start()
        return usage

    async def reconfigure(self, config: dict[str, Any]) -> None:
        """Apply a changed configuration; Serve calls this at the start, too, and for each change after that."""
        if config == self._config:
            return
        settings = parse(config)
        if settings.traces.endpoint is not None:
            await asyncio.to_thread(load_exporter)  # here, or requests would wait while it loads
        self._app.configure(settings)
        self._follower.configure(settings.store.url)
        if settings.batch.files_url != self._files_url:
            self._set_files(settings.batch.files_url)
        self._queue_client.core.set_store(settings.store.url)
        self._registry.apply(settings)
        self._config = config

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve every `metrics_interval_s`, for scaling: each model's requests here, waiting or granted."""
        levels = self._app.settings.admission.service_levels
        return scaling_report(self._registry.models, levels, time.monotonic())

    async def receipt(self, request_id: str, tenant: str | None = None) -> dict[str, Any] | None:
        """The receipt of a request that this replica received; the other router replicas call this."""
        return self._receipt_search.find_here(request_id, tenant)

    async def flush_records(self, since: float = 0.0) -> tuple[str, int | None]:
        """Write what has ended here to the disk. Returns this replica's id, and what `RequestLog.flush` says; the
        router replica that answers from request logs calls this."""
        return self._log.router, await self._log.flush(since)

    async def waiting_requests(self, tenant: str | None = None) -> tuple[str, list[dict[str, Any]]]:
        """This replica's id, and the records of the requests that wait here; the router replica that is asked calls
        this."""
        return self._log.router, self._app.open_requests.waiting(tenant)

    async def open_request(self, request_id: str, tenant: str | None = None) -> tuple[str, dict[str, Any] | None]:
        """This replica's id, and a request that has not ended here; the router replica that looks for it calls this."""
        return self._log.router, self._app.open_requests.find(request_id, tenant)

    async def known_keys(self) -> KeyList | None:
        """The store's keys as this replica knows them; a router replica that starts without the store calls this."""
        return self._follower.stored.known()

    async def answer_part(self, run: str, offset: int) -> AnswerPart | None:
        """A part of an answer of this replica; the other router replicas call this."""
        return await self._keyed_runs.part(run, offset)

    async def keep_answer(self, copy: AnswerCopy) -> None:
        """Keep an answer of another router replica, which calls this."""
        self._keyed_runs.keep(copy)

    async def metrics(self, is_openmetrics: bool = False) -> tuple[str, bytes]:
        """This replica's id and metrics; the router replica that is scraped calls this."""
        return self._scrape.here(is_openmetrics)

    async def live(self, tenants: tuple[str, ...]) -> RouterPart:
        """What this replica knows now; a router replica with consoles calls this."""
        core = self._queue_client.core
        throughput = self._app.parts.throughput
        return router_part(self._name, core, self._registry.models, throughput, tenants, time.monotonic())

    async def run_row(
        self, key_id: str, tenant: str, method: str, path: str, headers: Headers, body: bytes, response_id: str = ""
    ) -> AsyncGenerator[AnswerPiece, None]:
        """One request of a batch of this key and tenant, or the run of its background response, and its answer in
        pieces: what a batch worker calls."""
        return self._bridge.exchange(HttpRequest(method, path, headers, body), RowOwner(key_id, tenant, response_id))

    def __serve_build_asgi_app__(self) -> RouterApp:
        """Serve asks for the ASGI application once the constructor has run."""
        return self._app

    # The methods below are called by handle, from inside the cluster: `docs/reference/python.md`. Keywords are those of
    # `serve_app.client.client.Client`, and `api_key`; errors are those of `serve_app.errors`.

    async def chat(self, messages: Any = None, **call: Any) -> dict[str, Any]:
        """A complete chat completion, as plain data."""
        return await self._bridge.answer(make_request(CallKind.CHAT, {"messages": messages, **call}))

    async def stream(self, messages: Any = None, **call: Any) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a chat completion; for `handle.options(stream=True)`."""
        return self._bridge.stream(make_request(CallKind.STREAM, {"messages": messages, **call}))

    async def complete(self, prompt: Any = None, **call: Any) -> dict[str, Any]:
        """A complete text completion, as plain data."""
        return await self._bridge.answer(make_request(CallKind.COMPLETE, {"prompt": prompt, **call}))

    async def stream_complete(self, prompt: Any = None, **call: Any) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a completion; for `handle.options(stream=True)`."""
        return self._bridge.stream(make_request(CallKind.STREAM_COMPLETE, {"prompt": prompt, **call}))

    async def embed(self, input: Any = None, **call: Any) -> dict[str, Any]:
        """Embeddings, as plain data."""
        return await self._bridge.answer(make_request(CallKind.EMBED, {"input": input, **call}))

    async def models(self, api_key: str | None = None) -> dict[str, Any]:
        """The list of models, as GET /v1/models."""
        return await self._bridge.answer(make_route_request(api_key, "GET", "/v1/models"))

    async def exchange(
        self, method: str, path: str, headers: Headers, body: bytes, query: bytes = b""
    ) -> AsyncGenerator[AnswerPiece, None]:
        """One HTTP request and its answer in pieces: what `serve_app.connect` calls."""
        return self._bridge.exchange(HttpRequest(method, path, headers, body, query))
