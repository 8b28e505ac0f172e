"""What a router replica is made of, once for all that answer its requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from serve_app.core.names import ModelRoutes
from serve_app.core.receipts import Receipts
from serve_app.http.api.batch_lane import BatchLane
from serve_app.http.api.local_routes import LocalRoutes
from serve_app.http.api.operator_routes import ClusterCalls
from serve_app.http.api.record_routes import AskRouters
from serve_app.http.body import BodyThread
from serve_app.http.console import LiveSources
from serve_app.http.keyed import KeyedRuns
from serve_app.http.stored_keys import KeyFollower
from serve_app.http.tokens import JwksFollower
from serve_app.router import (
    LimitClient,
    ModelRouter,
    RequestLog,
    RouterAnswers,
    RouterMetrics,
    SessionClient,
    Throughput,
    UsageReporter,
)


async def no_router(*_: object) -> RouterAnswers:
    """Where there is one process alone, which has no log."""
    return RouterAnswers([], [])


@dataclass(frozen=True, slots=True)
class RouterParts:
    """The parts of one router replica.

    Args:
        models: the models served now, by name.
        salt_secret: makes each tenant's prefix-cache salt; the same in every router replica.
        sessions: finds and opens agent sessions.
        local_routes: answers the routes that the router answers by itself.
        receipts: keeps the receipts of this router's requests.
        limits: charges requests against the limits of keys and tenants, together with all routers.
        usage: counts what they use.
        keyed_runs: runs the requests with an Idempotency-Key.
        follower: follows the keys of the store.
        batches: where batches and their files are.
        cluster: what is asked of the cluster for operators.
        live: who is asked for consoles.
        issuer: follows the keys that sign tokens.
        log: keeps the records of ended requests.
        ask_routers: asks every router, see `router.AllRouters`.
        throughput: counts ended requests for them.
        body_thread: works on large bodies.
        name: the id of this router.
    """

    models: Mapping[str, ModelRouter]
    metrics: RouterMetrics
    salt_secret: bytes
    sessions: SessionClient
    local_routes: LocalRoutes
    receipts: Receipts
    limits: LimitClient
    usage: UsageReporter
    keyed_runs: KeyedRuns
    follower: KeyFollower
    batches: BatchLane
    cluster: ClusterCalls
    live: LiveSources
    issuer: JwksFollower = field(default_factory=JwksFollower)
    log: RequestLog = field(default_factory=RequestLog)
    ask_routers: AskRouters = no_router
    throughput: Throughput = field(default_factory=Throughput)
    body_thread: BodyThread = field(default_factory=BodyThread)
    name: str = "router"

    @property
    def names(self) -> ModelRoutes:
        """What clients may send in place of a model's name."""
        return self.local_routes.names
