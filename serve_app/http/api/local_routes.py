"""Routes that a router answers without an engine: models, health, readiness, metrics, receipts and use.

    GET /admin/requests/{id}    the receipt of a request, from whichever router received it
    GET /admin/usage            what keys, tenants and models have used (`usage_report`)

Invariant: a key without `auth.keys[].admin` learns nothing of other tenants here, whatever its class: of receipts it
and use it finds its own tenant's.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from serve_app.core.names import ModelRoute, ModelRoutes
from serve_app.errors import BadRequest, Forbidden, NotFound, Unavailable
from serve_app.http.api.routes import HttpRoute, LocalCall
from serve_app.http.api.usage_report import GetUsage, usage_report
from serve_app.http.error_responses import JSON, Answer
from serve_app.names import versions
from serve_app.router import ModelRouter
from serve_app.types import Identity

FindReceipt = Callable[[str, str | None], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class LocalRoutes:
    """Answers the routes that need no engine slot.

    Args:
        models: by name.
        scrape: the content type and the metrics of all routers, by the header `Accept`.
        get_usage: sums of use from the store; raises while the store is away.
        find_receipt: a receipt by any id of its request and its tenant (None: any), as plain data; raises NotFound.
            Bounded in time.
        names: what clients may send in place of a model's name.
    """

    models: Mapping[str, ModelRouter]
    scrape: Callable[[str], Awaitable[tuple[str, bytes]]]
    find_receipt: FindReceipt
    get_usage: GetUsage
    names: ModelRoutes = field(default_factory=ModelRoutes)
    created: int = field(default_factory=lambda: int(time.time()))

    async def answer(self, route: HttpRoute, identity: Identity, query: bytes = b"", accept: bytes = b"") -> Answer:
        """The complete answer to a local route. `query`: of the URL; `accept`: the header.

        Raises:
            NotFound: an unknown model, or there is no receipt. Unavailable: not ready. Forbidden: the key is not
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
                named = (one for name, one in self.names.by_name.items() if identity.may_use(name))
                found = {"object": "list", "data": cards + [self._named_card(one) for one in named]}
            case LocalCall.MODEL:
                found = await self._card_of(route.argument, identity)
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

    async def _card_of(self, name: str, identity: Identity) -> dict[str, Any]:
        """Raises as `model_named`."""
        route = self.names.find(name)
        if route is None:
            return await self._card(model_named(self.models, self.names, name, identity))
        require_right(name, identity)
        return self._named_card(route)

    def _named_card(self, route: ModelRoute) -> dict[str, Any]:
        """Of a name that is no model's: `max_model_len` is the least of the models that requests may run on."""
        served = [self.models[name] for name in route.all_models if name in self.models]
        lengths = [model.limits.max_model_len for model in served]
        known = [length for length in lengths if length < sys.maxsize]
        return {
            "id": route.name,
            "object": "model",
            "created": self.created,
            "owned_by": "serve-app",
            "max_model_len": min(known, default=None),
            "route": route.shown(),
        }

    async def _card(self, model: ModelRouter) -> dict[str, Any]:
        """`max_model_len` is null before the model's first start, unless it is configured."""
        card = {"id": model.settings.name, "object": "model", "created": self.created, "owned_by": "serve-app"}
        info = await model.info()
        return card | {"max_model_len": model.settings.max_model_len if info is None else info.max_model_len}


def not_an_operator() -> Forbidden:
    return Forbidden("this key is not an operator's: set admin on it (auth.keys)", code="not_admin")


def require_right(name: str, identity: Identity) -> None:
    """Raises Forbidden: the key may not use the model, or what has this name, whether it exists or not."""
    if not identity.may_use(name):
        raise Forbidden(f"this key may not use the model {name!r}", param="model", code="model_not_allowed")


def model_named(models: Mapping[str, ModelRouter], names: ModelRoutes, name: object, identity: Identity) -> ModelRouter:
    """The model of this name. Raises BadRequest, NotFound; Forbidden: see `require_right`.

    Args:
        names: the other names, for the message.
    """
    if not isinstance(name, str):
        raise BadRequest("`model` must be a string, the name of a model", param="model")
    require_right(name, identity)
    model = models.get(name)
    if model is None:
        known = ", ".join(sorted(filter(identity.may_use, (*models, *names.by_name))))
        raise NotFound(
            f"the model {name!r} does not exist here; there is {known}", param="model", code="model_not_found"
        )
    return model
