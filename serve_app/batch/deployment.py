"""The Serve deployment of batch workers: builds one worker on the store, the files, the routers and the quota actor.

Invariant: a changed configuration is taken over without a restart of this process, and no row is lost by it: the worker
of the old one ends as at a shutdown while the new one begins.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from ray import serve

from serve_app.batch.background_feed import BackgroundFeed
from serve_app.batch.files import storage_at
from serve_app.batch.intake_task import CLOSE_S as INTAKE_CLOSE_S
from serve_app.batch.intake_task import IntakeTask
from serve_app.batch.model_paces import ModelPaces
from serve_app.batch.router_calls import METHOD, ActorFigures, NamedFigures, RouterCalls
from serve_app.batch.worker import CLOSE_S, CLOSE_STORE_S, BatchWorker, WorkerOptions
from serve_app.names import ROUTER
from serve_app.quota import QuotaActor
from serve_app.ray_adapter import IngressHandle, end_on_sigterm, in_fresh_context
from serve_app.settings import Settings, parse
from serve_app.store import Store
from serve_app.system import mark_log, set_up_log

DAY_S = 86_400.0
# What the end of a worker takes at most: its rows and its streams end side by side. Three seconds more for what is
# cancelled then and for the handle of the routers. Below `SERVE_SHUTDOWN_S`, or `serve-app down` would cut it.
WORKER_END_S = max(CLOSE_S + CLOSE_STORE_S, INTAKE_CLOSE_S) + 3.0


class BatchWorkerReplica:
    """Serve deployment class of a batch worker.

    Args:
        config: the whole configuration, as a plain mapping, with hashed keys only; Serve passes a changed one to
            `reconfigure`.
    """

    async def __init__(self, config: dict[str, Any]) -> None:  # type: ignore[misc]  # Ray awaits it
        # Serve awaits it. On the class, the garbage collector would call it, too, and await nothing.
        self.__del__ = self.shutdown
        end_on_sigterm()
        settings = parse(config)
        replica = serve.get_replica_context()
        mark_log(replica.replica_id.unique_id)
        set_up_log("batch worker", replica=replica.replica_id.unique_id)
        self._calls = RouterCalls(IngressHandle(ROUTER, replica.app_name, METHOD))
        self._figures = ActorFigures(QuotaActor(settings.quota))
        self._ending: set[asyncio.Task[None]] = set()
        self._settings = settings
        self._worker = _Worker(settings, self._calls, self._figures)

    async def reconfigure(self, config: dict[str, Any]) -> None:
        """Apply a changed configuration; Serve calls this at the start, too, and for each change after that."""
        settings = parse(config)
        if _relevant(settings) == _relevant(self._settings):
            return
        old = self._worker
        self._settings = settings
        self._worker = _Worker(settings, self._calls, self._figures)
        task = in_fresh_context(old.close(), "worker of the configuration before")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def shutdown(self) -> None:
        """End what runs, and give the other rows back. Does nothing the second time."""
        await asyncio.gather(self._worker.close(), *self._ending)
        await self._calls.close()


class _Worker:
    """One worker with all that it alone uses."""

    def __init__(self, settings: Settings, calls: RouterCalls, figures: ActorFigures) -> None:
        batch = settings.batch
        self._store = Store.at(settings.store.url)
        weights = {name: one.weight for name, one in settings.admission.tenants.items()}
        named = NamedFigures(figures, [route.route() for route in settings.routes])
        paces = ModelPaces(named, batch.max_in_flight, batch.workers)
        keep_s = batch.files_expire_days * DAY_S, batch.records_expire_days * DAY_S
        options = WorkerOptions(batch.max_rows, *keep_s, weights)
        files = storage_at(batch.files_url)
        self._worker = BatchWorker(self._store.batches, files, calls, paces, options, models=calls)
        self._intake = IntakeTask(settings, calls, paces, self._store)
        self._responses = BackgroundFeed(self._store.background, calls)
        self._closing: asyncio.Task[None] | None = None
        self._starting = in_fresh_context(self._start(), "batch worker")

    async def _start(self) -> None:
        self._worker.start()  # in a context of its own: its tasks belong to no call of Serve's
        self._intake.start()
        self._responses.start()

    async def close(self) -> None:
        """Within `WORKER_END_S`."""
        if self._closing is None:
            self._closing = in_fresh_context(self._close(), "end of a batch worker")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        with contextlib.suppress(Exception):
            await self._starting
        try:
            await asyncio.gather(self._worker.close(), self._intake.close(), self._responses.close())
        finally:
            self._store.close()


def _relevant(settings: Settings) -> Mapping[str, Any]:
    """The part of the configuration that a worker is built from."""
    weights = {name: one.weight for name, one in settings.admission.tenants.items()}
    tenants = {key.name: key.tenant for key in settings.auth.keys} if settings.batch.redis is not None else {}
    built_from = {"batch": settings.batch, "weights": weights, "store": settings.store.url, "tenants": tenants}
    return built_from | {"routes": settings.routes}
