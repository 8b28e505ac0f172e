"""What a router replica is made of, once for all that answer its requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from serve_app.core.receipts import Receipts
from serve_app.http.api.batch_lane import BatchLane
from serve_app.http.api.local_routes import LocalRoutes
from serve_app.http.api.operator_routes import ClusterCalls
from serve_app.http.body import BodyThread
from serve_app.http.keyed import KeyedRuns
from serve_app.http.stored_keys import KeyFollower
from serve_app.router import LimitClient, ModelRouter, RouterMetrics, SessionClient, UsageReporter


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
    body_thread: BodyThread = field(default_factory=BodyThread)
    name: str = "router"
