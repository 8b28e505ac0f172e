"""What the application and its deployments are called in Serve: by whoever makes them and whoever looks for them."""

from __future__ import annotations

APPLICATION = "serve_app"
ROUTER = "Router"
ENGINE_PREFIX = "engine-"


def deployment_of(model: str) -> str:
    """The deployment of a model's engine; Serve allows no '/' in such a name."""
    return ENGINE_PREFIX + model.replace("/", "--")
