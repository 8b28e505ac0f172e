"""Routes that a router answers without an engine: models, health, readiness, metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from serve_app.errors import Forbidden, NotFound, Unavailable
from serve_app.http.routes import HttpRoute, LocalCall
from serve_app.router import ModelRouter, RouterMetrics
from serve_app.types import Identity

Headers = list[tuple[bytes, bytes]]
Answer = tuple[int, Headers, bytes]

JSON: Headers = [(b"content-type", b"application/json")]
_TEXT: Headers = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]


class LocalRoutes:
    """Answers the routes that need no engine slot.

    Args:
        models: by name.
    """

    def __init__(self, models: Mapping[str, ModelRouter], metrics: RouterMetrics) -> None:
        self._models = models
        self._metrics = metrics
        self._created = int(time.time())

    async def answer(self, route: HttpRoute, identity: Identity) -> Answer:
        """The complete answer to a local route.

        Raises:
            NotFound: an unknown model. Unavailable: not ready. Forbidden: the metrics name all tenants.
        """
        match route.target:
            case LocalCall.HEALTH:
                return 200, JSON, b'{"status":"ok"}'
            case LocalCall.READY:
                return self._ready()
            case LocalCall.MODELS:
                cards = await asyncio.gather(*(self._card(model) for model in self._models.values()))
                return 200, JSON, msgspec.json.encode({"object": "list", "data": cards})
            case LocalCall.MODEL:
                model = self._models.get(route.argument)
                if model is None:
                    raise NotFound(
                        f"the model {route.argument!r} does not exist", param="model", code="model_not_found"
                    )
                return 200, JSON, msgspec.json.encode(await self._card(model))
            case _ if not (identity.admin or identity.metrics):
                raise Forbidden(
                    "this key may not read the metrics: set metrics or admin on it (auth.keys)", code="not_admin"
                )
            case _:
                return 200, _TEXT, await self._metrics_text()

    def _ready(self) -> Answer:
        """Ready while any model can be served: a model that is added, loads or fails must not stop the traffic of the
        others. A model that scales from zero can be served without a replica."""
        missing = [
            name for name, model in self._models.items() if not model.ready and model.settings.replicas.min_replicas
        ]
        if len(missing) == len(self._models):
            raise Unavailable(f"no replica of {', '.join(missing)} is running", code="not_ready")
        return 200, JSON, msgspec.json.encode({"status": "ready", "without_replica": missing})

    async def _card(self, model: ModelRouter) -> dict[str, Any]:
        card: dict[str, Any] = {
            "id": model.settings.name,
            "object": "model",
            "created": self._created,
            "owned_by": "serve-app",
        }
        info = await model.info()
        if info is not None:
            card["max_model_len"] = info.max_model_len
        return card

    async def _metrics_text(self) -> bytes:
        for name, model in list(self._models.items()):
            names = sorted(model.replica_set.running)
            loads = await asyncio.gather(*(model.engine_info.fetch_load(replica) for replica in names))
            if self._models.get(name) is not model:
                continue  # removed meanwhile, with its metrics
            self._metrics.set_model(model, {r: load for r, load in zip(names, loads, strict=True) if load is not None})
        return self._metrics.render()
