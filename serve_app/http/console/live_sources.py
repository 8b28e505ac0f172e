"""Who a router asks for its consoles, in a deployment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Protocol

from serve_app.core.batches import ENDED, BatchRecord
from serve_app.core.live import LiveModel, QuotaPart, RouterPart
from serve_app.http.console.live_watch import LiveSources
from serve_app.http.console.polled_source import Tenants
from serve_app.router import AskParts, ModelRouter, all_parts
from serve_app.settings import Settings
from serve_app.store import BatchStore

NEWEST = 20  # batches of all tenants, and of each that somebody watches, beside those that have not ended


class ClusterState(Protocol):
    """As `serve_app.http.api.operator_routes.ClusterCalls`."""

    def state(self) -> Awaitable[dict[str, Any]]: ...

    def addresses(self) -> Awaitable[dict[str, str]]: ...


def live_sources(
    router: str,
    router_names: Callable[[], frozenset[str]],
    models: Mapping[str, ModelRouter],
    settings: Callable[[], Settings],
    quota: Callable[[Collection[str]], Awaitable[QuotaPart]],
    ask_routers: AskParts,
    cluster: Callable[[], ClusterState],
    batches: Callable[[], BatchStore],
) -> LiveSources:
    """The sources of one router.

    Args:
        router_names: of the routers that take calls.
        models, settings: those that hold now.
        quota: asks the quota actor. ask_routers: asks every router for its part.
        cluster, batches: those that hold now.
    """

    def facts() -> dict[str, LiveModel]:
        bound = settings().admission.max_queued
        return {name: LiveModel(bound, not one.settings.replicas.min_replicas) for name, one in models.items()}

    async def routers(tenants: Tenants) -> dict[str, RouterPart]:
        return await all_parts(ask_routers, tenants)

    return LiveSources(
        router,
        router_names,
        facts,
        quota,
        routers,
        lambda: cluster().state(),
        lambda: cluster().addresses(),
        lambda tenants: _batches(batches(), tenants),
    )


async def _batches(store: BatchStore, tenants: Tenants) -> list[BatchRecord]:
    """Batches that have not ended, the oldest first, then the newest of all and of these tenants."""
    asked: list[str | None] = [None, *tenants]
    newest = await asyncio.gather(*(store.batches(tenant, after=None, limit=NEWEST) for tenant in asked))
    work = await store.work()
    found = {one.batch_id: one for batches in newest for one in batches if one.status in ENDED}
    ended = sorted(found.values(), key=lambda batch: batch.created_at, reverse=True)
    return [one.batch for one in work] + ended
