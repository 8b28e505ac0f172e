"""What the application and its deployments are called in Serve: by whoever makes them and whoever looks for them."""

from __future__ import annotations

APPLICATION = "serve_app"
ROUTER = "Router"
ENGINE_PREFIX = "engine-"
MARK = "SERVE_APP_INSTANCE"  # in the environment of every process of an instance or a machine: by it they are found

# Numbers that replicas report to Serve's controller, for scaling. Routers, each with the model's name behind it:
WAITING_PREFIX = "waiting_"  # requests in the router's line
GRANTED_PREFIX = "granted_"  # requests on an engine replica, or on their way there and back
BLOCKED_PREFIX = "blocked_"  # replicas that wait for memory, as the quota actor has told the router
# Engine replicas:
ONGOING = "ongoing"  # requests
CHANNELS = "channels"  # open streams to routers


def deployment_of(model: str) -> str:
    """The deployment of a model's engine; Serve allows no '/' in such a name."""
    return ENGINE_PREFIX + model.replace("/", "--")
