"""What a deploy would do to each deployment, and why: compared with the configuration that is deployed. Pure.

Invariant: a deployment is called restarted exactly where Serve would replace its replicas (`settings/versions.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from serve_app.engine import environment
from serve_app.errors import ConfigError
from serve_app.names import RELEASE, ROUTER, deployment_of
from serve_app.settings import ModelSettings, Settings, engine_version, parse, split_release

QUOTA = "GpuMemoryQuota"
What = Literal["added", "removed", "restarted", "changed", "unchanged", "later"]


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of one deployment. `fields`: the settings that differ, as `name: before -> after`.

    added, removed; restarted: its replicas are replaced; changed: taken over by what runs; later: not before it starts
    anew; unchanged.
    """

    deployment: str
    what: What
    why: str
    fields: tuple[str, ...] = ()


def changes(deployed: Mapping[str, Any] | None, wanted: Settings, platform: environment.Platform) -> list[Change]:
    """What a deploy of `wanted` would do.

    Args:
        deployed: the arguments of the running application; None: none runs.
        wanted: without keys in clear, as it would be deployed.

    Raises:
        ConfigError: what is deployed cannot be read: it is of another version of serve-app.
    """
    if deployed is None:
        told = [Change(deployment_of(model.name), "added", "nothing is deployed") for model in wanted.models]
        return [*told, Change(ROUTER, "added", "nothing is deployed")]
    release, configuration = split_release(deployed)
    try:
        before = parse(configuration)
    except ConfigError as error:
        raise ConfigError(f"the deployed configuration is of another version of serve-app: {error.message}") from None
    old = {model.name: model for model in before.models}
    wanted = wanted.model_copy(update={"models": tuple(_as_change(old.get(one.name), one) for one in wanted.models)})
    found = [_of_model(old.get(model.name), model, platform) for model in wanted.models]
    kept = {model.name for model in wanted.models}
    gone = "no longer configured: what runs is finished, new requests get 404"
    found += [Change(deployment_of(name), "removed", gone) for name in old if name not in kept]
    found += _of_rest(before, wanted)
    if release != RELEASE:
        why = f"serve-app {RELEASE} replaces {release or 'another release'}"
        found = [one if one.what in ("added", "removed") else replace(one, what="restarted", why=why) for one in found]
    return found


def _as_change(before: ModelSettings | None, after: ModelSettings) -> ModelSettings:
    """The model as a deploy declares it: one that is served keeps its number of replicas."""
    if before is None:
        return after
    first = before.replicas.initial_replicas
    return after.model_copy(update={"replicas": after.replicas.model_copy(update={"initial_replicas": first})})


def _of_model(before: ModelSettings | None, after: ModelSettings, platform: environment.Platform) -> Change:
    deployment = deployment_of(after.name)
    if before is None:
        return Change(deployment, "added", "new in the configuration")
    fields = tuple(_differences(before.model_dump(mode="json"), after.model_dump(mode="json")))
    on_cpu = platform == "cpu"
    if engine_version(before, on_cpu=on_cpu) != engine_version(after, on_cpu=on_cpu):
        return Change(deployment, "restarted", "an engine cannot take this over while it runs", fields)
    if before != after:
        return Change(deployment, "changed", "taken over without a restart", fields)
    return Change(deployment, "unchanged", "the same settings")


def _of_rest(before: Settings, after: Settings) -> Iterator[Change]:
    """Of what is outside the models: the routers, and the quota actor."""
    old, new = (one.model_dump(mode="json", exclude={"models"}) for one in (before, after))
    fields = tuple(_differences(old, new))
    quota = tuple(one for one in fields if one.startswith("quota."))
    routers = tuple(one for one in fields if one not in quota)
    if before.router.cpus != after.router.cpus:
        yield Change(ROUTER, "restarted", "Ray gives CPUs to new processes only; new ones start first", routers)
    elif routers or before.models != after.models:
        yield Change(ROUTER, "changed", "taken over without a restart", routers)
    else:
        yield Change(ROUTER, "unchanged", "the same settings")
    if quota:
        yield Change(QUOTA, "later", "read when the quota actor starts, once in a cluster's life", quota)


def _differences(before: Any, after: Any, at: str = "") -> Iterator[str]:
    """`a.b: 1 -> 2` for each value that differs; of keys of clients only that they do."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() | after.keys()):
            yield from _differences(before.get(name), after.get(name), f"{at}.{name}" if at else name)
    elif before != after:
        yield at if at == "auth.keys" else f"{at}: {_shown(before)} -> {_shown(after)}"


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)
