"""Builds the Serve application from its deployments; the only module that does."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from serve_app import settings as configuration
from serve_app.batch import deployment as batch_deployment
from serve_app.core.times import DRAIN_POLL_S, HEALTH_PERIOD_S, HEALTH_TIMEOUT_S, MOVE_S, ROUTER_DRAIN_S
from serve_app.engine import deployment
from serve_app.engine.start import engine_args, environment
from serve_app.errors import ConfigError
from serve_app.http import deployment as router_deployment
from serve_app.names import BATCH_WORKER, RELEASE, ROUTER, deployment_of
from serve_app.ray_adapter import DirectedRequestRouter, pin_version
from serve_app.settings import (
    DEFAULT_KEY_FILE,
    DEFAULT_POLICY,
    AutoscaleSettings,
    ModelSettings,
    QuotaSettings,
    Settings,
    code_version,
    engine_version,
    load_or_create_key,
    resolve,
    split_arguments,
)
from serve_app.system import writes_json

logger = logging.getLogger("serve_app")

UNBOUNDED = 100_000  # Serve's bound on ongoing requests per replica: the router's queue bounds them, Serve's is hidden
ROUTER_SURGE_PERCENT = 100  # a router needs few resources: new ones answer before the old ones end
# Without autoscaling only `serve-app status` reads the routers' numbers, every five seconds.
UNSCALED = AutoscaleSettings(metrics_interval_s=5.0, look_back_s=10.0)


def logging_config() -> LoggingConfig:
    """Of every deployment; the encoding holds until a replica has set up its log.

    HAProxy's log and the metrics record requests; a log line per request and replica costs 2% of their CPU time.
    """
    return LoggingConfig(enable_access_log=False, encoding="JSON" if writes_json() else "TEXT")


def build(args: Mapping[str, Any]) -> Application:
    """The application, for `serve run serve_app.app:build` and for `serve_app.cli`.

    Args:
        args: the configuration (see `serve_app.settings`), or `{"config": "file.yaml"}`; `release`: of the `serve-app`
            that declares it.

    Raises:
        ConfigError: names the key at fault; nothing is started.
    """
    release, _, given = split_arguments(args)
    if release not in (None, RELEASE):
        raise ConfigError(
            f"release: serve-app {release} declares it, and {RELEASE} is installed on the cluster: install the same",
            param="release",
        )
    file = given.pop("config", None)
    if file is not None and given:
        raise ConfigError(f"config: give a file or keys, not both (also found {', '.join(given)})", param="config")
    settings = configuration.load(file) if file is not None else _resolved(given)
    if not settings.auth.keys:
        key_file = Path(settings.auth.key_file or DEFAULT_KEY_FILE).expanduser()
        logger.warning(
            "Application has no key in auth.keys and uses the key in %s; requests without a key get 401", key_file
        )
        settings = settings.with_key(load_or_create_key(key_file))
    settings = settings.without_secrets()
    engines = {model.name: _engine(model, settings.quota) for model in settings.models}
    config = settings.model_dump(mode="json")
    workers = _workers(settings, config).bind(config) if settings.batch.workers else None
    return _router(settings, config).bind(config, engines, workers)


def _resolved(given: Mapping[str, Any]) -> Settings:
    """The settings, with `${NAME}` from the environment of this process: `serve-app export` writes names.

    Raises:
        ConfigError: wrong settings, or a variable that is not set.
    """
    resolved = resolve(given, os.environ)
    if resolved.wrong:
        place, why = resolved.wrong[0]
        path = ".".join(map(str, place))
        raise ConfigError(f"{path}: {why} where the application is built", param=path)
    return configuration.parse(resolved.data)


def _engine(model: ModelSettings, quota: QuotaSettings) -> Application:
    engine = serve.deployment(
        name=deployment_of(model.name),
        max_ongoing_requests=UNBOUNDED,
        graceful_shutdown_timeout_s=model.drain_s + MOVE_S,  # after `drain_s` what still runs continues elsewhere
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        max_surge_percent=model.replicas.max_surge_percent,
        logging_config=logging_config(),
        user_config=model.model_dump(mode="json", include={"batching", "drain_s"}),  # taken over by running replicas
        request_router_config=RequestRouterConfig(request_router_class=DirectedRequestRouter),  # type: ignore[arg-type]
        **scale(model),
        **engine_args.placement(model, environment.platform()),
    )(deployment.EngineReplica)
    version = engine_version(model, on_cpu=environment.platform() == "cpu")
    return pin_version(engine, version).bind(model.model_dump(mode="json"), quota.model_dump(mode="json"))


def scale(model: ModelSettings) -> dict[str, Any]:
    """How many replicas a model has, as options of its deployment."""
    replicas = model.replicas
    if not replicas.autoscaled:
        return {"num_replicas": replicas.min_replicas}
    other = {"look_back_s", "max_surge_percent", "policy", "advise"}
    same = replicas.model_dump(exclude=other)  # under Serve's own names
    if replicas.policy != DEFAULT_POLICY:  # it decides when, too
        to_zero_s = replicas.downscale_to_zero_delay_s
        same["downscale_to_zero_delay_s"] = replicas.downscale_delay_s if to_zero_s is None else to_zero_s
        same |= {"upscale_delay_s": 0.0, "downscale_delay_s": 0.0}
    return {"autoscaling_config": AutoscalingConfig(**same, look_back_period_s=replicas.look_back_s)}


def _router(settings: Settings, config: dict[str, Any]) -> Deployment:
    scaled = [model.replicas for model in settings.models if model.replicas.autoscaled] or [UNSCALED]
    # A fixed number, written as a range: Serve collects numbers only from replicas of autoscaled deployments, and the
    # application's scaling policy needs the routers' numbers of waiting requests.
    scale = AutoscalingConfig(
        min_replicas=settings.router.replicas,
        max_replicas=settings.router.replicas,
        look_back_period_s=max(one.look_back_s for one in scaled),
        metrics_interval_s=min(one.metrics_interval_s for one in scaled),  # the shortest interval of all models
    )
    router = serve.deployment(
        name=ROUTER,
        max_ongoing_requests=UNBOUNDED,
        graceful_shutdown_timeout_s=ROUTER_DRAIN_S,
        max_surge_percent=ROUTER_SURGE_PERCENT,
        logging_config=logging_config(),
        ray_actor_options={"num_cpus": settings.router.cpus},
        user_config=config,  # running replicas apply a changed one
        autoscaling_config=scale,
    )(router_deployment.RouterReplica)
    return pin_version(router, code_version("router"))


def _workers(settings: Settings, config: dict[str, Any]) -> Deployment:
    workers = serve.deployment(
        name=BATCH_WORKER,
        num_replicas=settings.batch.workers,
        max_ongoing_requests=UNBOUNDED,
        graceful_shutdown_timeout_s=DRAIN_POLL_S + batch_deployment.WORKER_END_S,  # it waits for a poll first
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        logging_config=logging_config(),
        ray_actor_options={"num_cpus": 0},
        user_config=config,  # running replicas apply a changed one
    )(batch_deployment.BatchWorkerReplica)
    return pin_version(workers, code_version("batch"))
