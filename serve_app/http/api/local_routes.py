"""Routes that a router answers without an engine: models, health, readiness, metrics, receipts and use.

    GET /admin/requests/{id}    the receipt of a request, from whichever router received it
    GET /admin/usage            what keys, tenants and models have used (`usage_report`)

Invariant: a key without `auth.keys[].admin` learns nothing of other tenants here, whatever its class: of receipts it
and use it finds its own tenant's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from serve_app.errors import BadRequest, Forbidden, NotFound, Unavailable
from serve_app.http.api.routes import SHOWN_ID_CHARS, HttpRoute, LocalCall
from serve_app.http.api.usage_report import GetUsage, usage_report
from serve_app.http.error_responses import JSON, Answer
from serve_app.names import versions
from serve_app.router import ModelRouter
from serve_app.types import Identity

FindReceipt = Callable[[str, str | None], Awaitable[dict[str, Any] | None]]


@dataclass(frozen=True, slots=True)
class LocalRoutes:
    """Answers the routes that need no engine slot.

    Args:
        models: by name.
        scrape: the content type and the metrics of all routers, by the header `Accept`.
        get_usage: sums of use from the store; raises while the store is away.
        find_receipt: a receipt by any id of its request and its tenant (None: any), as plain data; None: no router has
            it. Bounded in time.
    """

    models: Mapping[str, ModelRouter]
    scrape: Callable[[str], Awaitable[tuple[str, bytes]]]
    find_receipt: FindReceipt
    get_usage: GetUsage
    created: int = field(default_factory=lambda: int(time.time()))

    async def answer(self, route: HttpRoute, identity: Identity, query: bytes = b"", accept: bytes = b"") -> Answer:
        """The complete answer to a local route. `query`: of the URL; `accept`: the header.

        Raises:
            NotFound: an unknown model, or no router has the receipt. Unavailable: not ready. Forbidden: the key is not
            an operator's; the metrics name all tenants.
        """
        match route.target:
            case LocalCall.HEALTH:
                return 200, JSON, b'{"status":"ok"}'
            case LocalCall.VERSION:
                return 200, JSON, msgspec.json.encode(versions())
            case LocalCall.READY:
                found: object = self._readiness(identity)
            case LocalCall.MODELS:
                allowed = (one for name, one in self.models.items() if identity.may_use(name))
                cards = await asyncio.gather(*(self._card(model) for model in allowed))
                found = {"object": "list", "data": cards}
            case LocalCall.MODEL:
                found = await self._card(model_named(self.models, route.argument, identity))
            case LocalCall.METRICS:
                if not (identity.admin or identity.metrics):
                    raise Forbidden(
                        "this key may not read the metrics: set metrics or admin on it (auth.keys)", code="not_admin"
                    )
                content_type, text = await self.scrape(accept.decode("latin-1"))
                return 200, [(b"content-type", content_type.encode())], text
            case LocalCall.USAGE:
                found = await usage_report(self.get_usage, identity, query)
            case _:
                found = await self.find_receipt(route.argument, None if identity.admin else identity.tenant)
                if found is None:
                    shown = route.argument[:SHOWN_ID_CHARS]
                    raise NotFound(
                        f"no receipt of {shown!r} for this key: it has not ended yet, or ended too long ago",
                        code="request_not_found",
                    )
        return 200, JSON, msgspec.json.encode(found)

    def _readiness(self, identity: Identity) -> dict[str, Any]:
        """Ready while any model can be served: a model that is added, loads or fails must not stop the traffic of the
        others. A model that scales from zero can be served without a replica. Names those that the key may use."""
        missing = [
            name for name, model in self.models.items() if not model.ready and model.settings.replicas.min_replicas
        ]
        named = [name for name in missing if identity.may_use(name)]
        if len(missing) == len(self.models):
            raise Unavailable(f"no replica of {', '.join(named) or 'any model'} is running", code="not_ready")
        return {"status": "ready", "without_replica": named}

    async def _card(self, model: ModelRouter) -> dict[str, Any]:
        """`max_model_len` is null before the model's first start, unless it is configured."""
        card = {"id": model.settings.name, "object": "model", "created": self.created, "owned_by": "serve-app"}
        info = await model.info()
        return card | {"max_model_len": model.settings.max_model_len if info is None else info.max_model_len}


def not_an_operator() -> Forbidden:
    return Forbidden("this key is not an operator's: set admin on it (auth.keys)", code="not_admin")


def model_named(models: Mapping[str, ModelRouter], name: object, identity: Identity) -> ModelRouter:
    """The model of this name. Raises BadRequest, NotFound; Forbidden: the key may not use it, whether it exists or
    not."""
    if not isinstance(name, str):
        raise BadRequest("`model` must be a string, the name of a model", param="model")
    if not identity.may_use(name):
        raise Forbidden(f"this key may not use the model {name!r}", param="model", code="model_not_allowed")
    model = models.get(name)
    if model is None:
        known = ", ".join(sorted(filter(identity.may_use, models)))
        raise NotFound(
            f"the model {name!r} does not exist here; there is {known}", param="model", code="model_not_found"
        )
    return model
