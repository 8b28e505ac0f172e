"""Routes a router answers by itself: models, health, readiness, metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from serve_app.dispatch import ModelLine
from serve_app.errors import Forbidden, NotFound, Unavailable
from serve_app.http.routes import Local, Route
from serve_app.telemetry.metrics import RouterMetrics
from serve_app.types import Identity

Headers = list[tuple[bytes, bytes]]
Answer = tuple[int, Headers, bytes]

JSON: Headers = [(b"content-type", b"application/json")]
_TEXT: Headers = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]


class LocalRoutes:
    """Answers everything that needs no engine slot.

    Args:
        lines: one per model, by name.
    """

    def __init__(self, lines: Mapping[str, ModelLine], metrics: RouterMetrics) -> None:
        self._lines = lines
        self._metrics = metrics
        self._created = int(time.time())

    async def answer(self, route: Route, identity: Identity) -> Answer:
        """The whole answer to a local route.

        Raises:
            NotFound: an unknown model. Unavailable: not ready. Forbidden: the metrics name all tenants.
        """
        match route.target:
            case Local.HEALTH:
                return 200, JSON, b'{"status":"ok"}'
            case Local.READY:
                return self._ready()
            case Local.MODELS:
                cards = await asyncio.gather(*(self._card(line) for line in self._lines.values()))
                return 200, JSON, msgspec.json.encode({"object": "list", "data": cards})
            case Local.MODEL:
                line = self._lines.get(route.argument)
                if line is None:
                    raise NotFound(
                        f"the model {route.argument!r} does not exist", param="model", code="model_not_found"
                    )
                return 200, JSON, msgspec.json.encode(await self._card(line))
            case _ if not (identity.admin or identity.metrics):
                raise Forbidden(
                    "this key may not read the metrics: set metrics or admin on it (auth.keys)", code="not_admin"
                )
            case _:
                return 200, _TEXT, await self._exposition()

    def _ready(self) -> Answer:
        """Ready while any model can be served, whenever this router started: one that is added, still loads or fails
        does not take the others' traffic away. A model that starts from zero can be served without a replica."""
        missing = [name for name, line in self._lines.items() if not line.ready and line.model.replicas.min_replicas]
        if len(missing) == len(self._lines):
            raise Unavailable(f"no replica of {', '.join(missing)} is running", code="not_ready")
        return 200, JSON, msgspec.json.encode({"status": "ready", "without_replica": missing})

    async def _card(self, line: ModelLine) -> dict[str, Any]:
        card: dict[str, Any] = {
            "id": line.model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "serve-app",
        }
        info = await line.info()
        if info is not None:
            card["max_model_len"] = info.max_model_len
        return card

    async def _exposition(self) -> bytes:
        for name, line in list(self._lines.items()):
            names = sorted(line.replicas)
            loads = await asyncio.gather(*(line.load(replica) for replica in names))
            if self._lines.get(name) is not line:
                continue  # taken out meanwhile, and its figures with it
            self._metrics.line(name, line.line.snapshot(), line.use, line.blocked)
            self._metrics.unread(line.unread.bytes, line.unread.ended)
            self._metrics.replicas(name, line.placed, line.health.out, line.health.ejections)
            self._metrics.engines(name, {r: load for r, load in zip(names, loads, strict=True) if load is not None})
        return self._metrics.render()
