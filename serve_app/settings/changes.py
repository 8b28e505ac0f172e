"""What a deploy would do to each deployment, and why: compared with the configuration that is deployed. Pure.

Invariant: a deployment is called restarted exactly where Serve would replace its replicas (`settings/versions.py`), and
where that is not known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from serve_app.errors import ConfigError
from serve_app.names import BATCH_WORKER, LOG_FORMAT, ROUTER, deployment_of
from serve_app.settings.mistakes import path_of
from serve_app.settings.model import ModelSettings
from serve_app.settings.serve_config import as_change, split_arguments
from serve_app.settings.settings import Settings, parse
from serve_app.settings.variables import Names, resolve, with_names
from serve_app.settings.versions import engine_version

QUOTA = "GpuMemoryQuota"
HAPROXY = "HAProxy"
LOGS = "logs"
Effect = Literal["added", "removed", "restarted", "changed", "unchanged", "later"]


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of one deployment. `fields`: the settings that differ, as `name: before -> after`.

    added, removed; restarted: its replicas are replaced; changed: taken over by what runs; later: not before it starts
    anew; unchanged.
    """

    deployment: str
    effect: Effect
    why: str
    fields: tuple[str, ...] = ()


def changes(deployed: Any, declared: Mapping[str, Any], *, on_cpu: bool) -> list[Change]:
    """What a deploy would do. Both are arguments of an application, see `serve_config.application`.

    Args:
        deployed: of the running application; None: none runs. Other tools may have declared anything: then all is
            restarted.
        declared: what would be deployed, without keys in clear.
        on_cpu: by vLLM's CPU build, see `engine_version`.
    """
    release, wanted = declared_settings(declared)
    names = [*(deployment_of(model.name) for model in wanted.models), ROUTER]
    names += [BATCH_WORKER] if wanted.batch.workers else []
    if deployed is None:
        return [Change(name, "added", "nothing is deployed") for name in names]
    try:
        old_release, before = declared_settings(deployed)
    except (TypeError, ValueError, ConfigError) as error:
        why = f"what is deployed cannot be read: {error.message if isinstance(error, ConfigError) else error}"
        return [Change(name, "restarted", why) for name in names]
    served = [model.name for model in before.models]
    before, wanted = (
        parse(as_change(one.model_dump(mode="json"), served)).with_names(one.names) for one in (before, wanted)
    )
    old = {model.name: (model, names) for model, names in _models(before)}
    found = [_of_model(old.get(model.name), (model, names), on_cpu=on_cpu) for model, names in _models(wanted)]
    kept = {model.name for model in wanted.models}
    gone = "no longer configured: what runs is finished, new requests get 404"
    found += [Change(deployment_of(name), "removed", gone) for name in old if name not in kept]
    found += _of_rest(before, wanted)
    if release != old_release:
        why = f"serve-app {release} replaces {old_release or 'another release'}"
        stay = {"added", "removed"}
        found = [
            one
            if one.effect in stay or one.deployment in (HAPROXY, LOGS)
            else replace(one, effect="restarted", why=why)
            for one in found
        ]
    return found


def declared_settings(arguments: Mapping[str, Any]) -> tuple[str | None, Settings]:
    """The release that declares an application with these arguments, and its settings.

    Raises:
        ConfigError: they are wrong, or have a variable whose value only the process knows that builds them.
    """
    release, names, configuration = split_arguments(arguments)
    resolved = resolve(configuration, {})
    if resolved.wrong:
        raise ConfigError(f"{path_of(resolved.wrong[0][0])}: a variable of the process that builds the application")
    return release, parse(resolved.data).with_names(names)


def _models(settings: Settings) -> Iterator[tuple[ModelSettings, Names]]:
    """Each model, with the texts of its settings that came from variables."""
    names = settings.names.get("models", {})
    for index, model in enumerate(settings.models):
        yield model, names.get(str(index), {})


def _of_model(
    earlier: tuple[ModelSettings, Names] | None, later: tuple[ModelSettings, Names], *, on_cpu: bool
) -> Change:
    after, names = later
    deployment = deployment_of(after.name)
    if earlier is None:
        return Change(deployment, "added", "new in the configuration")
    before, old_names = earlier
    fields = tuple(_differences(before.model_dump(mode="json"), after.model_dump(mode="json"), old_names, names))
    if engine_version(before, on_cpu=on_cpu) != engine_version(after, on_cpu=on_cpu):
        return Change(deployment, "restarted", "an engine cannot take this over while it runs", fields)
    if before != after:
        return Change(deployment, "changed", "taken over without a restart", fields)
    return Change(deployment, "unchanged", "the same settings")


def _of_rest(before: Settings, after: Settings) -> Iterator[Change]:
    """Of what is outside the models: the routers, HAProxy and the quota actor."""
    old, new = (_without_models(one) for one in (before, after))
    fields = tuple(_differences(old, new, before.names, after.names))
    quota = tuple(one for one in fields if one.startswith("quota."))
    tls = tuple(one for one in fields if one.startswith("http.tls"))
    logs = tuple(one for one in fields if one.startswith("logs.format"))
    routers = tuple(one for one in fields if one not in quota + tls + logs)
    if before.router.cpus != after.router.cpus:
        yield Change(ROUTER, "restarted", "Ray gives CPUs to new processes only; new ones start first", routers)
    elif routers or before.models != after.models:
        yield Change(ROUTER, "changed", "taken over without a restart", routers)
    else:
        yield Change(ROUTER, "unchanged", "the same settings")
    if before.batch.workers or after.batch.workers:
        yield _of_workers(before, after, tuple(one for one in fields if one.startswith("batch.")))
    if tls:
        yield Change(HAPROXY, "later", "read when an instance starts (serve-app up)", tls)
    if logs:
        why = f"read when an instance starts (serve-app up); on a cluster {LOG_FORMAT} of each machine says it"
        yield Change(LOGS, "later", why, logs)
    if quota:
        yield Change(QUOTA, "later", "read when the quota actor starts, once in a cluster's life", quota)


def _without_models(settings: Settings) -> dict[str, Any]:
    """The settings outside the models; the targets of a name by model, so that a change names the weights alone."""
    found = settings.model_dump(mode="json", exclude={"models"})
    found["routes"] = {
        route["name"]: {
            "weights": {target["model"]: target["weight"] for target in route["targets"]},
            "fallbacks": route["fallbacks"],
            "shadow": route["shadow"],
        }
        for route in found["routes"]
    }
    return found


def _of_workers(before: Settings, after: Settings, fields: tuple[str, ...]) -> Change:
    if not before.batch.workers:
        return Change(BATCH_WORKER, "added", "new in the configuration", fields)
    if not after.batch.workers:
        return Change(BATCH_WORKER, "removed", "batches wait until there are workers again", fields)
    if before != after:
        return Change(BATCH_WORKER, "changed", "taken over without a restart", fields)
    return Change(BATCH_WORKER, "unchanged", "the same settings")


def _differences(before: Any, after: Any, old_names: Any, names: Any, at: str = "") -> Iterator[str]:
    """`a.b: 1 -> 2` for each value that differs, with `${NAME}` for one that came from a variable; of keys of clients
    only that they do."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() | after.keys()):
            inner = (before.get(name), after.get(name), _below(old_names, name), _below(names, name))
            yield from _differences(*inner, f"{at}.{name}" if at else name)
    elif before != after:
        old = _shown(with_names(before, old_names))
        new = _shown(with_names(after, names))
        note = ", which has another value now" if old == new else ""
        yield at if at == "auth.keys" else f"{at}: {old} -> {new}{note}"


def _below(names: Any, name: str) -> Any:
    """The names inside a value; of a scalar that gave a whole mapping, its own."""
    return names.get(name, {}) if isinstance(names, Mapping) else names


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return str({name: one for name, one in value.items() if one is not None})
    return "not set" if value is None else str(value)
