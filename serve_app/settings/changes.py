"""What a deploy would do to each deployment, and why: compared with the configuration that is deployed. Pure.

Invariant: a deployment is called restarted exactly where Serve would replace its replicas (`settings/versions.py`), and
where that is not known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from serve_app.errors import ConfigError
from serve_app.names import BATCH_WORKER, ROUTER, deployment_of
from serve_app.settings.model import ModelSettings
from serve_app.settings.serve_config import as_change, split_release
from serve_app.settings.settings import Settings, parse
from serve_app.settings.versions import engine_version

QUOTA, HAPROXY = "GpuMemoryQuota", "HAProxy"
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


def changes(deployed: Any, declared: Mapping[str, Any], *, on_cpu: bool) -> list[Change]:
    """What a deploy would do. Both are arguments of an application, see `serve_config.application`.

    Args:
        deployed: of the running application; None: none runs. Other tools may have declared anything: then all is
            restarted.
        declared: what would be deployed, without keys in clear.
        on_cpu: by vLLM's CPU build, see `engine_version`.
    """
    release, configuration = split_release(declared)
    wanted = parse(configuration)
    names = [*(deployment_of(model.name) for model in wanted.models), ROUTER]
    names += [BATCH_WORKER] if wanted.batch.workers else []
    if deployed is None:
        return [Change(name, "added", "nothing is deployed") for name in names]
    try:
        old_release, configuration = split_release(deployed)
        before = parse(configuration)
    except (TypeError, ValueError, ConfigError) as error:
        why = f"what is deployed cannot be read: {error.message if isinstance(error, ConfigError) else error}"
        return [Change(name, "restarted", why) for name in names]
    served = [model.name for model in before.models]
    before, wanted = (parse(as_change(one.model_dump(mode="json"), served)) for one in (before, wanted))
    old = {model.name: model for model in before.models}
    found = [_of_model(old.get(model.name), model, on_cpu=on_cpu) for model in wanted.models]
    kept = {model.name for model in wanted.models}
    gone = "no longer configured: what runs is finished, new requests get 404"
    found += [Change(deployment_of(name), "removed", gone) for name in old if name not in kept]
    found += _of_rest(before, wanted)
    if release != old_release:
        why = f"serve-app {release} replaces {old_release or 'another release'}"
        stay = {"added", "removed"}
        found = [
            one if one.what in stay or one.deployment == HAPROXY else replace(one, what="restarted", why=why)
            for one in found
        ]
    return found


def _of_model(before: ModelSettings | None, after: ModelSettings, *, on_cpu: bool) -> Change:
    deployment = deployment_of(after.name)
    if before is None:
        return Change(deployment, "added", "new in the configuration")
    fields = tuple(_differences(before.model_dump(mode="json"), after.model_dump(mode="json")))
    if engine_version(before, on_cpu=on_cpu) != engine_version(after, on_cpu=on_cpu):
        return Change(deployment, "restarted", "an engine cannot take this over while it runs", fields)
    if before != after:
        return Change(deployment, "changed", "taken over without a restart", fields)
    return Change(deployment, "unchanged", "the same settings")


def _of_rest(before: Settings, after: Settings) -> Iterator[Change]:
    """Of what is outside the models: the routers, HAProxy and the quota actor."""
    old, new = (one.model_dump(mode="json", exclude={"models"}) for one in (before, after))
    fields = tuple(_differences(old, new))
    quota = tuple(one for one in fields if one.startswith("quota."))
    tls = tuple(one for one in fields if one.startswith("http.tls"))
    routers = tuple(one for one in fields if one not in quota + tls)
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
    if quota:
        yield Change(QUOTA, "later", "read when the quota actor starts, once in a cluster's life", quota)


def _of_workers(before: Settings, after: Settings, fields: tuple[str, ...]) -> Change:
    if not before.batch.workers:
        return Change(BATCH_WORKER, "added", "new in the configuration", fields)
    if not after.batch.workers:
        return Change(BATCH_WORKER, "removed", "batches wait until there are workers again", fields)
    if before != after:
        return Change(BATCH_WORKER, "changed", "taken over without a restart", fields)
    return Change(BATCH_WORKER, "unchanged", "the same settings")


def _differences(before: Any, after: Any, at: str = "") -> Iterator[str]:
    """`a.b: 1 -> 2` for each value that differs; of keys of clients only that they do."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() | after.keys()):
            yield from _differences(before.get(name), after.get(name), f"{at}.{name}" if at else name)
    elif before != after:
        yield at if at == "auth.keys" else f"{at}: {_shown(before)} -> {_shown(after)}"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return str({name: one for name, one in value.items() if one is not None})
    return "not set" if value is None else str(value)
