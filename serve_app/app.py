"""The one place where deployments are wired into a Serve application."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from serve_app import settings as configuration
from serve_app.engine.deployment import EngineReplica
from serve_app.engine.engine_args import placement
from serve_app.engine.environment import platform
from serve_app.errors import ConfigError
from serve_app.http.keys import load_or_create_key
from serve_app.names import ROUTER, deployment_of
from serve_app.router import RouterReplica
from serve_app.serve_adapter import DirectedRequestRouter
from serve_app.settings import ModelSettings, RouterSettings, Settings

logger = logging.getLogger("serve_app")

UNBOUNDED = 100_000  # Serve's own bound on ongoing requests per replica: ours is the line, and Serve queues unseen
HEALTH_PERIOD_S = 5.0  # a dead engine is replaced within two periods
HEALTH_TIMEOUT_S = 20.0  # above the probe of a busy engine
DRAIN_POLL_S = 0.5  # an idle drain ends within a second or two of the channels' closing
ROUTER_DRAIN_S = 3600.0  # the longest stream a router may carry
# HAProxy's log and our metrics tell what was asked; a line per request and replica costs 2% of their CPU time.
LOGGING = LoggingConfig(enable_access_log=False)
DEFAULT_KEY_FILE = "~/.local/state/serve-app/api_key"


def build(args: Mapping[str, Any]) -> Application:
    """The application, for `serve run serve_app.app:build` and for `serve_app.cli`.

    Args:
        args: the configuration (see `serve_app.settings`), or `{"config": "file.yaml"}`. `salt_secret` (hex) may be
            given beside it; by default each build makes one.

    Raises:
        ConfigError: names the key at fault; nothing has been started then.
    """
    given = dict(args)
    salt_secret = str(given.pop("salt_secret", secrets.token_hex(32)))
    file = given.pop("config", None)
    if file is not None and given:
        raise ConfigError(f"config: give a file or keys, not both (also found {', '.join(given)})", param="config")
    settings = with_keys(configuration.load(file) if file is not None else configuration.parse(given))
    engines = {model.name: _engine(model) for model in settings.models}
    return _router(settings.router).bind(settings.model_dump(mode="json"), salt_secret, engines)


def with_keys(settings: Settings) -> Settings:
    """The settings with at least one key, and every key as its SHA-256 only."""
    auth = settings.auth
    keys = auth.keys
    if not keys:
        file = Path(auth.key_file or DEFAULT_KEY_FILE).expanduser()
        key = load_or_create_key(file)
        logger.warning("no API key is configured: using the one in %s", file)
        keys = (configuration.KeySettings(key=key),)
    hashed = tuple(key.without_secret() for key in keys)
    return settings.model_copy(update={"auth": auth.model_copy(update={"keys": hashed})})


def _engine(model: ModelSettings) -> Application:
    deployment = serve.deployment(
        EngineReplica,
        name=deployment_of(model.name),
        max_ongoing_requests=UNBOUNDED,
        graceful_shutdown_timeout_s=model.drain_s,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        logging_config=LOGGING,
        request_router_config=RequestRouterConfig(request_router_class=DirectedRequestRouter),
        **_scale(model),
        **placement(model, platform()),
    )
    return deployment.bind(model.model_dump(mode="json"))


def _scale(model: ModelSettings) -> dict[str, Any]:
    replicas = model.replicas
    if replicas.min_replicas == replicas.max_replicas:
        return {"num_replicas": replicas.min_replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=replicas.min_replicas,
            max_replicas=replicas.max_replicas,
            target_ongoing_requests=replicas.target_ongoing_requests,
            upscale_delay_s=replicas.upscale_delay_s,
            downscale_delay_s=replicas.downscale_delay_s,
        )
    }


def _router(settings: RouterSettings) -> Any:
    return serve.deployment(
        RouterReplica,
        name=ROUTER,
        num_replicas=settings.replicas,
        max_ongoing_requests=UNBOUNDED,
        graceful_shutdown_timeout_s=ROUTER_DRAIN_S,
        logging_config=LOGGING,
        ray_actor_options={"num_cpus": settings.cpus},
    )
