"""The router replica: Serve's ingress deployment around the HTTP edge and one line per model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app.dispatch import ModelLine
from serve_app.http.edge import Edge
from serve_app.http.keys import KeyRing
from serve_app.serve_adapter import EngineHandle, on_fast_path
from serve_app.settings import parse
from serve_app.telemetry.metrics import RouterMetrics

logger = logging.getLogger("ray.serve")


@serve.ingress()
class RouterReplica:
    """Serve deployment class of the router; a raw ASGI ingress.

    Args:
        config: the whole configuration, as a plain mapping, with hashed keys only.
        salt_secret: hex; the same for every router replica.
        engines: a handle per model name.
    """

    async def __init__(
        self, config: dict[str, Any], salt_secret: str, engines: Mapping[str, DeploymentHandle[Any]]
    ) -> None:
        settings = parse(config)
        router_id = serve.get_replica_context().replica_id.unique_id
        if not on_fast_path():
            logger.warning(
                "serving without the fast path: set RAY_SERVE_ENABLE_HA_PROXY=1 and "
                "RAY_SERVE_THROUGHPUT_OPTIMIZED=1 in the environment of `ray start` (about three times the throughput)"
            )
        self._lines = {
            model.name: ModelLine(
                model, EngineHandle(engines[model.name]), settings.admission, router_id, settings.router.replicas
            )
            for model in settings.models
        }
        self._edge = Edge(settings, KeyRing(settings.auth), self._lines, RouterMetrics(), bytes.fromhex(salt_secret))
        await asyncio.gather(*(line.start() for line in self._lines.values()))

    def __serve_build_asgi_app__(self) -> Edge:
        """Serve asks for the ASGI application once the constructor has run."""
        return self._edge
