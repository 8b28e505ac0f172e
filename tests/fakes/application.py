"""The smallest application of our shape, for tests of the cluster around it: a raw ASGI router, an empty engine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application

from serve_app.names import ROUTER, deployment_of


class Asgi:
    """200 for a known key, 401 for all else."""

    def __init__(self, digests: list[str]) -> None:
        self._digests = digests

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        key = dict(scope["headers"]).get(b"authorization", b"").removeprefix(b"Bearer ")
        status = 200 if hashlib.sha256(key).hexdigest() in self._digests else 401
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})


class Engine:
    """Exists."""


class Router:
    """The ingress."""

    def __init__(self, digests: list[str], *engines: Any) -> None:
        self._digests = digests

    def __serve_build_asgi_app__(self) -> Asgi:
        return Asgi(self._digests)


def build(arguments: Mapping[str, Any]) -> Application:
    """The application; `arguments` as `serve_app.app.build` has them."""
    nothing = {"num_cpus": 0}
    engines = [
        serve.deployment(Engine, name=deployment_of(model["name"]), ray_actor_options=nothing).bind()
        for model in arguments["models"]
    ]
    router = serve.deployment(serve.ingress()(Router), name=ROUTER, ray_actor_options=nothing)
    return router.bind([key["key_sha256"] for key in arguments["auth"]["keys"]], *engines)
